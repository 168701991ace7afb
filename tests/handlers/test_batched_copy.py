"""The binding of the driver's batched copy, without a driver."""

from __future__ import annotations

import ctypes
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
    assert ctypes.c_uint.from_address(attributes).value == 3, "pinned memory is read in any order"
