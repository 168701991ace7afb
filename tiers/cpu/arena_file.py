"""Create, join and remove the arena file; safe if any process dies at any point.

Guarantees:

- Exactly one process creates the file of a name. The others see it complete or not at all.
- A process never joins a file that no live process holds, or whose maker is dead. A worker replaces
  such a file, so a crashed engine blocks no other. A surviving process keeps its mapping of the
  replaced file, which no longer has a name.
- No memory is allocated before the capacity check. All pages of a ready file are reserved, so
  touching them later cannot fail for lack of space (SIGBUS).

The maker creates the file (O_EXCL, 0600), locks the maker byte and takes the shared flock. Only
then does it check that the name still leads to its file. A racing opener may have found the file
unlocked and removed it as stale; the maker then starts again. A joiner takes the shared flock
before it tests the maker byte, so a maker that it sees as dead is dead.

A kept arena gets a lasting name once every process has mapped it. A later maker takes it over only
with the exclusive flock. A live process that may write into slots holds the shared flock, so its
arena cannot be taken. The maker holds the exclusive flock until the header describes a new arena,
and changes to the shared one then.

The ranks of an engine start at the same time. A lock on the directory lets one of them at a time
take an arena over or create the file. Without it, one rank could create a new file beside the arena
that another rank is taking over. A rank holds this lock for milliseconds, because the memory is
reserved after it. A rank that does not get the lock in time goes on without it.

Assumes one host, one user, and a local file system that supports both kinds of locks (tmpfs,
hugetlbfs, ext4, xfs). Not thread-safe; each call opens its own file.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ...config.sizes import human
from ...errors import ConfigError, FormatError, InUseError, NoSpaceError, os_errors
from . import header as layout
from .arena_limits import MachineMemory, check_capacity
from .header import HEADER_BYTES, ArenaGeometry, ArenaHeader
from .huge_pages import gather
from .locks import held_by_other, try_flock, try_lock, turn_in
from .nodes import spread

Clock = Callable[[], float]
"""Returns monotonic seconds."""
Wait = Callable[[float], None]
"""Waits for a number of seconds."""
Probe = Callable[[str], MachineMemory]
"""Returns the memory available for an arena in a directory."""

POLL_S = 0.01
OPEN_ATTEMPTS_MAX = 1000
MAKE_TIMEOUT_S = 600.0
"""Longest time a live maker may take to reserve the memory, in seconds."""
JOIN_TIMEOUT_S = 60.0
"""Longest time the scheduler waits for the workers' file and for their ranks, in seconds."""
TURN_TIMEOUT_S = 5.0
"""Longest wait for another process that is taking a kept arena over, in seconds. That process may
be stopped."""
SWEEP_ENTRIES_MAX = 1024
"""Maximum number of leftover files that one sweep examines."""

_MAKER_BYTE = 0
_NAME = re.compile(r"kvcascade-[0-9a-f]{32}")
KEPT_NAME = re.compile(r"kvcascade-kept-[0-9a-f]{32}")
KEPT_ENTRIES_MAX = 1024
"""Maximum number of kept arenas that are examined."""
_DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class ArenaFile:
    """An open, ready arena file. `fd` holds the shared flock."""

    fd: int
    path: str
    size_bytes: int
    header: ArenaHeader
    is_made: bool
    """True if this process created the file or took it over."""


@dataclass(frozen=True, slots=True)
class ArenaRequest:
    """Parameters of `open_file`."""

    geometry: ArenaGeometry
    path: str
    may_make: bool
    """If False, wait for another process to create the file, and never replace an existing one."""
    clock: Clock
    wait: Wait
    probe: Probe


def arena_path(arena_dir: str, engine_id: str) -> str:
    """Return the path of the arena file, equal in all processes of one engine of one user."""
    name = f"{os.geteuid()}:{engine_id}".encode()
    digest = hashlib.blake2b(name, digest_size=_DIGEST_SIZE).hexdigest()
    return os.path.join(arena_dir, f"kvcascade-{digest}")


def kept_arenas(arena_dir: str) -> list[str]:
    """Return the paths of the kept arenas in a directory, in use or not."""
    with suppress(OSError), os.scandir(arena_dir) as entries:
        found = [entry.path for entry in entries if KEPT_NAME.fullmatch(entry.name)]
        return sorted(found)[:KEPT_ENTRIES_MAX]
    return []


def give_up_name(path: str, fd: int, is_kept: bool) -> bool:
    """Remove the engine's name of the arena; give a kept arena a lasting name first.

    Return True if this call removed the name and it still led to the open file.
    """
    if not is_kept:
        return unlink_if_same(path, fd)
    lasting = os.path.join(os.path.dirname(path), f"kvcascade-kept-{secrets.token_hex(16)}")
    try:
        os.link(path, lasting, follow_symlinks=False)
        if _is_name_of(lasting, fd) and unlink_if_same(path, fd):
            return True
        os.unlink(lasting)  # another process was first, and its lasting name counts
    except OSError:
        return False  # gone already: another process gave the file its lasting name
    return False


def check_dir(arena_dir: str) -> None:
    """Raise `ConfigError` unless this process can create files in `arena_dir`."""
    if not os.path.isdir(arena_dir):
        raise ConfigError(f"arena_dir: {arena_dir!r} is no directory; name one, such as /dev/shm")
    if not os.access(arena_dir, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"arena_dir: {arena_dir!r} is not writable; change its mode, or set arena_dir to "
            "another folder"
        )


def open_file(request: ArenaRequest) -> ArenaFile:
    """Create or join the file at `request.path`.

    Raises `ConfigError` (capacity, or the file cannot be created), `NoSpaceError`, `FormatError`
    (other geometry or version), `InUseError` (file of another user, slow or missing maker),
    `TierIOError`.
    """
    if not request.may_make:
        return _join_in_time(request)
    turn = polls(request.clock, request.wait, TURN_TIMEOUT_S)
    for _ in range(OPEN_ATTEMPTS_MAX):
        file = _make(request, turn) or _join(request)
        if file is not None:
            return file
        request.wait(POLL_S)
    raise InUseError(
        f"{request.path} could not be opened: other processes keep replacing it; give each engine "
        f"its own engine_id"
    )


def polls(clock: Clock, wait: Wait, limit_s: float) -> Iterator[None]:
    """Yield at once, and then after each wait of `POLL_S`, until the time is over.

    The number of waits is limited as well.
    """
    deadline = clock() + limit_s
    yield
    for _ in range(int(limit_s / POLL_S)):
        if clock() >= deadline:
            return
        wait(POLL_S)
        yield


def unlink_if_same(path: str, fd: int) -> bool:
    """Remove the name if it still leads to the open file. Return True if it was removed."""
    try:
        if not _is_name_of(path, fd):
            return False
        os.unlink(path)
    except OSError:
        return False  # gone already, or this process may not remove it
    return True


def sweep(arena_dir: str) -> list[str]:
    """Remove arena files that no live process holds, and return their paths.

    A kept arena whose engine's start was cut off gets its lasting name back. Skips locked files,
    files of other users and files that are not arenas. Ignores errors.
    """
    removed: list[str] = []
    with suppress(OSError, ValueError), os.scandir(arena_dir) as entries:  # it may be no path
        ours = [entry.path for entry in entries if _NAME.fullmatch(entry.name)]
        removed = [path for path in sorted(ours)[:SWEEP_ENTRIES_MAX] if remove_stale(path)]
    return removed


def _is_name_of(path: str, fd: int) -> bool:
    """Return True if the name leads to the open file. Raises `OSError` if there is no such name."""
    return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))


def open_own(path: str) -> int | None:
    """Open a regular file of this user. Return None for any other file or on an error."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


def remove_stale(path: str) -> bool:
    """Remove an arena file that no live process holds. Return True if it was removed."""
    fd = open_own(path)
    if fd is None:
        return False
    try:
        if not try_flock(fd, exclusive=True):
            return False
        page = os.pread(fd, HEADER_BYTES, 0)
        return layout.looks_like_arena(page) and _clear_away(path, fd, page)
    except OSError:
        return False
    finally:
        os.close(fd)


def _clear_away(path: str, fd: int, page: bytes) -> bool:
    """Remove a name of an arena without a live process, whose header is `page`.

    The blocks of a kept arena are complete at every moment, so it keeps a name unless it has its
    lasting one already. Return True if this call removed the name.
    """
    is_lasting = KEPT_NAME.fullmatch(os.path.basename(path))
    with suppress(FormatError):
        if layout.is_ready(page) and not is_lasting:
            return give_up_name(path, fd, layout.read_fixed(page, path).geometry.kept)
    return unlink_if_same(path, fd)


def _take_over(request: ArenaRequest) -> ArenaFile | None:
    """Take over a kept arena of the same geometry that no live process holds.

    The arena gets this engine's name. Return None if there is no such arena.
    """
    for path in kept_arenas(os.path.dirname(request.path)):
        fd = open_own(path)
        if fd is None:
            continue
        try:
            file = _renamed(request, path, fd)
        except (OSError, FormatError):
            file = None
        if file is not None:
            return file
        os.close(fd)
    return None


def _renamed(request: ArenaRequest, path: str, fd: int) -> ArenaFile | None:
    """Give a kept arena the requested name and a new header.

    Return None if a live process holds it or its geometry differs.
    """
    if not try_flock(fd, exclusive=True):
        return None
    old = layout.read_fixed(os.pread(fd, HEADER_BYTES, 0), path)
    size = os.fstat(fd).st_size
    if old.geometry != request.geometry or size < request.geometry.file_bytes:
        return None
    os.link(path, request.path, follow_symlinks=False)
    unlink_if_same(path, fd)
    made = _write_header(request, fd, size, old.is_huge)
    is_ours = _is_ours_alone(request.path, fd)
    return ArenaFile(fd, request.path, size, made, is_made=True) if is_ours else None


def _make(request: ArenaRequest, turn: Iterator[None]) -> ArenaFile | None:
    """Take a kept arena over, or create a new one. Return None if the name exists already.

    `turn` limits the wait for the lock of the directory, over all attempts of this opener.
    """
    taken, fd = None, None
    if request.geometry.kept:
        folder = os.path.dirname(request.path)
        with os_errors(f"opening {folder}"), turn_in(folder, turn):
            if not os.path.lexists(request.path):
                # Another opener may give the first one its lasting name back meanwhile.
                taken = _take_over(request) or _take_over(request)
            fd = None if taken else _create(request)
    else:
        fd = _create(request)
    if taken is not None or fd is None:
        return taken
    try:
        return _fill(request, fd)
    except BaseException:
        unlink_if_same(request.path, fd)
        os.close(fd)
        raise


def _create(request: ArenaRequest) -> int | None:
    """Create the file. Return None if it exists, or if a racing opener removed it as stale."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(request.path, flags, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(
            f"arena_dir: {request.path} cannot be made ({error.strerror}); set arena_dir to "
            "another folder"
        ) from error
    try:
        if _is_ours_alone(request.path, fd):
            return fd
    except BaseException:
        unlink_if_same(request.path, fd)
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_ours_alone(path: str, fd: int) -> bool:
    """Lock a file just created or renamed.

    Return False if another opener saw it unlocked and took its name away. The kernel drops the
    exclusive lock of a renamed file before it gives the shared one.
    """
    with os_errors(f"locking {path}"):
        if not try_lock(fd, _MAKER_BYTE) or not try_flock(fd, exclusive=False):
            unlink_if_same(path, fd)
            return False
        with suppress(FileNotFoundError):
            return _is_name_of(path, fd)
    return False


def _fill(request: ArenaRequest, fd: int) -> ArenaFile:
    """Reserve the memory and write the header, which lets other processes join."""
    geometry, path = request.geometry, request.path
    memory = request.probe(os.path.dirname(path))
    size = layout.round_up(geometry.file_bytes, memory.block_bytes)
    check_capacity(size, os.path.dirname(path), memory)
    is_huge = _reserve(request, fd, size, memory)
    made = _write_header(request, fd, size, is_huge)
    return ArenaFile(fd, path, size, made, is_made=True)


def _write_header(request: ArenaRequest, fd: int, size: int, is_huge: bool) -> ArenaHeader:
    """Write the header of a new arena, with no rank mapped, and mark it ready."""
    made = ArenaHeader(request.geometry, is_huge)
    # Write through a mapping: hugetlbfs files do not support write().
    page_bytes = min(size, request.probe(os.path.dirname(request.path)).block_bytes)
    with os_errors(f"mapping {request.path}"), mmap.mmap(fd, page_bytes) as page:
        with memoryview(page) as view:
            layout.write_new(view, made)
    return made


def _reserve(request: ArenaRequest, fd: int, size: int, memory: MachineMemory) -> bool:
    """Reserve all of the memory. Return True if it lies in huge pages."""
    path = request.path
    try:
        os.ftruncate(fd, size)
        if len(memory.nodes) > 1:
            spread(fd, size, memory.nodes)
        is_huge = memory.huge or (memory.may_gather and gather(fd, size, request.clock))
        os.posix_fallocate(fd, 0, size)
        return is_huge
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise NoSpaceError(
                f"capacity: {human(size)} could not be reserved in {os.path.dirname(path)} "
                f"({error.strerror}); lower it or free memory (kvcascade shm ls shows arenas that "
                f"were kept)"
            ) from error
        with os_errors(f"reserving {human(size)} for {path}"):
            raise


def _join_in_time(request: ArenaRequest) -> ArenaFile:
    """Wait for the file of another process, and open it. Raises `InUseError` after the limit."""
    for _ in polls(request.clock, request.wait, JOIN_TIMEOUT_S):
        file = _join(request)
        if file is not None:
            return file
    raise InUseError(
        f"{request.path} could not be opened: no worker of this engine made it; start workers "
        f"first, on the same host"
    )


def _join(request: ArenaRequest) -> ArenaFile | None:
    """Open an existing file once it is ready. Return None if the caller must start again."""
    path = request.path
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InUseError(
            f"{path} is in the way ({error.strerror}); remove it or set another arena_dir"
        ) from error
    try:
        header = _join_locked(request, fd)
        if header is not None:
            size = _checked_size(fd, request.geometry, path)
            return ArenaFile(fd, path, size, header, is_made=False)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _join_locked(request: ArenaRequest, fd: int) -> ArenaHeader | None:
    """Take the shared flock of a live arena and return its header.

    Return None if the caller must start again. Removes a stale file if this process may make one.
    """
    path = request.path
    with os_errors(f"joining {path}"):
        _check_owner(path, fd)
        if try_flock(fd, exclusive=True):
            if request.may_make:
                _clear_away(path, fd, os.pread(fd, HEADER_BYTES, 0))
            return None
        if not try_flock(fd, exclusive=False):
            return None  # another process is testing whether the file is stale
        if not _wait_ready(request, fd):
            return None
        header = layout.read_fixed(os.pread(fd, HEADER_BYTES, 0), path)
    if header.geometry != request.geometry:
        raise FormatError(
            f"{path} was made for {header.geometry}, this process came to {request.geometry}; "
            "give every process of the engine the same configuration, and every pipeline stage the "
            "same number of KV layers (VLLM_PP_LAYER_PARTITION)"
        )
    return header


def _wait_ready(request: ArenaRequest, fd: int) -> bool:
    """Wait for the maker. Return False if it is dead or the file has no name any more."""
    for _ in polls(request.clock, request.wait, MAKE_TIMEOUT_S):
        if os.fstat(fd).st_nlink == 0:
            return False
        if not held_by_other(fd, _MAKER_BYTE):
            if request.may_make:
                unlink_if_same(request.path, fd)
            return False
        if layout.is_ready(os.pread(fd, HEADER_BYTES, 0)):
            return True
    raise InUseError(
        f"{request.path} was not ready within {MAKE_TIMEOUT_S:.0f} s; is its maker stopped? "
        f"Start the engine again"
    )


def _check_owner(path: str, fd: int) -> None:
    """Raise `InUseError` unless the file is a private regular file of this user."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise InUseError(
            f"{path} is no private file of user {os.geteuid()}; remove it or set another arena_dir"
        )


def _checked_size(fd: int, geometry: ArenaGeometry, path: str) -> int:
    """Return the size of the file in bytes. Raises `FormatError` if it is too short."""
    size = os.fstat(fd).st_size
    if size < geometry.file_bytes:
        raise FormatError(f"{path} is {size} bytes, too short; remove it and start again")
    return size
