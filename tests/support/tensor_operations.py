"""Every operation on tensors that is called in a block of code, seen from below torch's front."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from torch.utils._python_dispatch import TorchDispatchMode

Handle = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the operation and its arguments; answers what the caller gets."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, handle: Handle) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, kwargs or {})


def tensor_operations(handle: Handle) -> AbstractContextManager[None]:
    """Operations go through `handle` instead of being done."""
    return cast(AbstractContextManager[None], _Operations(handle))
