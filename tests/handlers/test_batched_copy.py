"""The binding of the driver's batched copy, without a driver."""

from __future__ import annotations

import ctypes
from struct import pack
from typing import Any

import numpy as np
import pytest

from kvcascade.handlers.device.batched_copy import (
    DriverBatch,
    NoBatchedCopyError,
    SourceOrder,
    driver_batch,
)


def test_without_a_driver_it_says_so() -> None:
    with pytest.raises(NoBatchedCopyError, match="no cuGetProcAddress_v2"):
        driver_batch("no-such-driver.so")


def test_the_call_that_failed_is_named() -> None:
    given: list[tuple[Any, ...]] = []

    def call(*arguments: Any) -> int:
        given.append(arguments)
        ctypes.c_size_t.from_address(arguments[7]).value = 2
        return 1

    some, batch = np.arange(3, dtype=np.uint64), DriverBatch(call, lambda: 99)
    with pytest.raises(RuntimeError, match="error 1 at copy 2"):
        batch(some, some, some, SourceOrder.ANY)
    ((*_, count, attributes, _, kinds, _, stream),) = given
    assert (count, kinds, stream) == (3, 1, 99)
    said = ctypes.string_at(attributes, 24)
    assert said == pack("=6I", 3, 0, 0, 0, 0, 0), "pinned memory is read in any order"


@pytest.mark.parametrize("blamed", [None, 2**64 - 1])
def test_no_copy_is_named_where_the_driver_names_none(blamed: int | None) -> None:
    """CUDA's header says SIZE_MAX; an error of earlier work may leave the number as it was."""

    def call(*arguments: Any) -> int:
        if blamed is not None:
            ctypes.c_size_t.from_address(arguments[7]).value = blamed
        return 700

    some = np.arange(3, dtype=np.uint64)
    with pytest.raises(RuntimeError, match="error 700$"):
        DriverBatch(call, lambda: 99)(some, some, some, SourceOrder.STREAM)
