"""Hosts of their own, in network namespaces, behind links whose rate can be limited.

Needs root and `ip` and `tc`; the test is skipped where the system does not allow it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

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
    network: str = ""
    """Name of the namespace."""
    peer: str = ""
    """Address at the other end of its link."""

    def limit(self, rate: str) -> None:
        """Let no more than this rate out of the host, such as "100mbit"."""
        shaped = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "500ms")
        _run(*self.within, "tc", "qdisc", "replace", "dev", self.device, *shaped)

    def cut(self) -> None:
        """Take the link down: packets are lost, and nobody says so."""
        _run(*self.within, "ip", "link", "set", self.device, "down")

    def mend(self) -> None:
        """Put the link up again."""
        _run(*self.within, "ip", "link", "set", self.device, "up")


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make one; it is gone at the end."""
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("no ip or tc (Debian: iproute2)")
    name = f"kvc{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError:
        pytest.skip("this system lets this user make no network namespace")
    within = ("ip", "netns", "exec", name)
    here, there = f"{name}a", f"{name}b"
    try:
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", here)
        _run("ip", "link", "set", here, "up")
        _run(*within, "ip", "addr", "add", f"{NETWORK}.2/24", "dev", there)
        _run(*within, "ip", "link", "set", there, "up")
        yield OtherHost(f"{NETWORK}.2", within, there, name, f"{NETWORK}.1")
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)
        subprocess.run(["ip", "link", "del", here], capture_output=True, timeout=LIMIT_S)


@contextmanager
def neighbour_of(host: OtherHost, number: int) -> Iterator[OtherHost]:
    """Make one more host, with a link to this one and to nobody else; `number`: below 30."""
    name = f"{host.network}n{number}"
    theirs, ours = f"n{number}a", f"n{number}b"
    within, first = ("ip", "netns", "exec", name), 8 * number
    _run("ip", "netns", "add", name)
    try:
        ends = ("type", "veth", "peer", "name", ours, "netns", name)
        _run(*host.within, "ip", "link", "add", theirs, *ends)
        for at, device, last in ((host.within, theirs, 1), (within, ours, 2)):
            _run(*at, "ip", "addr", "add", f"{NEIGHBOURS}.{first + last}/29", "dev", device)
            _run(*at, "ip", "link", "set", device, "up")
        _run(*within, "ip", "link", "set", "lo", "up")
        address, peer = (f"{NEIGHBOURS}.{first + last}" for last in (2, 1))
        yield OtherHost(address, within, ours, name, peer)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
