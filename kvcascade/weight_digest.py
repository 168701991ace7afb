"""A digest of weight files, from samples of their bytes.

Weights are identified without reading all of them: by configuration, code and, for every tensor,
its name, type, shape and a few samples of its bytes. Training or merging changes nearly every
number of a tensor, and of an embedding whole rows. So samples reveal it; sizes and headers do not.
In files of torch, which are zip files, each tensor has a checksum instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile

from .errors import ConfigError

SAMPLES_PER_TENSOR = 3
MAX_ROWS = 1 << 18
"""Limit on the samples of an embedding, of which each row has one."""
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

_EMBEDDING = re.compile(r"emb|wte")


def digest_files(files: list[Path], folder: Path) -> str:
    """Return a digest of these files. Raises `ConfigError` if one cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
            for piece in _pieces(path, size):
                digest.update(piece)
    except OSError as error:
        raise ConfigError(
            f"model: {str(folder)!r} cannot be read to identify its weights ({error.strerror}); "
            "make it readable or set weights_id."
        ) from error
    return digest.hexdigest()


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yield the pieces of a file that go into the digest."""
    if path.suffix in (".json", ".py"):
        yield path.read_bytes()
        return
    offsets: list[int] | None = None
    with path.open("rb") as file:
        header = _tensor_header(file.read(8), size) if path.suffix == ".safetensors" else None
        if header is not None:
            raw = file.read(header)
            yield raw
            offsets = _tensor_offsets(raw, 8 + header, size)
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


def _tensor_header(prefix: bytes, size: int) -> int | None:
    """Return the length of a safetensors header, or None if this cannot be one."""
    if len(prefix) < 8:
        return None
    (length,) = struct.unpack("<Q", prefix)
    return length if 0 < length <= min(size - 8, MAX_HEADER_BYTES) else None


def _tensor_offsets(raw_header: bytes, data_start: int, size: int) -> list[int]:
    """Return the offsets of samples: the start, the middle and the end of every tensor.

    Embeddings have one in each row: a training may change those of a few words alone.
    """
    try:
        header = json.loads(raw_header)
        header.pop("__metadata__", None)
        tensors = []
        for name, entry in header.items():
            start, end = map(int, entry["data_offsets"])
            rows = int(entry["shape"][0]) if _EMBEDDING.search(name) else 0
            tensors.append((data_start + start, data_start + end, _samples_of(rows)))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return _spread(0, size, SAMPLES_PER_OPAQUE_FILE)
    offsets: list[int] = []
    for start, end, n in sorted(tensors):
        offsets += _spread(start, min(end, size), n)
    return offsets


def _samples_of(rows: int) -> int:
    """Return the number of samples of a tensor; `rows`: those of an embedding, else 0."""
    return max(min(rows, MAX_ROWS), SAMPLES_PER_TENSOR)


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
    samples: dict[int, int] = {}
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
            rows = shape[-1] if len(shape) > 1 and _EMBEDDING.search(name) else 0
            samples[reader.number()] = _samples_of(rows)
    except (ValueError, KeyError, RecursionError):
        return b"", None
    data_start = -(-reader.at // alignment) * alignment
    if data_start + max(samples, default=0) > size:  # the file was cut
        return b"", None
    offsets: list[int] = []
    for start, end in pairwise([*sorted(samples), size - data_start]):
        offsets += _spread(data_start + start, data_start + end, samples[start])
    return os.pread(file.fileno(), reader.at, 0), offsets


def _spread(start: int, end: int, n: int) -> list[int]:
    """Return `n` evenly spread offsets from `start` to the last sample before `end`."""
    last = max(start, end - SAMPLE_BYTES)
    return [start + (last - start) * i // max(1, n - 1) for i in range(n)]
