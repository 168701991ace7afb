"""Scattered copies in few system calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.handlers.device import memcopy
from kvcascade.handlers.device.memcopy import copy_scattered, cut_long


def addresses(data: np.typing.NDArray[np.uint8], offsets: list[int]) -> np.typing.NDArray[np.int64]:
    return data.ctypes.data + np.array(offsets, dtype=np.int64)


def test_copies_more_pieces_than_fit_into_one_call() -> None:
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 5000, dtype=np.uint8)
    target = np.zeros(5000, dtype=np.uint8)
    order = rng.permutation(5000)
    ones = np.ones(5000, dtype=np.int64)
    copy_scattered(addresses(target, order.tolist()), addresses(source, list(range(5000))), ones)
    assert (target[order] == source).all()


class Writev:
    """The system's call, or one that copies nothing and returns a wrong number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, returns: int | None = None) -> None:
        self.given: list[object] = []
        self._real = memcopy._writev
        self._returns = returns
        monkeypatch.setattr(memcopy, "_writev", self)

    def __call__(self, *given: object) -> int:
        self.given.append(given)
        return int(self._real(*given)) if self._returns is None else self._returns


def test_few_long_pieces_need_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcopy, "LONG_BYTES", 16)
    writev = Writev(monkeypatch)
    source = np.arange(100, dtype=np.uint8)
    target = np.zeros(100, dtype=np.uint8)
    at, size = [60, 0, 30], np.array([20, 16, 17], dtype=np.int64)
    copy_scattered(addresses(target, at), addresses(source, [1, 40, 70]), size)
    expected = np.zeros(100, dtype=np.uint8)
    expected[60:80], expected[:16], expected[30:47] = source[1:21], source[40:56], source[70:87]
    assert (target == expected).all() and not writev.given
    size[1] = 15
    copy_scattered(addresses(target, at), addresses(source, [1, 40, 70]), size)
    assert len(writev.given) == 1, "a short one is for the call"


def test_nothing_to_copy_is_fine() -> None:
    none = np.zeros(0, dtype=np.int64)
    copy_scattered(none, none, none)


@pytest.mark.parametrize("returns", [-1, 0, 7], ids=["refused", "nothing", "a part"])
def test_what_the_call_does_not_copy_is_copied_piece_by_piece(
    returns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sandboxes forbid the call."""
    writev = Writev(monkeypatch, returns)
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 5000, dtype=np.uint8)
    target, order = np.zeros(5000, dtype=np.uint8), rng.permutation(2500) * 2
    twos = np.full(2500, 2, dtype=np.int64)
    copy_scattered(addresses(target, order.tolist()), addresses(source, order.tolist()), twos)
    assert (target == source).all() and len(writev.given) == 3


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 20))
def test_long_pieces_are_cut_without_loss(sizes: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memcopy, "PIECE_BYTES_MAX", most)
        starts = (np.arange(len(sizes)) * 1000).astype(np.int64)
        to, come, size = cut_long(starts, starts + 7, np.array(sizes, dtype=np.int64))
    whole = [1000 * i + k for i, length in enumerate(sizes) for k in range(length)]
    cut = [
        a + k for a, length in zip(to.tolist(), size.tolist(), strict=True) for k in range(length)
    ]
    assert cut == whole
    assert (come - to == 7).all()
    assert (size <= most).all()
