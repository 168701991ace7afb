"""A link to a server on loopback that damages, holds up and cuts what comes back."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from .remote_servers import HOST

SMALL_BYTES = 2048
"""Smaller messages pass: answers about names and counters, which no checksum protects."""
PIECE_BYTES = 64 << 10
FAULTS, WEIGHTS = ("none", "flip", "stop", "cut"), (50, 41, 3, 6)


class BadLink:
    """Threads that pass bytes on; `seed` decides what happens to them. Context manager."""

    def __init__(self, port: int, seed: int, stall_s: float) -> None:
        """`stall_s`: time for which an answer stops in its middle before it goes on."""
        self._to, self._stall_s = (HOST, port), stall_s
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self._is_over = threading.Event()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._begin(self._accept)

    def __enter__(self) -> BadLink:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _begin(self, work: Callable[..., None], *given: socket.socket) -> None:
        threading.Thread(target=work, args=given, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._begin(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._to) as server:
            self._begin(self._forward, client, server)
            while data := server.recv(PIECE_BYTES):
                if not self._answer(client, data):
                    break
            client.shutdown(socket.SHUT_RDWR)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(PIECE_BYTES):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, client: socket.socket, data: bytes) -> bool:
        """Pass a piece on, or a part of it; False if the link is to be cut."""
        with self._lock:
            fault = self._draw.choices(FAULTS, WEIGHTS)[0]
            at, bit = self._draw.randrange(len(data)), 1 << self._draw.randrange(8)
        if len(data) < SMALL_BYTES:
            fault = "none"
        if fault == "flip":
            data = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        elif fault in ("stop", "cut"):
            client.sendall(data[:at])
            data = data[at:]
            if fault == "cut":
                return False
            self._is_over.wait(self._stall_s)
        client.sendall(data)
        return True
