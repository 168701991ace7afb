"""Record the requests to the cache for `kvcascade replay`, without tokens and without real hashes.

Each request becomes a line: its arrival, its duration, the tokens of its blocks, and a digest per
block. The digests are keyed with a random salt that is kept in memory only, so they match within
one recording and nowhere else. FORMAT.md describes the bytes.

Threads: the scheduler's thread calls `note`, which never waits and touches no file. One writer
thread computes digests and writes. Requests that do not fit into the bounded queue are dropped and
counted.

Bounds: `MAX_QUEUED_BLOCKS` in memory, and `MAX_FILES` files of about `FILE_BYTES` on disk. Files of
ended recordings in the folder count, too. They are removed first, then the recording's own files,
the oldest first. Files of a recording that another process is writing are neither counted nor
touched; the lock on its newest file shows that. If a file cannot be written, the recording ends and
the engine goes on.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Final

from ..errors import file_mode, os_errors
from ..logs import get_logger
from ..threads import start_thread
from ..tiers.base import BlockHash

logger = get_logger(__name__)

FORMAT: Final = 1
FORMAT_KEY: Final = "kvcascade_record"
"""Key in the first line of each file; its value is `FORMAT`."""
FILES: Final = "requests-*.jsonl"
"""Pattern of the files of all recordings in a folder."""
DIGEST_BYTES: Final = 8
FILE_BYTES = 64 << 20
MAX_FILES = 16
MAX_QUEUED_BLOCKS = 1 << 20
STOP_WAIT_S = 5.0
FILE_MODE = 0o600
_NAME = re.compile(r"(requests-\d{8}T\d{6}-\d+-[0-9a-f]{6})-(\d{6})\.jsonl", re.ASCII)


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """Facts that apply to every line of a recording."""

    tokens_per_block: float
    block_bytes: int


@dataclass(frozen=True, slots=True)
class _Noted:
    arrived_s: float
    took_s: float
    block_hashes: Sequence[BlockHash]


class RecordFiles:
    """The files of one recording, written one after the other; removes the oldest of the folder.

    Writer thread only."""

    def __init__(
        self,
        folder: Path,
        facts: RecordFacts,
        file_bytes: int = FILE_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        """Begin the first file. Raises one of our errors."""
        self._folder = folder
        self._facts = facts
        self._file_bytes = file_bytes
        self._max_files = max_files
        now = datetime.now(UTC)
        self._started = now.isoformat(timespec="seconds")
        self._prefix = f"requests-{now:%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(3)}"
        self._paths: deque[Path] = deque()
        self._part = 0
        self._size = 0
        with os_errors(f"recording requests in {folder} (record)"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._next()

    def write(self, line: bytes) -> None:
        """Append one line. Raises `OSError`."""
        if self._size + len(line) > self._file_bytes:
            full, self._file = self._file, self._next()  # one of the two is locked at any time
            full.close()
        self._size += len(line)
        self._file.write(line)

    def flush(self) -> None:
        """Hand everything to the operating system. Raises `OSError`."""
        self._file.flush()

    def close(self) -> None:
        """Close the file. Raises `OSError`."""
        self._file.close()

    def _next(self) -> BinaryIO:
        path = self._folder / _file_name(self._prefix, self._part)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, FILE_MODE), "wb")
        with suppress(OSError):  # a file system without locks: others take this recording for ended
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._paths.append(path)
        self._make_room()
        header = {
            FORMAT_KEY: FORMAT,
            "started": self._started,
            "part": self._part,
            "tokens_per_block": self._facts.tokens_per_block,
            "block_bytes": self._facts.block_bytes,
        }
        self._part += 1
        self._size = file.write(json.dumps(header).encode() + b"\n")
        return file

    def _make_room(self) -> None:
        ended = _ended_files(self._folder, self._prefix)
        excess = len(ended) + len(self._paths) - self._max_files
        for path in ended[: max(0, excess)]:
            with suppress(OSError):
                path.unlink()
        while len(self._paths) > self._max_files:
            self._paths.popleft().unlink(missing_ok=True)


def _file_name(prefix: str, part: int) -> str:
    return f"{prefix}-{part:06d}.jsonl"


def _ended_files(folder: Path, own: str) -> list[Path]:
    """Return the files of ended recordings, the oldest first."""
    newest: dict[str, int] = {}
    files: list[tuple[str, Path]] = []
    for path in sorted(folder.iterdir()):
        found = _NAME.fullmatch(path.name)
        if found and found[1] != own:
            newest[found[1]] = int(found[2])
            files.append((found[1], path))
    ended = {prefix for prefix, part in newest.items() if _has_ended(folder, prefix, part)}
    return [path for prefix, path in files if prefix in ended]


def _has_ended(folder: Path, prefix: str, newest: int) -> bool:
    """Return whether no process writes a recording: its newest file is not locked."""
    try:
        descriptor = os.open(
            folder / _file_name(prefix, newest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    # The writer may have begun the next file, which it locks before it unlocks this one.
    return not file_mode(folder / _file_name(prefix, newest + 1))


class Recorder:
    """Passes requests from the scheduler's thread to the files."""

    def __init__(self, files: RecordFiles, facts: RecordFacts, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds, also of the times that `note` gets."""
        self._files = files
        self._facts = facts
        self._clock = clock
        self._started_s = clock()
        self._salt = secrets.token_bytes(32)
        self._queue: queue.SimpleQueue[_Noted | None] = queue.SimpleQueue()
        self._queued_blocks = 0
        self._lock = threading.Lock()
        self._is_ended = False
        self.recorded_requests = 0
        self.dropped_requests = 0
        self._thread = start_thread(self._run, "kvcascade-record")

    def note(self, arrived_s: float, block_hashes: Sequence[BlockHash]) -> None:
        """Queue a request that ended; `block_hashes`: its prompt in prefix order, final."""
        n = len(block_hashes)
        with self._lock:
            if self._is_ended or self._queued_blocks + n > MAX_QUEUED_BLOCKS:
                self.dropped_requests += 1
                return
            self._queued_blocks += n
        self._queue.put(_Noted(arrived_s, self._clock() - arrived_s, block_hashes))

    def close(self) -> None:
        """Write what is queued, `STOP_WAIT_S` at most; idempotent."""
        with self._lock:
            self._is_ended = True
        self._queue.put(None)
        self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        try:
            self._files.flush()  # readers of the folder see the header at once
            while (noted := self._queue.get()) is not None:
                self._files.write(self._line(noted))
                with self._lock:
                    self._queued_blocks -= len(noted.block_hashes)
                    self.recorded_requests += 1
                if self._queue.empty():
                    self._files.flush()
            self._files.close()
        except OSError as error:
            with self._lock:
                self._is_ended = True
            with suppress(OSError):
                self._files.close()
            logger.warning("kvcascade: recording ended, its file cannot be written: %s", error)

    def _line(self, noted: _Noted) -> bytes:
        salt, size = self._salt, DIGEST_BYTES
        digests = b"".join(
            blake2b(block_hash, digest_size=size, key=salt).digest()
            for block_hash in noted.block_hashes
        )
        tokens = round(len(noted.block_hashes) * self._facts.tokens_per_block)
        line = {
            "t": round((noted.arrived_s - self._started_s) * 1e3),
            "d": round(noted.took_s * 1e3),
            "n": tokens,
            "b": base64.b64encode(digests).decode(),
        }
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def open_recorder(folder: Path, facts: RecordFacts, clock: Callable[[], float]) -> Recorder:
    """Begin a recording in a folder, creating it if needed. Raises one of our errors."""
    return Recorder(RecordFiles(folder, facts), facts, clock)
