"""Numbers arrive, from memory that was taken at the start, and none is overwritten on its way."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support.cuda_twin import NoEvent, TwinCuda, TwinEvent, TwinStream, twin_of_cuda

from kvcascade.handlers.device.number_uploads import HOST_BUFFERS, UPLOAD_OPERATIONS, NumberUploads
from kvcascade.handlers.device.stream_feed import OUTSTANDING_MAX

CPU = torch.device("cpu")


def numbers(*values: int) -> np.typing.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def test_what_was_uploaded_is_there_until_the_next_one() -> None:
    uploads = NumberUploads(4, CPU, NoEvent)
    first = uploads.upload(numbers(1, 2, 3))
    assert first.tolist() == [1, 2, 3]
    second = uploads.upload(numbers(7, 8, 9, 10))
    assert second.tolist() == [7, 8, 9, 10]
    assert first.data_ptr() == second.data_ptr()


def test_a_host_buffer_is_used_again_only_after_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with twin_of_cuda(monkeypatch) as cuda:
        stream = TwinStream()
        uploads = NumberUploads(1, CPU, TwinEvent, host_buffers=3)
        seen: list[list[int]] = []

        def use(uploaded: torch.Tensor) -> None:
            seen.append(uploaded.tolist())

        with cuda.on(stream):
            for value in range(20):
                uploaded = uploads.upload(numbers(value))
                stream.enqueue("use", partial(use, uploaded))
        assert stream.outstanding == 3 * (UPLOAD_OPERATIONS + 1) + 1, "copies alone were waited for"
        stream.run()
    assert seen == [[value] for value in range(20)]


def test_a_short_queue_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is three more operations at least, so no more uploads fit into the queue."""
    with twin_of_cuda(monkeypatch) as cuda:
        stream = TwinStream()
        uploads = NumberUploads(1, CPU, TwinEvent)
        with cuda.on(stream):
            while stream.outstanding < OUTSTANDING_MAX:
                uploads.upload(numbers(1))
                for _ in range(3):
                    stream.enqueue("use", lambda: None)
            uploads.upload(numbers(1))
        assert stream.outstanding > OUTSTANDING_MAX
    assert TwinCuda.now is None
    assert HOST_BUFFERS < OUTSTANDING_MAX
