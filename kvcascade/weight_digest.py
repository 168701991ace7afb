"""A digest of weight files, from samples of their bytes.

Weights are identified without reading all of them: by configuration, code and, for every tensor,
its name, type, shape and a few samples of its bytes. Training or merging changes nearly every
number of a tensor, of an embedding whole rows, and of fused experts the slice of one. So samples
reveal it; sizes and headers do not. Small tensors of a model with experts are read whole: a few
numbers of a router may change alone. In files of torch, which are zip files, each tensor has a
checksum instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import BadZipFile, ZipFile

SAMPLES_PER_TENSOR = 3
MAX_ROWS = 1 << 18
"""Limit on the samples of an embedding, of which each row has one."""
MAX_SLICES = 1024
"""Limit on the samples of a tensor of at least three dimensions, of which each slice of the first
one has a sample; also of the rows of other tensors that hold a part of every expert."""
MAX_WHOLE_BYTES = 64 << 10
"""Size up to which tensors of a model with experts are read whole."""
SAMPLE_BYTES = 256
CLOSE_BYTES, READ_BYTES = 32 << 10, 4 << 20
"""Samples at most so far apart are read together, up to so many bytes at a time."""
SAMPLES_PER_OPAQUE_FILE = 256
"""Samples of a file whose tensors are not known; they are spread evenly."""
MAX_HEADER_BYTES = 100 << 20
"""Limit on the header of a file in the safetensors or GGUF format."""

_GGUF_NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the kinds of numbers in the metadata of the GGUF format."""
_GGUF_TEXT, _GGUF_LIST = 8, 9

_EXPERTS = re.compile(r"expert|router|moe")
"""Matches names of tensors that only models with experts have."""
_ONE_EXPERT = re.compile(r"experts?[._]\d")
_OF_EVERY_EXPERT = re.compile(r"(?<!shared_)expert|router|\bgate\.|gate_inp")
"""Matches names of tensors with a part of every expert, if they are not those of one expert."""


class _Tensor(NamedTuple):
    """A tensor in a file of weights."""

    name: str
    shape: Sequence[int]
    start: int
    """Offset of the first byte, behind the header."""
    end: int


class _Layout(NamedTuple):
    """The header of a safetensors file."""

    header: bytes
    tensors: Sequence[_Tensor] | None
    """None if the header is not understood."""


def digest_files(files: list[Path], folder: Path) -> str:
    """Return a digest of these files. Raises `OSError` if one cannot be read."""
    digest = hashlib.sha256()
    layouts = {path: _layout(path) for path in files if path.suffix == ".safetensors"}
    has_experts = any(map(_has_experts, layouts.values()))
    for path in files:
        name, size = str(path.relative_to(folder)), path.stat().st_size
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
        for piece in _pieces(path, size, layouts.get(path), has_experts):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path, size: int, layout: _Layout | None, has_experts: bool) -> Iterator[bytes]:
    """Yield the pieces of a file that go into the digest; `layout`: that of a safetensors file."""
    if path.suffix in (".json", ".py"):
        yield path.read_bytes()
        return
    offsets: list[int] | None = None
    with path.open("rb") as file:
        if layout is not None:
            yield layout.header
            offsets = _tensor_offsets(layout, size, has_experts)
        elif path.suffix == ".gguf":
            raw, offsets = _gguf_header(file, size)
            yield raw
        elif path.suffix != ".safetensors":
            yield _records(file)
        if offsets is None:
            offsets = _spread(0, size, SAMPLES_PER_OPAQUE_FILE)
        yield from _samples(file.fileno(), offsets)


def _records(file: BinaryIO) -> bytes:
    """Return names, checksums and sizes of the records of a zip file, as torch writes one for each
    tensor; nothing for another file, such as those of torch before 1.6."""
    try:
        with ZipFile(file) as archive:
            entries = [(each.filename, each.CRC, each.file_size) for each in archive.infolist()]
    except (BadZipFile, NotImplementedError, ValueError, struct.error):
        return b""
    return json.dumps(entries).encode()


def _samples(file: int, offsets: Sequence[int]) -> Iterator[bytes]:
    """Yield the samples at ascending offsets.

    Close ones are read together: a disk that has nothing of the file in memory would take minutes
    for the rows of an embedding.
    """
    at = 0
    while at < len(offsets):
        first = offsets[at]
        end = at + 1
        while end < len(offsets) and offsets[end] - offsets[end - 1] <= CLOSE_BYTES:
            if offsets[end] - first > READ_BYTES:
                break
            end += 1
        data = os.pread(file, offsets[end - 1] + SAMPLE_BYTES - first, first)
        for offset in offsets[at:end]:
            yield data[offset - first : offset - first + SAMPLE_BYTES]
        at = end


def _layout(path: Path) -> _Layout | None:
    """Return the header of a safetensors file, or None if it cannot be one."""
    with path.open("rb") as file:
        prefix, size = file.read(8), path.stat().st_size
        if len(prefix) < 8:
            return None
        (length,) = struct.unpack("<Q", prefix)
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            return None
        header = file.read(length)
    return _Layout(header, _tensors(header))


def _tensors(header: bytes) -> list[_Tensor] | None:
    """Return the tensors of a safetensors file in the order of their bytes; None if unknown."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = []
        for name, entry in entries.items():
            start, end = map(int, entry["data_offsets"])
            tensors.append(_Tensor(name, [int(length) for length in entry["shape"]], start, end))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def _has_experts(layout: _Layout | None) -> bool:
    """Return True if a file has tensors of experts, whether fused or one by one."""
    tensors = (layout.tensors if layout else None) or ()
    return any(_is_fused(tensor) or _EXPERTS.search(tensor.name) for tensor in tensors)


def _is_fused(tensor: _Tensor) -> bool:
    """Return True for a tensor of at least three dimensions, which may hold several matrices."""
    return len(tensor.shape) > 2 and not _is_embedding(tensor.name)


def _is_embedding(name: str) -> bool:
    return "emb" in name or "wte" in name


def _tensor_offsets(layout: _Layout, size: int, has_experts: bool) -> list[int] | None:
    """Return the offsets of samples: the start, the middle and the end of every tensor, or more.

    Embeddings have one in each row: a training may change those of a few words alone. So have fused
    experts in each slice.
    """
    if layout.tensors is None:
        return None
    data_start, offsets = 8 + len(layout.header), list[int]()
    for tensor in layout.tensors:
        start, end = data_start + tensor.start, min(data_start + tensor.end, size)
        offsets += _spread(min(start, size), end, _samples_of(tensor, has_experts))
    return offsets


def _samples_of(tensor: _Tensor, has_experts: bool) -> int:
    """Return the number of samples of a tensor; `has_experts`: of a model that has experts."""
    rows = tensor.shape[0] if tensor.shape else 0
    if _is_embedding(tensor.name):
        return max(min(rows, MAX_ROWS), SAMPLES_PER_TENSOR)
    whole = -(-(tensor.end - tensor.start) // SAMPLE_BYTES)
    n = SAMPLES_PER_TENSOR
    if len(tensor.shape) > 2:
        n = max(n, min(rows, whole, MAX_SLICES))
    if has_experts and not _ONE_EXPERT.search(tensor.name):
        if whole <= MAX_WHOLE_BYTES // SAMPLE_BYTES:
            n = max(n, whole)
        elif _OF_EVERY_EXPERT.search(tensor.name):
            n = max(n, min(rows, MAX_SLICES))
    return n


class _GgufReader:
    """Reads the header of a GGUF file; the first `at` bytes are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.at = 0

    def take(self, n: int) -> bytes:
        """Return the next bytes. Raises `ValueError` if the header cannot be so long."""
        self.at += n
        data = self._file.read(n) if self.at <= MAX_HEADER_BYTES else b""
        if len(data) < n:
            raise ValueError("no header")
        return data

    def number(self, n_bytes: int = 8) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def value(self, kind: int) -> bytes:
        """Return a value of the metadata; of a list of texts or lists nothing."""
        if kind == _GGUF_TEXT:
            return self.take(self.number())
        if kind != _GGUF_LIST:
            return self.take(_GGUF_NUMBERS[kind])
        kind, n = self.number(4), self.number()
        if kind in _GGUF_NUMBERS:
            return self.take(n * _GGUF_NUMBERS[kind])
        for _ in range(n):
            self.value(kind)
        return b""


def _gguf_header(file: BinaryIO, size: int) -> tuple[bytes, list[int] | None]:
    """Return the header of a GGUF file and the offsets of samples; without a header (b"", None)."""
    reader, alignment = _GgufReader(file), 32
    found: list[tuple[int, str, list[int]]] = []
    try:
        if reader.take(4) != b"GGUF" or reader.number(4) not in (2, 3):
            return b"", None
        tensors, options = reader.number(), reader.number()
        for _ in range(options):
            key, value = reader.value(_GGUF_TEXT), reader.value(reader.number(4))
            if key == b"general.alignment":
                alignment = max(1, int.from_bytes(value, "little"))
        for _ in range(tensors):
            name = reader.value(_GGUF_TEXT).decode("utf-8", "replace")
            shape = [reader.number() for _ in range(reader.number(4))]
            reader.take(4)  # the kind of its numbers
            found.append((reader.number(), name, shape[::-1]))
    except (ValueError, KeyError, RecursionError):
        return b"", None
    data_start = -(-reader.at // alignment) * alignment
    found.sort()
    starts = [start for start, _, _ in found]
    if data_start + max(starts, default=0) > size:  # the file was cut
        return b"", None
    offsets: list[int] = []
    for (start, name, shape), end in zip(found, [*starts[1:], size - data_start], strict=False):
        n = _samples_of(_Tensor(name, shape, start, end), has_experts=True)
        offsets += _spread(data_start + start, data_start + end, n)
    return os.pread(file.fileno(), reader.at, 0), offsets


def _spread(start: int, end: int, n: int) -> list[int]:
    """Return `n` evenly spread offsets from `start` to the last sample before `end`."""
    last = max(start, end - SAMPLE_BYTES)
    return [start + (last - start) * i // max(1, n - 1) for i in range(n)]
