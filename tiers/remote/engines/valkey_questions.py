"""Questions of tools to one node of a Valkey or Redis server: its objects, and its settings.

The server has no order of its objects, and no list of one prefix: a list goes over all keys of the
database. The two keys of an object may come in different batches. So the payload's key stands for
both. The header's key counts only where there is no payload.

A list must not count as a use, or the server would evict in the order of the list. `STRLEN` counts
as one, so sizes are those in memory.
"""

from __future__ import annotations

import time

from ..base import Cause, RemoteEntry
from .resp import MAX_PORT, Address, RespBrokenError, RespConnection, RespError

CLUSTER_SLOTS = 16384
LISTED_AT_A_TIME = 256
"""Keys that one SCAN looks at. The server does nothing else meanwhile, for some 0.1 ms."""
START = b"0"
"""Cursor at the begin and at the end of a scan."""
HEADER_SUFFIX = b":h"
_CALLS_PER_KEY = 4
_NO_CLUSTER = ("ERR", "NOPERM")


def slots_of(connection: RespConnection, asked: Address) -> dict[int, Address]:
    """Return the node of each slot, as `asked` knows it. Raises `OSError` or `RespError`."""
    connection.send([b"CLUSTER", b"SLOTS"])
    found: dict[int, Address] = {}
    try:
        for first, last, (host, port, *_), *_ in connection.reply():
            slots = range(first, last + 1)
            is_range = 0 <= first <= last < CLUSTER_SLOTS and 0 < port <= MAX_PORT
            if not is_range or not found.keys().isdisjoint(slots):
                raise ValueError
            node = Address((host or b"").decode(), port).seen_from(asked)
            found |= dict.fromkeys(slots, node)
    except (TypeError, ValueError, AttributeError):
        raise RespBrokenError("the server sent no map of a cluster") from None
    return found


def nodes_of(connection: RespConnection, asked: Address) -> list[Address]:
    """Return all nodes that have slots; `asked` alone without a cluster, or if nobody may know.

    Raises `OSError` or `RespError`.
    """
    try:
        return [*dict.fromkeys(slots_of(connection, asked).values())]
    except RespError as error:
        if error.code in _NO_CLUSTER:
            return [asked]
        raise


def scan(connection: RespConnection, cursor: bytes, prefix: str) -> tuple[bytes, list[RemoteEntry]]:
    """Return the next cursor and the next objects of a node. Raises `OSError` or `RespError`."""
    match = b"{%s*" % prefix.encode()
    connection.send([b"SCAN", cursor, b"MATCH", match, b"COUNT", b"%d" % LISTED_AT_A_TIME])
    try:
        cursor, keys = connection.reply()
        payloads = [key.removesuffix(HEADER_SUFFIX) for key in keys]
        if not isinstance(cursor, bytes):
            raise TypeError
    except (TypeError, ValueError, AttributeError):
        raise RespBrokenError("the server sent no page of a list") from None
    commands: list[list[bytes]] = []
    for key, payload in zip(keys, payloads, strict=True):
        commands += (
            [b"EXISTS", payload],
            [b"MEMORY", b"USAGE", payload],
            [b"MEMORY", b"USAGE", payload + HEADER_SUFFIX],
            [b"OBJECT", b"IDLETIME", key],
        )
    if commands:
        connection.send(*commands)
    entries: list[RemoteEntry] = []
    now_s = time.time()
    for key in keys:
        replies = [_number(connection) for _ in range(_CALLS_PER_KEY)]
        found = _entry(key, replies, now_s)
        if found is not None:
            entries.append(found)
    return cursor, entries


def _entry(key: bytes, replies: list[int | None], now_s: float) -> RemoteEntry | None:
    """Return the object of a key; None for a header beside its payload."""
    has_payload, payload_bytes, header_bytes, idle_s = replies
    name, brace, suffix = key[1:].rpartition(b"}")
    if not brace or suffix not in (b"", HEADER_SUFFIX) or (suffix and has_payload):
        return None
    touched_s = None if idle_s is None else now_s - idle_s
    size_bytes = (payload_bytes or 0) + (header_bytes or 0)
    return RemoteEntry(name.decode("ascii", "replace"), size_bytes, touched_s)


def _number(connection: RespConnection) -> int | None:
    """Return an integer reply; None for an error, or of a key that has gone."""
    try:
        found = connection.reply()
    except RespError:  # such as OBJECT IDLETIME of a server that counts uses instead
        return None
    return found if isinstance(found, int) else None


def cause_of(error: RespError) -> Cause | None:
    """Return what an answer to the login or to a harmless command says."""
    words = (error.code, *error.words)
    if error.code in ("NOAUTH", "WRONGPASS") or words[:2] in (("ERR", "AUTH"), ("ERR", "invalid")):
        return Cause.CREDENTIALS
    if error.code == "NOPERM":
        return Cause.RIGHT
    is_about_database = words[:2] in (("ERR", "DB"), ("ERR", "SELECT"))
    return Cause.DATABASE if is_about_database else None


def explain(connection: RespConnection, key: bytes, *, has_ttl: bool) -> Cause | None:
    """Return what is wrong after the login. `has_ttl`: blocks have a time to live.

    Raises `OSError`.
    """
    try:
        connection.send([b"EXISTS", key])
        connection.number()
    except RespError as error:
        if error.code != "MOVED":  # another node has the key
            return cause_of(error)
    try:
        connection.send([b"INFO", b"memory"])
        text = (connection.value() or b"").decode("ascii", "replace")
    except RespError:  # this user may not know
        return None
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "allkeys-lru")
    evicts = policy.startswith("allkeys") or (has_ttl and policy.startswith("volatile"))
    return None if evicts and facts.get("maxmemory") != "0" else Cause.KEEPS_ALL
