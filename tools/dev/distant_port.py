"""A port at a distance: what passes in either direction arrives late, and in order.

    python -m kvcascade.tools.dev.distant_port PORT TARGET_PORT ROUND_TRIP_S

Each byte waits for half the round trip. A connection holds up to `HELD_BYTES` on their way.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from .remote_server import HOST

HELD_BYTES = 64 << 20
PIECE_BYTES = 256 << 10


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way_s: float) -> None:
    """Pass on what comes until it ends, each piece `way_s` after its arrival."""
    clock = asyncio.get_running_loop().time
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD_BYTES // PIECE_BYTES)

    async def take() -> None:
        piece = b"first"
        while piece:
            piece = b""
            with suppress(ConnectionError):
                piece = await reader.read(PIECE_BYTES)
            await on_the_way.put((clock() + way_s, piece))

    taking = asyncio.create_task(take())
    with suppress(ConnectionError):
        while True:
            due_s, piece = await on_the_way.get()
            await asyncio.sleep(due_s - clock())
            if not piece:
                break
            writer.write(piece)
            await writer.drain()
    taking.cancel()
    writer.close()


async def serve(port: int, target_port: int, round_trip_s: float) -> None:
    """Carry connections until the process is killed."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, target_port, limit=HELD_BYTES)
        ways = (reader, back), (there, writer)
        await asyncio.gather(*(_carry(*way, round_trip_s / 2) for way in ways))

    server = await asyncio.start_server(talk, HOST, port, limit=HELD_BYTES)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
