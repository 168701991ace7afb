"""Hosts in network namespaces; the test is skipped where the system does not allow them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvcascade.tools.dev.other_host import OtherHost
from kvcascade.tools.dev.other_host import other_host as made


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make one; it is gone at the end."""
    with ExitStack() as stack:
        try:
            host = stack.enter_context(made())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace, which needs root and iproute2: {error}")
        yield host
