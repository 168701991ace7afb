"""Readers of request traces: Mooncake's JSON lines, .npz archives, and kvcascade's recordings.

Block ids are prefix-chained in all formats: an equal id means an equal prefix up to and including
that block. Traces are untrusted: invalid files are refused, and memory is only allocated for data
that is present.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, FormatError, os_errors
from ...observe import recording

Ids = npt.NDArray[np.uint64]
"""Block ids of one request in prefix order, shape `(n,)`."""

MOONCAKE_BLOCK_TOKENS = 512
MAX_LINE_BYTES = 64 << 20
MAX_ARCHIVE_BYTES = 4 << 30
"""Limit of the unpacked arrays in an archive."""
MAX_TOKENS = 1 << 40
"""Limit of the tokens of a prompt or a block."""
MAX_PROMPT_BLOCKS = 1 << 22
MAX_REFERENCES = 1 << 28
"""Limit of the blocks of all requests: 2 GiB of ids."""
WRONG = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Exceptions from reading an invalid file; an array of petabytes raises `MemoryError`."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    arrived_s: float
    """Seconds since the start of the trace."""
    input_tokens: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace, in order of arrival."""

    name: str
    block_tokens: float
    """Tokens per block."""
    requests: Sequence[TraceRequest]

    @property
    def references(self) -> int:
        """Return the number of blocks that requests reference."""
        return sum(len(request.ids) for request in self.requests)

    @property
    def distinct(self) -> int:
        """Return the number of distinct blocks."""
        return len(np.unique(np.concatenate([request.ids for request in self.requests])))

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first request to the last."""
        return self.requests[-1].arrived_s - self.requests[0].arrived_s if self.requests else 0.0


def read_trace(path: Path, limit: int | None = None, block_tokens: float | None = None) -> Trace:
    """Read a trace: an .npz archive, JSON lines of either kind, or a folder of recordings.

    `limit` is the maximum number of requests; `block_tokens` overrides the value of the trace.
    Raises `FormatError` for any other file and for a trace without blocks, and the mapped form of
    an `OSError`.
    """
    with os_errors(f"reading the trace {path}"):
        reader = _read_npz if path.suffix == ".npz" else _read_lines
        trace = reader(path, limit)
    requests = sorted(trace.requests, key=lambda request: request.arrived_s)
    if not any(len(request.ids) for request in requests):
        raise FormatError(f"{path} names no blocks (arrivals only); give a trace with block ids")
    tokens = trace.block_tokens if block_tokens is None else block_tokens
    if not 0 < tokens <= MAX_TOKENS:
        raise ConfigError(f"{path} does not say how many tokens a block has; give --block-tokens")
    return Trace(trace.name, tokens, requests)


def _read_npz(path: Path, limit: int | None) -> Trace:
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(each.file_size for each in archive.infolist()) > MAX_ARCHIVE_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_ARCHIVE_BYTES} bytes")
        with np.load(path) as arrays:
            tokens = _number(json.loads(str(arrays["meta"])).get("block_size_tokens"))
            names = ("timestamp_ms", "input_length", "run_offset", "run_start", "run_len")
            requests = _collected(_archived(*(arrays[name] for name in names)), limit)
    except WRONG as error:
        raise FormatError(f"{path} is not such an archive ({error}); see FORMAT.md") from None
    return Trace(path.stem, tokens, requests)


def _archived(
    times: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    offsets: npt.NDArray[Any],
    starts: npt.NDArray[Any],
    counts: npt.NDArray[Any],
) -> Iterator[TraceRequest]:
    if any(each.ndim != 1 or each.dtype.kind not in "iu" for each in (offsets, starts, counts)):
        raise ValueError("the runs are not lists of whole numbers")
    if np.any((counts < 0) | (counts > MAX_PROMPT_BLOCKS)):
        raise ValueError(f"the length of a run is negative or above {MAX_PROMPT_BLOCKS} blocks")
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    for i in range(len(times)):
        runs = slice(offsets[i], offsets[i + 1])
        yield _request(float(times[i]), int(lengths[i]), _expand(starts[runs], counts[runs]))


def _expand(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Ids:
    """Expand runs of consecutive ids."""
    if len(starts) == 0:
        return np.empty(0, np.uint64)
    ends = np.cumsum(counts)
    if ends[-1] > MAX_PROMPT_BLOCKS:
        raise ValueError(f"a request has {ends[-1]} blocks, more than {MAX_PROMPT_BLOCKS}")
    steps = np.repeat(starts - (ends - counts), counts)
    ids: Ids = (np.arange(len(steps)) + steps).astype(np.uint64)
    return ids


def _collected(requests: Iterable[TraceRequest], limit: int | None) -> list[TraceRequest]:
    """Return the first `limit` requests. Raises `ValueError` if their ids take too much memory."""
    found: list[TraceRequest] = []
    references = 0
    for request in islice(requests, limit):
        references += len(request.ids)
        if references > MAX_REFERENCES:
            raise ValueError(f"more than {MAX_REFERENCES} blocks; give --limit {len(found)}")
        found.append(request)
    return found


def _request(arrived_ms: float, input_tokens: int, ids: Ids) -> TraceRequest:
    """Return a request. Raises `ValueError` if its values are invalid."""
    if not math.isfinite(arrived_ms) or not 0 <= input_tokens <= MAX_TOKENS:
        raise ValueError("its time or its length is out of range")
    return TraceRequest(arrived_ms / 1e3, input_tokens, ids)


def _number(value: Any) -> float:
    """Return a number, or 0 for any other value."""
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_TOKENS else 0.0


def _read_lines(path: Path, limit: int | None) -> Trace:
    parts = _recorded_parts(path) if os.path.isdir(path) else [path]
    first = _first_line(parts[0])
    is_record = recording.FORMAT_KEY in first
    if is_record and first[recording.FORMAT_KEY] != recording.FORMAT:
        version = first[recording.FORMAT_KEY]
        raise FormatError(f"{parts[0]} has record version {version}; use the release that wrote it")
    read = _recorded if is_record else _mooncake
    found = (request for part in parts for request in _requests(part, read, is_record))
    try:
        requests = _collected(found, limit)
    except ValueError as error:
        raise FormatError(f"{path} is too large: {error}") from None
    tokens = _number(first.get("tokens_per_block")) if is_record else MOONCAKE_BLOCK_TOKENS
    return Trace(path.stem, tokens, requests)


def _requests(
    path: Path, read: Callable[[dict[str, Any]], TraceRequest], has_header: bool
) -> Iterator[TraceRequest]:
    for number, line in enumerate(_lines(path), 1):
        if has_header and number == 1:
            continue
        try:
            request = read(json.loads(line))
        except WRONG as error:
            if not line.endswith(b"\n"):  # the last line of an interrupted recording
                return
            raise FormatError(
                f"{path} line {number} is not a request ({error!r}); see FORMAT.md"
            ) from None
        yield request


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise FormatError(f"{path} has a line of over {MAX_LINE_BYTES} bytes: no trace")
            yield line


def _mooncake(line: dict[str, Any]) -> TraceRequest:
    ids = np.array(line["hash_ids"], np.uint64)
    if ids.ndim != 1 or ids.tolist() != line["hash_ids"]:
        raise ValueError("hash_ids is not a list of whole numbers")
    return _request(line["timestamp"], int(line["input_length"]), ids)


def _recorded(line: dict[str, Any]) -> TraceRequest:
    ids = np.frombuffer(base64.b64decode(line["b"], validate=True), "<u8")
    return _request(line["t"], int(line["n"]), ids.astype(np.uint64))


def _first_line(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(next(_lines(path), b""))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FormatError(
            f"{path} is not a trace; give a .npz, JSON lines, or a folder of recordings"
        )
    return found


def _recorded_parts(folder: Path) -> list[Path]:
    """Return the files with requests of the newest recording that has some.

    Digests of different recordings do not match.
    """
    recordings: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(recording.FILES)):
        recordings.setdefault(path.stem.rpartition("-")[0], []).append(path)
    for newest in sorted(recordings, reverse=True):
        if parts := [path for path in recordings[newest] if _has_request(path)]:
            return parts
    what = "no recording with a request" if recordings else "no recording"
    raise FormatError(f"{folder} holds {what}; give a folder that `record` named")


def _has_request(path: Path) -> bool:
    """Return whether a file of a recording has a whole header and a whole request."""
    lines = list(islice(_lines(path), 2))
    return len(lines) == 2 and lines[1].endswith(b"\n")
