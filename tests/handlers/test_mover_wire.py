"""Frames and messages between the scheduler's process and its mover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nvme_rig import key

from kvcascade.handlers.node.mover_wire import (
    Answer,
    LoadJob,
    Ready,
    RemoveJob,
    RepairJob,
    Setup,
    StoreJob,
    from_mover,
    pack_removals,
    to_mover,
    unpack_removals,
)
from kvcascade.handlers.node.path_wire import (
    pack_outcomes,
    pack_slots,
    unpack_outcomes,
    unpack_slots,
)
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.attach import Attachment
from kvcascade.tiers.nvme.index.index_port import Removal
from kvcascade.tiers.nvme.path.frames import MAX_FRAME_BYTES, FrameReader, WireError, frame

SLOTS = pack_slots(np.array([3, 1, 2**31 - 1], dtype=np.int32))
REMOVALS = [Removal(key(7), 5, 1 << 60)]
ATTACHMENT = Attachment(
    "/index", 1 << 26, "/owners", 3, 64, ("/a", "/b"), 4096, 8, "ab" * 32, "power", 1 << 41
)
TO_MOVER = [
    Setup(ATTACHMENT, 4096, 8192, 10, 2),
    Setup(ATTACHMENT, 4096, 8192, 10, 2, has_prefault=True, is_arena_huge=True),
    StoreJob(1, (key(1), key(2), key(3)), SLOTS, SLOTS, 7, pack_removals(REMOVALS)),
    LoadJob(2, (key(1), b"", b"\xff"), SLOTS, SLOTS, (b"value", None, b"")),
    LoadJob(3, (), b"", b"", None),
    RemoveJob(4, pack_removals(REMOVALS), 9),
    RepairJob(5, (1, 2, 3)),
]
FROM_MOVER = [
    Ready(),
    Answer(1, b"\1\0", 0.25, pack_removals(REMOVALS), {"corrupt": 1}, 4096),
    Answer(2),
]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_messages_come_through_whatever_the_stream_does(cuts: list[int]) -> None:
    stream = b"".join(map(frame, TO_MOVER))
    reader, got, at = FrameReader(), [], 0
    for size in [*cuts, len(stream)]:
        got += [to_mover.decode(body) for body in reader.feed(stream[at : at + size])]
        at += size
    assert got == TO_MOVER


def test_answers_come_through() -> None:
    bodies = FrameReader().feed(b"".join(map(frame, FROM_MOVER)))
    assert [from_mover.decode(body) for body in bodies] == FROM_MOVER


def test_a_frame_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(WireError):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


def test_parts_of_messages_come_back() -> None:
    assert unpack_slots(SLOTS).tolist() == [3, 1, 2**31 - 1]
    assert unpack_removals(pack_removals(REMOVALS)) == tuple(REMOVALS)
    outcomes = tuple(BlockOutcome)
    assert unpack_outcomes(pack_outcomes(outcomes), len(outcomes)) == list(outcomes)
    assert unpack_outcomes(b"", 2) == [BlockOutcome.OK] * 2


@pytest.mark.parametrize(("codes", "n"), [(b"\0", 2), (b"\xff\0", 2)])
def test_outcomes_that_cannot_be_meant_are_refused(codes: bytes, n: int) -> None:
    with pytest.raises(WireError):
        unpack_outcomes(codes, n)
