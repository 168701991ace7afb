"""Pinning the arena in pieces."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.tensor_operations import tensor_operations

from kvcascade.handlers.device import host_register
from kvcascade.handlers.device.host_register import HostRegistration, cuda_registration


class FakeDriver:
    """A CUDA runtime that pins up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, length: int) -> str | None:
        self.calls += 1
        if sum(self.pinned.values()) + length > self.limit:
            return "CUDA error 304"
        self.pinned[address] = length
        return None

    def unregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_register, "REGISTER_PIECE_BYTES", 10_000)


def test_pieces_are_bounded_and_end_on_slots() -> None:
    driver = FakeDriver(1 << 30)
    registration = HostRegistration(driver.register, driver.unregister)
    assert registration.pin(4096, 7, 4096)
    assert registration.is_pinned
    assert driver.pinned == {4096: 8192, 12288: 8192, 20480: 8192, 28672: 4096}
    registration.release()
    registration.release()
    assert driver.pinned == {} and not registration.is_pinned


def test_a_slot_larger_than_a_piece_is_a_piece() -> None:
    driver = FakeDriver(1 << 30)
    registration = HostRegistration(driver.register, driver.unregister)
    assert registration.pin(0, 3, 20_480)
    assert driver.pinned == {0: 20_480, 20_480: 20_480, 40_960: 20_480}


def test_a_failure_undoes_everything_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(20_000)
    registration = HostRegistration(driver.register, driver.unregister)
    assert not registration.pin(4096, 7, 4096)
    assert driver.pinned == {} and not registration.is_pinned
    (record,) = caplog.records
    assert "at byte 16384 of 28672: CUDA error 304; transfers go on" in record.message
    assert driver.calls == 3, "no further piece is tried"


class FakeRuntime:
    """libcudart as torch shows it."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.pinned: list[int] = []

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        if not self.error:
            self.pinned.append(address)
        return self.error

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory", 304: "OS call failed", 801: "operation not supported"}[error]

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (0, ()),
        (2, ("out of memory (CUDA error 2)", "ulimit -l")),
        (304, ("OS call failed (CUDA error 304)",)),
        (801, ("operation not supported (CUDA error 801)", "arena_dir")),
    ],
)
def test_what_the_cuda_runtime_says(
    error: int,
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = FakeRuntime(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    registration = cuda_registration(torch.device("cpu"))
    assert registration.pin(4096, 3, 4096) is registration.is_pinned is (not error)
    assert all(part in caplog.text for part in parts) and bool(caplog.text) is bool(error)
    assert ("ulimit" in caplog.text) is (error == 2), "what the driver said is not covered up"
    registration.release()
    assert runtime.pinned == []


FILLED_BY_A_KERNEL = (torch.ops.aten.ones.default, torch.ops.aten.fill_.Scalar)
"""Functions that launch a kernel in every torch. `zeros` and `zero_` do not after 2.13."""


def test_the_error_of_a_refused_call_is_not_left_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, taken = FakeRuntime(304), list[Any]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda address: 713)
    registration = cuda_registration(torch.device("cpu"))

    def launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in FILLED_BY_A_KERNEL:
            return func(*args, **kwargs)
        taken.append(func)
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    with tensor_operations(launch):
        assert not registration.pin(4096, 3, 4096)
        assert len(taken) == 1
        runtime.error = 0
        assert registration.pin(4096, 3, 4096) and len(taken) == 1
        registration.release()
        assert len(taken) == 1 + len(runtime.pinned)
