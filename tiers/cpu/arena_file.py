"""Making, joining and removing the arena's file, safe against any process dying at any point.

Guarantees:

- Exactly one process makes the file of a name; the others see it complete or not at all.
- A file nobody alive holds, or whose maker is dead, is never joined: a worker replaces it, so a
  crashed engine blocks nobody. What it does to a surviving process is nothing: that one keeps
  its mapping of memory that has no name any more.
- No memory is allocated before the capacity check; when a file is ready all of its pages are
  reserved, so touching them later cannot fail for lack of space (SIGBUS).

How: the maker creates the file (O_EXCL, 0600), locks the maker byte, takes the shared flock, and
only then looks whether the name still leads to its file; a racing opener that found the file in
between, unlocked, has removed it as stale, and the maker starts again. A joiner holds the shared
flock before it looks at the maker byte, so a maker it sees as dead is dead.

An arena that is kept gets a lasting name once everybody has mapped it. A later maker takes it over
only if it can have the exclusive flock, so never from anybody alive (a process that may write into
slots holds the shared one), keeps that until the header is a new arena's, and shares it then.
The ranks of an engine come at the same time: they take turns at taking one over or else making the
name, or one would make a new file beside the arena that another is just taking over. A turn takes
milliseconds, as the memory is reserved after it; who does not get it in time goes on without.

Assumes one host, a local file system that supports both kinds of locks (tmpfs, hugetlbfs, ext4,
xfs), and one user. Not thread-safe; each call opens its own file.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ...config.sizes import human
from ...errors import ConfigError, FormatError, InUseError, NoSpaceError, os_errors
from .. import ofd_locks
from . import header as layout
from .arena_limits import MachineMemory, check_capacity, process_start_ticks
from .header import HEADER_BYTES, ArenaGeometry, ArenaHeader, Creator
from .huge_pages import gather
from .locks import try_flock, turn_in
from .nodes import spread

Clock = Callable[[], float]
"""Monotonic seconds."""
Wait = Callable[[float], None]
"""Let that many seconds pass."""
Probe = Callable[[str], MachineMemory]

POLL_S = 0.01
OPEN_ATTEMPTS_MAX = 1000
MAKE_TIMEOUT_S = 600.0
"""How long a maker that is alive may take to reserve the memory."""
JOIN_TIMEOUT_S = 60.0
"""How long the scheduler waits for the workers' file and for their ranks."""
TURN_TIMEOUT_S = 5.0
"""How long one waits for who is taking a kept arena over; it may be stopped."""
SWEEP_ENTRIES_MAX = 1024
"""Leftover files that one sweep looks at."""

_MAKER_BYTE = 0
_NAME = re.compile(r"kvcascade-[0-9a-f]{32}")
_KEPT_NAME = re.compile(r"kvcascade-kept-[0-9a-f]{32}")
KEPT_ENTRIES_MAX = 1024
"""Kept arenas that are looked at for one to take over."""
_DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class ArenaFile:
    """An open, ready arena file; the shared flock is held through `fd`."""

    fd: int
    path: str
    size_bytes: int
    header: ArenaHeader
    is_made: bool
    """True if this process made it."""


@dataclass(frozen=True, slots=True)
class ArenaRequest:
    """What `open_file` is asked for."""

    geometry: ArenaGeometry
    path: str
    may_make: bool
    """False: wait for others to make it, and never replace what is there."""
    clock: Clock
    wait: Wait
    probe: Probe


def arena_path(arena_dir: str, engine_id: str) -> str:
    """The file's name: the same in all processes of one engine of one user."""
    name = f"{os.geteuid()}:{engine_id}".encode()
    digest = hashlib.blake2b(name, digest_size=_DIGEST_SIZE).hexdigest()
    return os.path.join(arena_dir, f"kvcascade-{digest}")


def kept_arenas(arena_dir: str) -> list[str]:
    """Paths of the arenas in a directory that outlived, or may outlive, their processes."""
    with suppress(OSError), os.scandir(arena_dir) as entries:
        found = [entry.path for entry in entries if _KEPT_NAME.fullmatch(entry.name)]
        return sorted(found)[:KEPT_ENTRIES_MAX]
    return []


def give_up_name(path: str, fd: int, is_kept: bool) -> bool:
    """The arena's own name is not needed any more; a kept one gets a lasting name instead.

    True if the name was still that of the open file.
    """
    if not is_kept:
        return unlink_if_same(path, fd)
    lasting = os.path.join(os.path.dirname(path), f"kvcascade-kept-{secrets.token_hex(16)}")
    try:
        os.link(path, lasting, follow_symlinks=False)
        if os.path.samestat(os.stat(lasting, follow_symlinks=False), os.fstat(fd)):
            return unlink_if_same(path, fd)
        os.unlink(lasting)
    except OSError:
        return False  # gone already: somebody else gave it its name
    return False


def drop_kept(path: str) -> bool:
    """Remove a kept arena unless a live process holds it; True if it is gone."""
    return bool(_KEPT_NAME.fullmatch(os.path.basename(path))) and _remove_stale(path)


def kept_header(path: str) -> tuple[ArenaHeader, bool] | None:
    """The header of a kept arena, and whether a live process holds it; None if it is none of ours.

    Takes the exclusive lock for a moment, as a maker that looks for one to take over does.
    """
    fd = _open_own(path)
    if fd is None:
        return None
    try:
        is_free = try_flock(fd, exclusive=True)
        return layout.read_fixed(os.pread(fd, HEADER_BYTES, 0), path), not is_free
    except (OSError, FormatError):
        return None
    finally:
        os.close(fd)


def check_dir(arena_dir: str) -> None:
    """Raise `ConfigError` unless files can be made in `arena_dir`."""
    if not os.path.isdir(arena_dir):
        raise ConfigError(f"arena_dir: {arena_dir!r} is no directory; name one, such as /dev/shm")
    if not os.access(arena_dir, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"arena_dir: {arena_dir!r} is not writable; change its mode or the key")


def open_file(request: ArenaRequest) -> ArenaFile:
    """Make or join the file at `request.path`.

    Raises `ConfigError` (capacity), `NoSpaceError`, `FormatError` (other geometry or version),
    `InUseError` (foreign owner, maker too slow or never there), `TierIOError`.
    """
    deadline = request.clock() + JOIN_TIMEOUT_S
    patience = _Patience(request)
    for _ in range(OPEN_ATTEMPTS_MAX):
        if request.may_make:
            file = _make(request, patience) or _join(request)
        else:
            file = _join(request)
        if file is not None:
            return file
        if not request.may_make and request.clock() >= deadline:
            break
        request.wait(POLL_S)
    raise InUseError(
        f"{request.path} could not be opened: "
        + (
            "other processes keep replacing it; give each engine its own engine_id"
            if request.may_make
            else "no worker of this engine made it; start workers first, on the same host"
        )
    )


def unlink_if_same(path: str, fd: int) -> bool:
    """Remove the name if it still leads to the open file; True if it did."""
    try:
        named, held = os.stat(path, follow_symlinks=False), os.fstat(fd)
        if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            return False
        os.unlink(path)
    except OSError:
        return False  # gone already, or not ours to remove
    return True


def sweep(arena_dir: str) -> list[str]:
    """Remove arena files that no live process holds; returns their paths.

    Never touches a file that is locked, of another user, or no arena. Errors are ignored.
    """
    removed: list[str] = []
    with suppress(OSError), os.scandir(arena_dir) as entries:
        ours = [entry.path for entry in entries if _NAME.fullmatch(entry.name)]
        removed = [path for path in sorted(ours)[:SWEEP_ENTRIES_MAX] if _remove_stale(path)]
    return removed


def _open_own(path: str) -> int | None:
    """Open a regular file of this user; None if it is not one."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


def _remove_stale(path: str) -> bool:
    fd = _open_own(path)
    if fd is None:
        return False
    try:
        if not try_flock(fd, exclusive=True):
            return False
        return layout.looks_like_arena(os.pread(fd, HEADER_BYTES, 0)) and unlink_if_same(path, fd)
    except OSError:
        return False
    finally:
        os.close(fd)


class _Patience:
    """Waits for a turn, over all attempts of one opener."""

    def __init__(self, request: ArenaRequest) -> None:
        self._request = request
        self._until_s = request.clock() + TURN_TIMEOUT_S
        self._waits_left = int(TURN_TIMEOUT_S / POLL_S)

    def wait(self) -> bool:
        """Wait a little; False if it was enough."""
        if self._waits_left == 0 or self._request.clock() >= self._until_s:
            return False
        self._waits_left -= 1
        self._request.wait(POLL_S)
        return True


def _take_over(request: ArenaRequest) -> ArenaFile | None:
    """A kept arena of the same shape that nobody holds, under this engine's name."""
    for path in kept_arenas(os.path.dirname(request.path)):
        fd = _open_own(path)
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


def _make(request: ArenaRequest, patience: _Patience) -> ArenaFile | None:
    """Take a kept arena over, or make a new one; None if the name is there already."""
    taken, fd = None, None
    if request.geometry.kept:
        folder = os.path.dirname(request.path)
        with os_errors(f"opening {folder}"), turn_in(folder, patience.wait):
            if not os.path.lexists(request.path):
                taken = _take_over(request)
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
    """Create the file; None if it is there already or a racing opener took it for stale."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(request.path, flags, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(
            f"arena_dir: {request.path} cannot be made ({error.strerror}); change the key"
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
    """Lock a file just created; False if another opener saw it unlocked and removed it."""
    with os_errors(f"locking {path}"):
        if not ofd_locks.try_lock(fd, _MAKER_BYTE) or not try_flock(fd, exclusive=False):
            unlink_if_same(path, fd)
            return False
        return os.fstat(fd).st_nlink > 0


def _fill(request: ArenaRequest, fd: int) -> ArenaFile:
    """Reserve the memory, write the header, let the others in."""
    geometry, path = request.geometry, request.path
    memory = request.probe(os.path.dirname(path))
    size = layout.round_up(geometry.file_bytes, memory.block_bytes)
    check_capacity(size, os.path.dirname(path), memory)
    is_huge = _reserve(request, fd, size, memory)
    made = _write_header(request, fd, size, is_huge)
    return ArenaFile(fd, path, size, made, is_made=True)


def _write_header(request: ArenaRequest, fd: int, size: int, is_huge: bool) -> ArenaHeader:
    pid = os.getpid()
    creator = Creator(pid, process_start_ticks(pid))
    token = secrets.token_bytes(layout.TOKEN_BYTES)
    made = ArenaHeader(request.geometry, creator, token, is_huge)
    # Through a mapping: hugetlbfs files cannot be written with write().
    page_bytes = min(size, request.probe(os.path.dirname(request.path)).block_bytes)
    with os_errors(f"mapping {request.path}"), mmap.mmap(fd, page_bytes) as page:
        with memoryview(page) as view:
            layout.clear_records(view)
            layout.write_fixed(view, made)
            layout.mark_ready(view)
    return made


def _reserve(request: ArenaRequest, fd: int, size: int, memory: MachineMemory) -> bool:
    """Take all of the memory; True if it lies in huge pages."""
    path = request.path
    try:
        os.ftruncate(fd, size)
        if len(memory.nodes) > 1:
            spread(fd, size, memory.nodes)
        is_huge = memory.huge or (memory.may_gather and gather(fd, size, request.clock))
        os.posix_fallocate(fd, 0, size)
        return is_huge
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise NoSpaceError(
                f"capacity: {human(size)} could not be reserved in {os.path.dirname(path)} "
                f"({error.strerror}); lower it or free memory (kvcascade shm ls shows arenas that "
                f"were kept)"
            ) from error
        with os_errors(f"reserving {human(size)} for {path}"):
            raise


def _join(request: ArenaRequest) -> ArenaFile | None:
    """Open an existing file once it is ready; None to try again from the start."""
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
    path = request.path
    with os_errors(f"joining {path}"):
        _check_owner(path, fd)
        if try_flock(fd, exclusive=True):
            if request.may_make:
                unlink_if_same(path, fd)
            return None
        if not try_flock(fd, exclusive=False):
            return None  # a peer is looking whether the file is stale
        if not _wait_ready(request, fd):
            return None
        header = layout.read_fixed(os.pread(fd, HEADER_BYTES, 0), path)
    if header.geometry != request.geometry:
        raise FormatError(
            f"{path} was made for {header.geometry}, this process came to {request.geometry}; "
            f"give every process of the engine the same configuration"
        )
    return header


def _wait_ready(request: ArenaRequest, fd: int) -> bool:
    """Wait for the maker; False if it is dead or the name is gone."""
    deadline = request.clock() + MAKE_TIMEOUT_S
    for _ in range(int(MAKE_TIMEOUT_S / POLL_S) + 1):
        if os.fstat(fd).st_nlink == 0:
            return False
        if not ofd_locks.held_by_other(fd, _MAKER_BYTE):
            if request.may_make:
                unlink_if_same(request.path, fd)
            return False
        if layout.is_ready(os.pread(fd, HEADER_BYTES, 0)):
            return True
        if request.clock() >= deadline:
            break
        request.wait(POLL_S)
    raise InUseError(
        f"{request.path} was not ready within {MAKE_TIMEOUT_S:.0f} s; is its maker stopped? "
        f"Start the engine again"
    )


def _check_owner(path: str, fd: int) -> None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise InUseError(
            f"{path} is no private file of user {os.geteuid()}; remove it or set another arena_dir"
        )


def _checked_size(fd: int, geometry: ArenaGeometry, path: str) -> int:
    size = os.fstat(fd).st_size
    if size < geometry.file_bytes:
        raise FormatError(f"{path} is {size} bytes, too short; remove it and start again")
    return size
