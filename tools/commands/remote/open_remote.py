"""Open the remote tier that a URL or a configuration names, and ask it politely.

A server that fails ends the command with one sentence, which says why as far as it can be found
out. No sentence holds a credential.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ....assembly.named import configured
from ....config.environment import text_keys
from ....config.options import At
from ....config.remote import RemoteTierOptions, parse_remote
from ....errors import ConfigError, file_mode, os_errors
from ....tiers.remote.base import FAILURES, RemoteEngine, RemoteEntry, RemoteOutcome
from ....tiers.remote.objects import Seal, counter_name
from ....tiers.remote.remote_options import folder_problem, missing_extra, open_remote_engine
from ....tiers.remote.remote_probe import reason, sentence
from ..check.transfer_config import STANDARD_INPUT, read_config
from ..command_line import CommandError, ExitCode, answering_apart, check_is_file, settings_of

CALL_LIMIT_S = 60.0
"""Longest time in seconds of one call of the engine, beside that of its last request."""
FAILED_CALLS_MAX = 3
"""Calls in a row of which everything failed, until the command gives up."""
MARK = "://"
"""Part of every URL; other words name files."""


@dataclass(slots=True)
class RemoteServer:
    """A remote tier as tools use it: without a fingerprint, and for all namespaces. One thread."""

    options: RemoteTierOptions
    engine: RemoteEngine
    seal: Seal | None
    failed_calls: int = 0
    """Calls in a row of which everything failed."""

    def entries(self, namespace: str) -> Iterator[RemoteEntry]:
        """Yield all objects of the namespaces that begin with these digits.

        Raises `CommandError` if the server fails.
        """
        prefix = f"{namespace}/" if len(namespace) == NAMESPACE_DIGITS else ""
        for batch in self.engine.list_objects(prefix, CALL_LIMIT_S):
            if batch.outcome is not RemoteOutcome.OK:
                raise self.failure(batch.outcome)
            for entry in batch.entries:
                if entry.name.startswith(namespace):
                    yield entry

    def counter(self, namespace: str) -> int | None:
        """Return the counter of a namespace's generations; None if the server has lost it.

        Raises `CommandError`.
        """
        found = self.engine.counter(counter_name(namespace), None, CALL_LIMIT_S)
        if found.outcome is RemoteOutcome.ABSENT:
            return None
        if found.outcome is not RemoteOutcome.OK:
            raise self.failure(found.outcome)
        return found.value

    def note(self, outcomes: Sequence[RemoteOutcome]) -> None:
        """Raise `CommandError` if all of the last few calls have failed as a whole."""
        if not outcomes:
            return
        failed = [outcome for outcome in outcomes if outcome in FAILURES]
        self.failed_calls = self.failed_calls + 1 if len(failed) == len(outcomes) else 0
        if self.failed_calls >= FAILED_CALLS_MAX:
            raise self.failure(failed[-1])

    def failure(self, outcome: RemoteOutcome) -> CommandError:
        """Return the error for a failure of the server; asks the server for its cause."""
        options = self.options
        said = reason(outcome, self.engine.explain(options.deadline_s))
        return CommandError(sentence(options, said), ExitCode.CANNOT_OPEN)


NAMESPACE_DIGITS = 32
"""Digits of the name of a namespace."""


@contextmanager
def opened(remote: str, settings: Sequence[str] | None) -> Iterator[RemoteServer]:
    """Open a tier by its URL and options, or by the file of a configuration.

    Nothing is asked of the server yet. A folder must exist: if it is missing, a share may not be
    mounted. Raises `CommandError` or `ConfigError`.
    """
    if MARK in remote:
        given = settings_of(settings or (), text_keys(RemoteTierOptions))
        options = parse_remote(At("remote"), {**given, "url": remote})
    elif settings:
        raise CommandError("--set: it goes with a URL; write it into the file", ExitCode.USAGE)
    else:
        options = _of_file(Path(remote))
    missing = missing_extra(options)
    if missing is not None:
        raise CommandError(missing, ExitCode.MISSING)
    problem = folder_problem(options, may_be_missing=False)
    if problem is not None:
        raise CommandError(problem, ExitCode.CANNOT_OPEN)
    engine, seal = open_remote_engine(options, os.environ)
    try:
        yield RemoteServer(options, engine, seal)
    finally:
        engine.close()


def _of_file(path: Path) -> RemoteTierOptions:
    with os_errors("looking for the file of REMOTE"):
        is_file = path == STANDARD_INPUT or stat.S_ISREG(file_mode(path))
    if not is_file:  # the word may hold a password
        message = 'REMOTE: is neither a URL nor a file; give one such as "s3://bucket/kv"'
        raise CommandError(message, ExitCode.USAGE)
    if path != STANDARD_INPUT:
        check_is_file("REMOTE", path)
    with answering_apart(True):  # vLLM prints to standard output
        given = read_config(path)
    if given.problems:
        raise ConfigError(given.problems[0])
    options = configured(given.extra).remote
    if options is None:
        raise CommandError(f"{given.source} has no remote tier; give its URL", ExitCode.USAGE)
    return options
