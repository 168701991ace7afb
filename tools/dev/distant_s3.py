"""A bucket at a distance: the parts of S3 that a remote tier uses, in memory.

    python -m kvcascade.tools.dev.distant_s3 PORT DISTANCE_S

Each answer comes `DISTANCE_S` late, and at the rate that one connection to a bucket has. It checks
no signature. moto is too slow to show what a distance costs.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from .remote_server import HOST

CONNECTION_BYTES_PER_S = 90e6
"""Rate of one connection, as in Amazon's guidelines for S3 (85 to 90 MB/s)."""
BUFFER_BYTES = 64 << 20


class _Asked(NamedTuple):
    """A request."""

    method: str
    place: str
    headers: dict[str, str]
    body: bytes


class _Answer(NamedTuple):
    """Status and body."""

    status: int
    body: bytes = b""


class _Bucket:
    """Objects by name."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def answer(self, asked: _Asked) -> _Answer:
        """Carry out a request."""
        place = urlsplit(asked.place)
        name, query = unquote(place.path).lstrip("/"), parse_qs(place.query)
        if "list-type" in query:
            return self._list(name.split("/")[0], query)
        if asked.method in ("GET", "HEAD"):
            found = self._held.get(name)
            return _Answer(404) if found is None else _Answer(200, found)
        if asked.method == "PUT":
            if asked.headers.get("if-none-match") == "*" and name in self._held:
                return _Answer(412)
            self._held[name] = asked.body
        return _Answer(200)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> _Answer:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        names = (name.removeprefix(f"{bucket}/") for name in self._held)
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(self._held[f'{bucket}/{name}'])}</Size>"
            '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"0"</ETag></Contents>'
            for name in sorted(names)
            if name.startswith(prefix) and name > after
        )
        said = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return _Answer(200, said.encode())


async def _read(reader: asyncio.StreamReader) -> _Asked:
    method, place, _ = (await reader.readuntil(b"\r\n")).decode().split(" ", 2)
    headers: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return _Asked(method, place, headers, body)


async def serve(port: int, distance_s: float) -> None:
    """Answer requests until the process is killed."""
    bucket, date = _Bucket(), formatdate(usegmt=True)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                asked = await _read(reader)
                status, body = bucket.answer(asked)
                sent = b"" if asked.method == "HEAD" else body
                moved = max(len(sent), len(asked.body))
                await asyncio.sleep(distance_s + moved / CONNECTION_BYTES_PER_S)
                head = (
                    f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n"
                    f'Last-Modified: {date}\r\nETag: "0"\r\n\r\n'
                )
                writer.write(head.encode())
                writer.write(sent)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, HOST, port, limit=BUFFER_BYTES)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
