"""`kvcascade top PATH`: figures of the namespaces of a path, each as a "tier".

Figures of a running writer are its own. If no process writes the path, it does not change. Then the
command is the writer for its first reading only, and shows those totals again. Numbers of blocks
come from files if a writer does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....errors import FormatError, KVCascadeError
from ....tiers.nvme.disk.filesystem import FileSystem, RealFileSystem
from ..path_files import read_presence
from ..path_folders import NamespaceFolder, folders_in
from ..path_session import AnswerError, PathSession, follow_session, open_session
from .top_frame import Figures, Reading

COUNTED = ("tier_blocks", "tier_used_ratio")
"""Figures that the files of a namespace have."""
Mutable = dict[tuple[str, str], float]
"""Figures that are being gathered."""


class PathReadings:
    """Readings of a path, one after the other. One thread."""

    def __init__(
        self,
        path: Path,
        also: Sequence[Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._path = path
        self._also = also or ()
        self._clock = clock
        self._fs: FileSystem = RealFileSystem()
        self._totals: Figures | None = None
        """Figures that only a writer knows, of the last reading; None before the first."""

    def read(self) -> Reading:
        """Return the figures of now. If there are several namespaces, one without figures has a
        problem. Raises a `KVCascadeError`."""
        found = folders_in(self._fs, self._path, self._also)
        readable = [each for each in found if each.is_readable]
        problems = {each.name: each.problem for each in found if each.problem}
        figures: Mutable = {}
        if readable:
            try:
                figures |= self._told({each.name for each in readable}, problems)
            except KVCascadeError as error:
                problems |= {each.name: str(error) for each in readable}
        for one in readable:
            try:
                figures = {**_counted(self._fs, one), **figures}
            except KVCascadeError as error:
                if ("tier_blocks", one.name) not in figures:
                    problems.setdefault(one.name, str(error))
        if not figures and len(found) == 1:
            raise FormatError(problems.get(found[0].name) or found[0].reason)
        return Reading(self._clock(), figures, problems)

    def _told(self, names: Set[str], problems: dict[str, str]) -> Figures:
        """Return the figures of the writer, and add reasons for those that it lacks."""
        with self._session() as session:
            if session is None:
                assert self._totals is not None, "the first reading is never without a writer"
                return self._totals
            figures: Mutable = {}
            left = session.ask("stat")["budget_left_bytes"]
            for one in session.ask("list")["namespaces"]:
                name = one["name"]
                is_open = one["is_open"] or session.is_writer
                if name not in names or not is_open:
                    continue  # nobody has it open: its files say how many blocks it has
                try:
                    figures |= _figures_of(name, session.ask("namespace", name=name), left)
                except AnswerError as error:
                    problems[name] = str(error)
            self._totals = {key: n for key, n in figures.items() if key[0] not in COUNTED}
            return figures

    @contextmanager
    def _session(self) -> Iterator[PathSession | None]:
        """Open a session; None if nothing was written since the last reading."""
        session = follow_session(self._fs, self._path)
        if session is None and self._totals is None:
            session = open_session(self._fs, self._path, self._also)
        try:
            yield session
        finally:
            if session is not None:
                session.close()


def _figures_of(name: str, facts: dict[str, Any], left: int | None) -> Figures:
    figures: Mutable = {
        ("tier_blocks", name): facts["blocks"],
        ("tier_used_ratio", name): facts["blocks"] / facts["slots"],
        ("demoted_bytes", name): facts["written_bytes"],
        ("promoted_bytes", name): facts["read_bytes"],
    }
    if left is not None:
        figures["write_budget_left_bytes", name] = left
    return figures


def _counted(fs: FileSystem, one: NamespaceFolder) -> Figures:
    """Return the figures that the presence table of a namespace has. Raises a `KVCascadeError`."""
    table, _ = read_presence(fs, one.folders[0])
    blocks = int(table.used_slots().sum())
    name = one.name
    return {("tier_blocks", name): blocks, ("tier_used_ratio", name): blocks / table.slots}
