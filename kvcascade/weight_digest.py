"""A digest of weight files, from samples of their bytes.

Weights are identified without reading all of them: by configuration, code and, for every tensor,
its name, type, shape and a few samples of its bytes. Training or merging changes nearly every
number of a tensor, of an embedding whole rows, and of fused experts the slice of one. So samples
reveal it; sizes and headers do not. Small tensors are read whole: a few numbers of a router may
change alone. In files of torch, which are zip files, each tensor has a checksum instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import BadZipFile, ZipFile

SAMPLES_PER_TENSOR = 3
MAX_ROWS = 1 << 18
"""Limit on the samples of an embedding, of which each row has one. Rows lie along the last
dimension: tables of positions have others before it."""
MAX_SLICES = 1024
"""Limit on the samples of a tensor of at least three dimensions, of which each slice of the first
one has a sample; also of the rows of other tensors that hold a part of every expert."""
MAX_WHOLE_BYTES = 64 << 10
"""Size up to which tensors are read whole, except those of one expert of many."""
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

_ONE_EXPERT = re.compile(r"experts?[._]\d")
_OF_EVERY_EXPERT = re.compile(r"(?<!shared_)expert|router|\bgate\.|gate_inp")
"""Matches names of tensors with a part of every expert, if they are not those of one expert."""


class _Tensor(NamedTuple):
    """A tensor in a file of weights."""

    name: str
    shape: Sequence[int]
    start: int
    """Offset of the first byte in the file."""
    end: int


def digest_files(files: list[Path], folder: Path) -> str:
    """Return a digest of these files. Raises `OSError` if one cannot be read."""
    digest = hashlib.sha256()
    for path in files:
        name, size = str(path.relative_to(folder)), path.stat().st_size
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
        for piece in _pieces(path, size):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yield the pieces of a file that go into the digest."""
    if path.suffix in (".json", ".py"):
        yield path.read_bytes()
        return
    tensors: Sequence[_Tensor] | None = None
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header, tensors = _safetensors_header(file, size)
        elif path.suffix == ".gguf":
            header, tensors = _gguf_header(file, size)
        else:
            header = _records(file)
        yield header
        yield from _samples(file.fileno(), _offsets(tensors, size))


def _records(file: BinaryIO) -> bytes:
    """Return names, checksums and sizes of the records of a zip file, as torch writes one for each
    tensor; nothing for another file, such as those of torch before 1.6."""
    try:
        with ZipFile(file) as archive:
            entries = [(each.filename, each.CRC, each.file_size) for each in archive.infolist()]
    except (BadZipFile, NotImplementedError, ValueError, struct.error):
        return b""
    return json.dumps(entries).encode()


def _samples(file: int, offsets: Iterable[int]) -> Iterator[bytes]:
    """Yield the samples at ascending offsets.

    Close ones are read together: a disk that has nothing of the file in memory would take minutes
    for the rows of an embedding.
    """
    close: list[int] = []
    for offset in offsets:
        if close and (offset - close[-1] > CLOSE_BYTES or offset - close[0] > READ_BYTES):
            yield from _read_together(file, close)
            close = []
        close.append(offset)
    if close:
        yield from _read_together(file, close)


def _read_together(file: int, offsets: Sequence[int]) -> Iterator[bytes]:
    """Yield the samples at these offsets, which one read gets."""
    first = offsets[0]
    data = os.pread(file, offsets[-1] + SAMPLE_BYTES - first, first)
    for offset in offsets:
        yield data[offset - first : offset - first + SAMPLE_BYTES]


def _safetensors_header(file: BinaryIO, size: int) -> tuple[bytes, list[_Tensor] | None]:
    """Return the header of a safetensors file and its tensors; None for those of an unknown one."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
        return b"", None
    header = file.read(length)
    return header, _tensors(header, len(prefix) + length)


def _tensors(header: bytes, data_start: int) -> list[_Tensor] | None:
    """Return the tensors of a safetensors file in the order of their bytes; None if unknown."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = []
        for name, entry in entries.items():
            start, end = (data_start + int(offset) for offset in entry["data_offsets"])
            tensors.append(_Tensor(name, [int(length) for length in entry["shape"]], start, end))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def _is_embedding(name: str) -> bool:
    return "emb" in name or "wte" in name


def _offsets(tensors: Sequence[_Tensor] | None, size: int) -> Iterator[int]:
    """Yield the offsets of samples: the start, the middle and the end of every tensor, or more.

    Embeddings have one in each row: a training may change those of a few words alone. So have fused
    experts in each slice. `tensors`: None if unknown.
    """
    if tensors is None:
        yield from _spread(0, size, SAMPLES_PER_OPAQUE_FILE)
        return
    for tensor in tensors:
        end = min(tensor.end, size)
        yield from _spread(min(tensor.start, size), end, _samples_of(tensor))


def _samples_of(tensor: _Tensor) -> int:
    """Return the number of samples of a tensor."""
    rows = tensor.shape[0] if tensor.shape else 0
    whole = -(-(tensor.end - tensor.start) // SAMPLE_BYTES)
    n = SAMPLES_PER_TENSOR
    if _is_embedding(tensor.name):
        n = max(n, min(prod(tensor.shape[:-1] or tensor.shape), whole, MAX_ROWS))
    elif len(tensor.shape) > 2:
        n = max(n, min(rows, whole, MAX_SLICES))
    if not _ONE_EXPERT.search(tensor.name):
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


def _gguf_header(file: BinaryIO, size: int) -> tuple[bytes, list[_Tensor] | None]:
    """Return the header of a GGUF file and its tensors; without a header (b"", None)."""
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
    starts = [data_start + start for start, _, _ in found]
    if max(starts, default=data_start) > size:  # the file was cut
        return b"", None
    known = [
        _Tensor(name, shape, start, end)
        for (_, name, shape), start, end in zip(found, starts, [*starts[1:], size], strict=False)
    ]
    return os.pread(file.fileno(), reader.at, 0), known


def _spread(start: int, end: int, n: int) -> Iterator[int]:
    """Return `n` evenly spread offsets from `start` to the last sample before `end`."""
    last = max(start, end - SAMPLE_BYTES)
    return (start + (last - start) * i // max(1, n - 1) for i in range(n))
