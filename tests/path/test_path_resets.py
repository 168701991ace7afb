"""What a reset leaves to the engines of later: nothing from before, nothing of changed weights."""

from __future__ import annotations

import errno
import random

import pytest
from support.path_rig import PathRig, RigNode

from kvcascade.tiers.nvme.path.path_messages import Committed, Epoch, Reset

BLOCKS = list(range(8))


def reset(node: RigNode) -> None:
    node.rig.send(node.client, Reset(1))
    node.rig.step()


def restart(rig: PathRig, *, is_clean: bool) -> RigNode:
    """Every engine ends, and another one starts."""
    rig.close() if is_clean else rig.kill()
    rig.start()
    return RigNode(rig)


@pytest.mark.parametrize("is_clean", [True, False], ids=["closed", "killed"])
def test_what_is_stored_after_a_reset_is_not_for_the_next_engine(is_clean: bool) -> None:
    """It may be of weights that were updated in place: the next one loads those of the disk."""
    rig = PathRig()
    node = RigNode(rig)
    node.store(BLOCKS)
    for _ in range(2):
        reset(node)
        assert node.held(BLOCKS) == []
        assert node.store(BLOCKS[:4]) == [Committed.OK] * 4
    node = restart(rig, is_clean=is_clean)
    assert node.held(BLOCKS) == []
    assert node.store(BLOCKS[:4]) == [Committed.OK] * 4
    for again in (is_clean, not is_clean):
        node = restart(rig, is_clean=again)
        assert node.held(BLOCKS) == BLOCKS[:4], "an engine that was not reset leaves its blocks"


@pytest.mark.parametrize("seed", range(6))
def test_a_reset_that_was_answered_outlives_a_loss_of_power(seed: int) -> None:
    rng = random.Random(seed)
    rig = PathRig(durability="power")
    node = RigNode(rig)
    node.store(BLOCKS)
    reset(node)
    rig.lose_power(rng)
    rig.start()
    assert RigNode(rig).held(BLOCKS) == []


def test_an_engine_that_joins_engines_that_were_reset_is_told() -> None:
    rig = PathRig()
    node = RigNode(rig)
    assert node.welcome is not None and node.welcome.notes == []
    reset(node)
    joined = RigNode(rig)
    assert joined.welcome is not None
    (note,) = joined.welcome.notes
    assert "reset this engine" in note


@pytest.mark.parametrize("is_there", [True, False], ids=["it is there", "it ended"])
def test_who_comes_back_after_another_engine_started_may_have_other_weights(is_there: bool) -> None:
    """Its node died after a reset. The other engine found no engine, so it began an epoch."""
    rig = PathRig()
    reset(RigNode(rig))
    started = restart(rig, is_clean=False)
    assert started.welcome is not None and started.welcome.notes == []
    started.store(BLOCKS[:4])
    if not is_there:
        rig.writer.disconnect(started.client)
    back = RigNode(rig, epoch=1)
    assert back.welcome is not None
    (note,) = back.welcome.notes
    assert "started" in note
    if not is_there:
        assert back.held(BLOCKS) == [], "they are of the weights of the disk"
    back.store(BLOCKS[4:])
    joined = RigNode(rig)
    assert joined.welcome is not None and "reset this engine" in joined.welcome.notes[0]
    assert restart(rig, is_clean=True).held(BLOCKS) == []


def test_who_comes_back_needs_no_room_for_a_record() -> None:
    """Another engine was reset meanwhile, and the disk is full now."""
    rig = PathRig()
    node, other = RigNode(rig), RigNode(rig)
    rig.writer.disconnect(other.client)
    reset(node)
    rig.fs.fail("pwritev", errno.ENOSPC)
    back = RigNode(rig, epoch=0)
    assert back.welcome is not None and back.welcome.epoch == 1


def epoch_after_starts_without_room(rig: PathRig, times: int) -> int:
    """An engine comes again and again; its epoch cannot be recorded."""
    rig.fs.fail("pwritev", errno.ENOSPC, times=times)
    for _ in range(times):
        node = RigNode(rig)
        assert "No space" in node.refused[0].text
        rig.writer.disconnect(node.client)
        rig.step(seconds=1.0)
    rig.fs.heal()
    (namespace,) = rig.writer.namespaces.values()
    return namespace.epoch


def test_a_start_that_cannot_be_recorded_resets_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = PathRig()
    node, reader = RigNode(rig), RigNode(rig, is_reader=True)
    reset(node)
    node.store(BLOCKS)
    rig.writer.disconnect(node.client)
    rig.take(reader.client, Epoch)
    assert epoch_after_starts_without_room(rig, 10) == 2, "one reset for all of them"
    assert caplog.text.count("begins empty") == 1
    started = RigNode(rig)
    assert started.welcome is not None and started.welcome.epoch == 2
    assert [each.epoch for each in rig.take(reader.client, Epoch)] == [2]
    started.store(BLOCKS)
    assert restart(rig, is_clean=False).held(BLOCKS) == BLOCKS, "it is recorded"


def test_an_epoch_that_an_engine_knows_is_no_start_of_another() -> None:
    """It comes back after its weights were updated; the other one has those of the disk."""
    rig = PathRig()
    node = RigNode(rig)
    node.store(BLOCKS)  # a namespace without a segment would be removed
    reset(node)
    rig.writer.disconnect(node.client)
    assert epoch_after_starts_without_room(rig, 2) == 2, "it is empty, but the engine knows it"
    back = RigNode(rig, epoch=1)
    assert back.welcome is not None and back.welcome.epoch == 2
    reset(back)
    rig.writer.disconnect(back.client)
    started = RigNode(rig)
    assert started.welcome is not None and started.welcome.epoch == 4
    rig.writer.disconnect(started.client)
    back = RigNode(rig, epoch=3)
    assert back.welcome is not None and "started" in back.welcome.notes[0]


def test_a_start_that_drops_blocks_of_after_a_reset_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = PathRig()
    node = RigNode(rig)
    reset(node)
    assert caplog.text == ""
    restart(rig, is_clean=True)
    assert caplog.text == "", "it was empty"
    node = RigNode(rig)
    reset(node)
    node.store(BLOCKS)
    node = restart(rig, is_clean=True)
    assert "begins empty" in caplog.text
    assert node.welcome is not None and node.welcome.notes == [], "it is alone"
