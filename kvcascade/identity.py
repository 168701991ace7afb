"""The identity of weights, a field of every namespace fingerprint.

Block hashes identify tokens, not the model that computed the bytes. Two engines may exchange blocks
only if everything that shapes the bytes is equal, above all the weights.

Weights are identified without reading all of them. A hub model is identified by its resolved
commit. Local files are identified by a digest over configuration, code and, for every tensor, its
name, type, shape and a few samples of its bytes. Training or merging changes nearly every number of
a tensor, and of an embedding whole rows. So samples reveal it; sizes and headers do not. In files
of torch, which are zip files, each tensor has a checksum instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
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

_CONFIG_FILES = ("*.json", "*.py")
"""Patterns of configuration and of code that comes with some models; read in full."""
_FOR_PROMPTS = frozenset({"chat_template.json", "generation_config.json", "tokenizer_config.json"})
"""Files that people edit, and that shape prompts and sampling, but no block: its key covers its
tokens. The one option of a generation config that does is a fact of `engine_facts`."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_HUB_CONFIGS = ("config.json", "params.json")
"""Files of which every model on the hub has one; the second is Mistral's."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_EMBEDDING = re.compile(r"emb|wte")


def weights_identity(
    model: str, revision: str | None, is_real: bool, download_dir: str | None = None
) -> str:
    """Return a word that is equal only for equal weights.

    `model`: hub name or local path. `is_real`: False if the weights are not those of `model`; they
    then get an identity that no other process has. `download_dir`: the directory that the engine
    downloads weights to; None: the hub's cache. Raises `ConfigError` if local files cannot be read.
    """
    if not is_real:
        return private_identity()
    path = Path(model)
    if path.is_file():
        return f"files:{_digest_files([path], path.parent)}"
    folder = path if path.is_dir() else _hub_snapshot(model, revision, download_dir)
    if folder is None:
        return private_identity()
    commit = _snapshot_commit(folder)
    if commit:
        return f"hub:{commit}"
    files = _files_of(folder)
    return f"files:{_digest_files(files, folder)}" if files else private_identity()


def private_identity() -> str:
    """Return a word that no other process has."""
    return f"process:{uuid.uuid4().hex}"


def is_shareable(identity: str) -> bool:
    """Return False for a private identity, which only one process has."""
    return not identity.startswith("process:")


_noted: dict[tuple[str, str | None, str | None], list[tuple[str, int, int]]] = {}
"""Weight files of models as they were when the process began, by name, revision and download
directory."""


def note_files(model: str, revision: str | None = None, download_dir: str | None = None) -> None:
    """Note the weight files of a model before they are loaded; the first time counts.

    Of a model of the hub the commit is noted, if there is a local copy: a name may lead to another
    commit later.
    """
    state = _state_of(model, revision, download_dir) if model else []
    if state:
        _noted.setdefault((model, revision, download_dir), state)


def have_files_changed(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> bool:
    """Return True if weight files were replaced since they were noted.

    The weights that were loaded may then be older than the files, or a mixture.
    """
    noted = _noted.get((model, revision, download_dir))
    return noted is not None and noted != _state_of(model, revision, download_dir)


def _state_of(
    model: str, revision: str | None, download_dir: str | None
) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of every weight file, or the commit of a hub's copy."""
    path = Path(model)
    if not path.exists():
        snapshot = _hub_snapshot(model, revision, download_dir)
        return [] if snapshot is None else [(snapshot.name, 0, 0)]
    found = []
    for file in _weights_in(path) if path.is_dir() else [path]:
        with suppress(OSError):  # `weights_identity` says what is wrong
            about = file.stat()
            found.append((file.name, about.st_size, about.st_mtime_ns))
    return sorted(found)


def _snapshot_commit(path: Path) -> str | None:
    """Return model and commit of a folder in a hub cache, else None.

    The folder is `.../models--<name>/snapshots/<commit>`. Offline, vLLM names it instead of the
    model.
    """
    resolved = Path(os.path.abspath(path))
    model = resolved.parent.parent.name
    is_cached = resolved.parent.name == "snapshots" and model.startswith("models--")
    return f"{model}@{resolved.name}" if is_cached and _COMMIT.fullmatch(resolved.name) else None


def _hub_snapshot(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the local folder with the weights of a model and revision on the hub."""
    if download_dir is None:
        return _cached_snapshot(model, revision)
    return _downloaded_snapshot(model, revision, Path(download_dir).expanduser())


def _downloaded_snapshot(model: str, revision: str | None, download_dir: Path) -> Path | None:
    """Return the folder with the weights of a model and revision in a directory of downloads.

    vLLM downloads weights there, and configuration to the hub's cache. That cache may hold another
    commit, so only a folder with weights counts.
    """
    folder = download_dir / f"models--{model.replace('/', '--')}"
    commit = revision or "main"
    with suppress(OSError, ValueError):  # there is no such reference if it is a commit itself
        commit = (folder / "refs" / commit).read_text("utf-8")
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and _weights_in(snapshot) else None


def _cached_snapshot(model: str, revision: str | None) -> Path | None:
    """Return the folder of a model and revision in the local hub cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = [try_to_load_from_cache(model, name, revision=revision) for name in _HUB_CONFIGS]
    except ValueError:  # not a valid repository name
        return None
    return next((Path(each).parent for each in found if isinstance(each, str)), None)


def _files_of(folder: Path) -> list[Path]:
    """Return configuration, code and weights; none if no known weight file is there."""
    weights = _weights_in(folder)
    configuration = {path for pattern in _CONFIG_FILES for path in folder.glob(pattern)}
    read = {path for path in weights | configuration if path.name not in _FOR_PROMPTS}
    return sorted(read) if weights else []


def _weights_in(folder: Path) -> set[Path]:
    return {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}


def _digest_files(files: list[Path], folder: Path) -> str:
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
