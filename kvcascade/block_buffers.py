"""Buffers of the Python API as bytes: numpy arrays, torch tensors on the CPU, and plain buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ConfigError
from .tiers.nvme.segments.format import MAX_KEY_BYTES

Bytes = npt.NDArray[np.uint8]


def checked_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Return the keys as plain bytes. Raises `ConfigError` for one that cannot be stored.

    Messages can hold no key of a subclass of bytes, such as the elements of a numpy array.
    """
    if not isinstance(keys, Iterable):
        raise ConfigError(f"keys is a {type(keys).__name__}; give a list of keys")
    found = list(keys)
    for at, key in enumerate(found):
        if isinstance(key, bytes) and type(key) is not bytes:
            found[at] = key = bytes(key)
        if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
            shown = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
            raise ConfigError(f"keys[{at}] is {shown}; give bytes, from 1 to {MAX_KEY_BYTES}")
    return found


def checked_buffers(
    buffers: Sequence[object], count: int, block_bytes: int, *, is_target: bool = False
) -> list[Bytes]:
    """Return a view of the bytes of each buffer, without copying.

    Each buffer holds `block_bytes` contiguous bytes; with `is_target` it can be written. Raises
    `ConfigError` if one does not, or if there are not `count` of them.
    """
    if not isinstance(buffers, Sized):
        kind = type(buffers).__name__
        raise ConfigError(f"buffers is a {kind}; give a list with one buffer for each key")
    if len(buffers) != count:
        raise ConfigError(f"{len(buffers)} buffers for {count} keys; give one for each key")
    return [
        _checked(f"buffers[{at}]", buffer, block_bytes, is_target)
        for at, buffer in enumerate(buffers)
    ]


def _checked(where: str, buffer: object, block_bytes: int, is_target: bool) -> Bytes:
    view = _bytes_of(where, buffer)
    if len(view) != block_bytes:
        raise ConfigError(f"{where} has {len(view)} bytes; a block has {block_bytes}")
    if is_target and not view.flags.writeable:
        raise ConfigError(f"{where} is read-only; give a buffer that can be written")
    return view


def _bytes_of(where: str, buffer: Any) -> Bytes:
    torch = sys.modules.get("torch")  # who gives a tensor has imported it
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _bytes_of_tensor(where, buffer, torch)
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ConfigError(f"{where} is not contiguous; give numpy.ascontiguousarray({where})")
        if buffer.dtype.hasobject:
            raise ConfigError(f"{where} holds Python objects; give an array of numbers")
        # Types that export no buffer, too. A matrix would keep two dimensions.
        return np.asarray(buffer).reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(buffer, np.uint8)
    except TypeError:
        pass
    except (ValueError, BufferError):
        raise ConfigError(f"{where} is empty or not contiguous; copy it") from None
    kind = type(buffer).__name__
    raise ConfigError(f"{where} is a {kind}; give a numpy array, a torch tensor or bytes")


def _bytes_of_tensor(where: str, tensor: Any, torch: Any) -> Bytes:
    if tensor.device.type != "cpu":
        raise ConfigError(f"{where} is on {tensor.device}; copy it to the CPU")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{where} is no dense tensor; give {where}.to_dense()")
    if not tensor.is_contiguous():
        raise ConfigError(f"{where} is not contiguous; give {where}.contiguous()")
    try:
        flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    except RuntimeError:  # its memory holds other numbers than it shows, or there is none
        remedy = f"give {where}.resolve_conj().resolve_neg(), or a plain tensor"
        raise ConfigError(f"{where} cannot be viewed as bytes; {remedy}") from None
    return flat
