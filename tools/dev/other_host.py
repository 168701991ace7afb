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
            self.run("tc", "qdisc", "del", "dev", self.device, "root")
            return
        shaped = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "500ms")
        self.run("tc", "qdisc", "replace", "dev", self.device, *shaped)

    def cut(self) -> None:
        """Take the link down: packets are lost, and nobody says so."""
        self.run("ip", "link", "set", self.device, "down")

    def mend(self) -> None:
        """Put the link up again."""
        self.run("ip", "link", "set", self.device, "up")

    def run(self, *command: str) -> None:
        """Run a command on the host, and wait for its end."""
        _run(*self.within, *command)


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make a host; it is gone at the end."""
    name = f"kvc{os.getpid()}"
    here, there = f"{name}a", f"{name}b"
    with namespace(name) as within:
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
def namespace(name: str) -> Iterator[Sequence[str]]:
    """Make a namespace; yield the begin of a command that runs in it."""
    _run("ip", "netns", "add", name)
    try:
        yield "ip", "netns", "exec", name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
