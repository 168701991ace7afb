"""Reading request traces: Mooncake's JSON lines, .npz archives, and our own recordings.

Block ids are prefix-chained in all of them: an equal id means an equal prefix up to and including
that block.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import recording
from ...errors import ConfigError, FormatError, os_errors

Ids = npt.NDArray[np.uint64]
"""Block ids of one request in prefix order, shape `(n,)`."""

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request as it was seen."""

    arrived_s: float
    """Since the start of the trace."""
    input_tokens: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace, in order of arrival."""

    name: str
    block_tokens: float
    """Tokens that one block stands for."""
    requests: Sequence[TraceRequest]

    @property
    def references(self) -> int:
        """Blocks asked for."""
        return sum(len(request.ids) for request in self.requests)

    @property
    def distinct(self) -> int:
        """Different blocks among them."""
        return len(np.unique(np.concatenate([request.ids for request in self.requests])))

    @property
    def duration_s(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].arrived_s - self.requests[0].arrived_s if self.requests else 0.0


def read_trace(path: Path, limit: int | None = None, block_tokens: float | None = None) -> Trace:
    """Read a trace: a .npz, a JSON lines file of either kind, or a folder of recordings.

    `limit`: only so many requests; `block_tokens`: instead of what the trace says. Raises
    `FormatError` if it is none of these, or has no blocks, and the mapped form of an `OSError`.
    """
    with os_errors(f"reading the trace {path}"):
        reader = _read_npz if path.suffix == ".npz" else _read_lines
        trace = reader(path, limit)
    requests = sorted(trace.requests, key=lambda request: request.arrived_s)
    if not any(len(request.ids) for request in requests):
        raise FormatError(f"{path} names no blocks (arrivals only); give a trace with block ids")
    tokens = trace.block_tokens if block_tokens is None else block_tokens
    if tokens <= 0:
        raise ConfigError(f"{path} does not say how many tokens a block has; give --block-tokens")
    return Trace(trace.name, tokens, requests)


def _read_npz(path: Path, limit: int | None) -> Trace:
    try:
        with np.load(path) as arrays:
            meta: dict[str, Any] = json.loads(str(arrays["meta"]))
            names = ("timestamp_ms", "input_length", "run_offset", "run_start", "run_len")
            times, lengths, offsets, starts, counts = (arrays[name] for name in names)
    except (KeyError, ValueError) as error:
        raise FormatError(f"{path} is not such an archive ({error}); see FORMAT.md") from None
    n = len(times) if limit is None else min(limit, len(times))
    requests = [
        TraceRequest(
            float(times[i]) / 1e3,
            int(lengths[i]),
            _expand(starts[offsets[i] : offsets[i + 1]], counts[offsets[i] : offsets[i + 1]]),
        )
        for i in range(n)
    ]
    return Trace(path.stem, float(meta.get("block_size_tokens") or 0), requests)


def _expand(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Ids:
    """Runs of consecutive ids, written out."""
    if len(starts) == 0:
        return np.empty(0, np.uint64)
    total = int(counts.sum())
    ends = np.cumsum(counts)
    steps = np.repeat(starts.astype(np.int64) - (ends - counts), counts)
    ids: Ids = (np.arange(total) + steps).astype(np.uint64)
    return ids


def _read_lines(path: Path, limit: int | None) -> Trace:
    parts = _recorded_parts(path) if path.is_dir() else [path]
    first = _first_line(parts[0])
    is_record = recording.FORMAT_KEY in first
    if is_record and first[recording.FORMAT_KEY] != recording.FORMAT:
        version = first[recording.FORMAT_KEY]
        raise FormatError(f"{parts[0]} has record version {version}; use the release that wrote it")
    read = _recorded if is_record else _mooncake
    requests = [request for part in parts for request in _requests(part, read, is_record)]
    tokens = float(first["tokens_per_block"]) if is_record else MOONCAKE_BLOCK_TOKENS
    return Trace(path.stem, tokens, requests[:limit])


def _requests(
    path: Path, read: Callable[[dict[str, Any]], TraceRequest], has_header: bool
) -> Iterator[TraceRequest]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if has_header and number == 1:
                continue
            try:
                yield read(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if not line.endswith(b"\n"):  # the last one of a recording that was cut off
                    return
                raise FormatError(
                    f"{path} line {number} is not a request ({error!r}); see FORMAT.md"
                ) from None


def _mooncake(line: dict[str, Any]) -> TraceRequest:
    ids = np.array(line["hash_ids"], np.uint64)
    return TraceRequest(line["timestamp"] / 1e3, int(line["input_length"]), ids)


def _recorded(line: dict[str, Any]) -> TraceRequest:
    ids = np.frombuffer(base64.b64decode(line["b"], validate=True), "<u8")
    return TraceRequest(line["t"] / 1e3, int(line["n"]), ids.astype(np.uint64))


def _first_line(path: Path) -> dict[str, Any]:
    with path.open("rb") as lines:
        try:
            found = json.loads(lines.readline())
        except ValueError:
            found = None
    if not isinstance(found, dict):
        raise FormatError(f"{path} is no trace; give a .npz, JSON lines, or a folder of recordings")
    return found


def _recorded_parts(folder: Path) -> list[Path]:
    """The files of the newest recording in a folder: its digests match no other recording's."""
    recordings: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(recording.FILES)):
        recordings.setdefault(path.stem.rpartition("-")[0], []).append(path)
    if not recordings:
        raise FormatError(f"{folder} holds no recording; give a folder that `record` named")
    return recordings[max(recordings)]
