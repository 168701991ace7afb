"""The search of a node for the writer of its path, on a thread of its own, because it opens files.

If this node wins the election, its process serves the path (`WriterService`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ....errors import FINAL_ERRORS, ConfigError, KVCascadeError
from ....logs import get_logger
from ....threads import started_pool
from ....tiers.nvme.disk.filesystem import FileLock, FileSystem
from ....tiers.nvme.path.path_lock import PathDoor, try_lead
from ....tiers.nvme.path.path_messages import PathOptions
from ....tiers.nvme.path.writer.path_options import PATH_FOLDER, check_options
from .path_service import WriterService

WRITER_STOP_LIMIT_S = 4.0
"""Time for the writer of this process to close cleanly at the end."""
RETIRED_PAUSE_S = 5.0
"""Time for which a node whose writer was asked to close does not lead again."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """Result of one search for the writer."""

    connection: socket.socket | None
    is_leader: bool = False
    text: str = ""
    is_final: bool = False


class WriterSearch:
    """Finds the writer of a path, or becomes it."""

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        options: PathOptions,
        name: str,
        trusts_boot: bool,
        on_joined: Callable[[Joined], None],
        on_obstacle: Callable[[str], None],
        *,
        was_here: bool,
    ) -> None:
        """`was_here`: an earlier node of the engine used the path, which is not made anew.

        `trusts_boot` is that of `WriterService`. `on_joined` is called with the result of each
        search, on its thread. `on_obstacle` is called once with the reason why this process cannot
        be the writer, on the same thread."""
        self._fs, self._roots = fs, roots
        self._options = options
        self._name = name
        self._trusts_boot = trusts_boot
        self._was_here = was_here
        self._on_joined = on_joined
        self._on_obstacle = on_obstacle
        self._service: WriterService | None = None
        self._place: PathDoor | None = None
        """Folder of the tier when it was first found. A mount point without it is another tier."""
        self._may_lead_s = 0.0
        self._thread = started_pool(1, "kvcascade-join")

    def begin(self) -> None:
        """Search once. Any thread."""
        self._thread.submit(self._join)

    def end(self) -> None:
        """Wait for the search that is under way; none begins any more."""
        self._thread.shutdown(wait=True)

    def close(self) -> None:
        """Close a writer of this process, after `end`."""
        if self._service is not None:
            self._service.stop(WRITER_STOP_LIMIT_S)
        if self._place is not None:
            self._place.close()

    # -- on its own thread ---------------------------------------------------------------------

    def _join(self) -> None:
        try:
            joined = self._find_writer()
        except FINAL_ERRORS as error:
            joined = Joined(None, text=str(error), is_final=True)
        except KVCascadeError as error:
            joined = Joined(None, text=str(error))
        except Exception:
            _log.exception("the search for the writer failed in a way it should not")
            joined = Joined(None, text="the search for the writer of the path failed")
        self._on_joined(joined)

    def _find_writer(self) -> Joined:
        service = self._service
        if service is not None and not service.is_alive:
            self._service = None
            if service.was_retired:
                self._may_lead_s = time.monotonic() + RETIRED_PAUSE_S
        elif service is not None:
            return Joined(service.connect(), is_leader=True)
        root = self._roots[0]
        if self._is_gone(root):
            text = f"{root} was replaced or unmounted; put it back, or restart the engine"
            return Joined(None, text=text)
        text = self._obstacle
        may_lead = not text and time.monotonic() >= self._may_lead_s
        lock = try_lead(self._fs, root) if may_lead else None
        if lock is not None:
            return self._lead(lock)
        if text and not self._fs.exists(root / PATH_FOLDER):
            return Joined(None, text=text)
        if self._place is None:
            self._place = PathDoor(root)
        if not text:
            text = (
                f"nobody answers at {root} though its lock is held; stop the process that holds "
                "it, which may be on another host"
            )
        return Joined(self._place.connect(), text=text)

    def _is_gone(self, root: Path) -> bool:
        """Return True if the folder is not the one that the engine used before."""
        if self._place is None:
            return self._was_here and not self._fs.exists(root / PATH_FOLDER)
        return not self._place.is_in_place()

    @cached_property
    def _obstacle(self) -> str:
        """Reason why this process cannot be the writer with its options; empty if it can.

        A policy of the user's own may be found by the engine's process and not by this one.
        """
        try:
            check_options(self._options)
        except ConfigError as error:
            text = f"this engine cannot write the path, others can: {error}"
            self._on_obstacle(text)
            return text
        return ""

    def _lead(self, lock: FileLock) -> Joined:
        """Serve the path from this process."""
        self._service = WriterService(
            self._fs,
            self._roots,
            self._options,
            lock,
            name=self._name,
            trusts_boot=self._trusts_boot,
        )
        if self._place is None:
            self._place = PathDoor(self._roots[0])
        return Joined(self._service.connect(), is_leader=True)
