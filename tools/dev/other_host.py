"""Hosts of their own, in network namespaces, behind links whose rate can be limited.

They need root, `ip` and `tc` (Debian: iproute2). All here raises `OSError` without these commands,
and `subprocess.CalledProcessError` if one of them fails.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

LIMIT_S = 20
NETWORK = f"10.213.{os.getpid() % 250}"
"""Addresses of the two ends of the link; they exist on this machine only."""
NEIGHBOURS = f"10.214.{os.getpid() % 250}"
"""Addresses of links between two other hosts: eight for each."""


@dataclass(frozen=True)
class OtherHost:
    """A namespace with one address."""

    address: str
    within: Sequence[str]
    """Command that runs another one there."""
    device: str
    network: str
    """Name of the namespace."""
    peer: str
    """Address at the other end of its link."""

    def limit(self, rate: str | None) -> None:
        """Let no more than this rate out of the host, such as "100mbit"; None: no limit."""
        if rate is None:
            self._run("tc", "qdisc", "del", "dev", self.device, "root")
            return
        shaped = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "500ms")
        self._run("tc", "qdisc", "replace", "dev", self.device, *shaped)

    def cut(self) -> None:
        """Take the link down: packets are lost, and nobody says so."""
        self._run("ip", "link", "set", self.device, "down")

    def mend(self) -> None:
        """Put the link up again."""
        self._run("ip", "link", "set", self.device, "up")

    def _run(self, *command: str) -> None:
        _run(*self.within, *command)


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make a host; it is gone at the end."""
    name = f"kvc{os.getpid()}"
    here, there = f"{name}a", f"{name}b"
    with _namespace(name) as within:
        try:
            _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run(*within, "ip", "addr", "add", f"{NETWORK}.2/24", "dev", there)
            _run(*within, "ip", "link", "set", there, "up")
            yield OtherHost(f"{NETWORK}.2", within, there, name, f"{NETWORK}.1")
        finally:
            subprocess.run(["ip", "link", "del", here], capture_output=True, timeout=LIMIT_S)


@contextmanager
def neighbour_of(host: OtherHost, number: int) -> Iterator[OtherHost]:
    """Make one more host, with a link to this one and to nobody else; `number`: below 30."""
    name = f"{host.network}n{number}"
    theirs, ours = f"n{number}a", f"n{number}b"
    address, peer = (f"{NEIGHBOURS}.{8 * number + last}" for last in (2, 1))
    with _namespace(name) as within:
        ends = ("type", "veth", "peer", "name", ours, "netns", name)
        _run(*host.within, "ip", "link", "add", theirs, *ends)
        for at, device, own in ((host.within, theirs, peer), (within, ours, address)):
            _run(*at, "ip", "addr", "add", f"{own}/29", "dev", device)
            _run(*at, "ip", "link", "set", device, "up")
        _run(*within, "ip", "link", "set", "lo", "up")
        yield OtherHost(address, within, ours, name, peer)


@contextmanager
def _namespace(name: str) -> Iterator[Sequence[str]]:
    """Make a namespace; yield the begin of a command that runs in it."""
    _run("ip", "netns", "add", name)
    try:
        yield "ip", "netns", "exec", name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
