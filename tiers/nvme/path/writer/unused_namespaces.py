"""Open namespaces that no node uses any more: they are closed, because they take files and memory.

Their room counts as before. Used by the writer's thread, but for `await_closing`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress

from .namespace.namespace_writer import NamespaceWriter
from .path_space import PathSpace

UNUSED_LIMIT_S = 300.0
"""Time without a node after which a namespace is closed. An engine that restarts finds it open."""


class UnusedNamespaces:
    """Closes namespaces, one at a time, on an I/O thread: closing syncs their tables."""

    def __init__(
        self,
        space: PathSpace,
        close: Callable[[NamespaceWriter], None],
        executor: Executor,
    ) -> None:
        """`close` closes a namespace."""
        self._space = space
        self._close = close
        self._executor = executor
        self._since_s: dict[str, float] = {}
        """Open namespaces without a node, and the time at which that was first seen."""
        self._closing: tuple[str, Future[None]] | None = None
        """Name of the namespace that is being closed, or was closed last."""

    def close_next(self, now_s: float, *, may_close: bool) -> None:
        """Begin to close a namespace that no node has used for `UNUSED_LIMIT_S`, if there is one.

        Call it about once a second; without `may_close` it only notes the time. `now_s` is
        monotonic.
        """
        space, since_s = self._space, self._since_s
        unused = [each for each in space.namespaces.values() if not each.clients]
        names = [each.home.name for each in unused]
        self._since_s = {name: since_s.get(name, now_s) for name in names}
        for name, namespace in zip(names, unused, strict=True):
            taken = space.taking is not None and space.taking.name == name
            has_work = taken or space.files.has_work(name) or namespace.is_resetting
            if (
                has_work
                or not may_close
                or self.is_closing()
                or now_s - self._since_s[name] < UNUSED_LIMIT_S
            ):
                continue
            day = namespace.table.day_record()  # reads and totals were written down since
            sizes = [space.files.bytes_in(name, path) for path in range(space.capacity.paths)]
            space.idle.add(namespace.home, day, sizes)
            space.forget(name)
            del self._since_s[name]  # it may be opened again within a second
            with suppress(RuntimeError):  # the executor is shutting down: as a kill would
                self._closing = name, self._executor.submit(self._close, namespace)
            return

    def is_closing(self, name: str | None = None) -> bool:
        """Return True while a namespace is being closed; None: any."""
        closing = self._closing
        return closing is not None and name in (None, closing[0]) and not closing[1].done()

    def await_closing(self, name: str) -> None:
        """Wait until a namespace is closed that is to be opened again. Runs on an I/O thread."""
        closing = self._closing
        if closing is not None and closing[0] == name:
            wait([closing[1]])
