"""Hosts in network namespaces; the test is skipped where the system does not allow them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvcascade.tools.dev.other_host import OtherHost, namespace
from kvcascade.tools.dev.other_host import other_host as made

NEIGHBOURS = f"10.214.{os.getpid() % 250}"
"""Addresses of links between two other hosts: eight for each."""


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make one; it is gone at the end."""
    with ExitStack() as stack:
        try:
            host = stack.enter_context(made())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace, which needs root and iproute2: {error}")
        yield host


@contextmanager
def neighbour_of(host: OtherHost, number: int) -> Iterator[OtherHost]:
    """Make one more host, with a link to this one and to nobody else; `number`: below 30."""
    name = f"{host.network}n{number}"
    theirs, ours = f"n{number}a", f"n{number}b"
    address, peer = (f"{NEIGHBOURS}.{8 * number + last}" for last in (2, 1))
    with namespace(name) as within:
        new = OtherHost(address, within, ours, name, peer)
        ends = ("type", "veth", "peer", "name", ours, "netns", name)
        host.run("ip", "link", "add", theirs, *ends)
        for at, device, own in ((host, theirs, peer), (new, ours, address)):
            at.run("ip", "addr", "add", f"{own}/29", "dev", device)
            at.run("ip", "link", "set", device, "up")
        new.run("ip", "link", "set", "lo", "up")
        yield new
