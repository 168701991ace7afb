"""Questions of tools about the blocks of one namespace, in batches that the writer answers at once.

| question | body | answer |
| --- | --- | --- |
| `namespace` | `name` | numbers, totals and engines: see below |
| `blocks` | `name`, `after`, `start`, `limit` | `blocks`: see below; `next`, null at the end |
| `drop` | `name`, `blocks` | `dropped`: number of these blocks whose entry still was the same |

`namespace` is answered with `blocks`, `slots`, `epoch`, `written_bytes`, `read_bytes`, `day`
(`written_bytes`, `read_bytes`), `granted_slots`, `dropped_at_opening`: number of blocks whose
segment files were missing, and `engines`: the names of the nodes that have joined, at most
`MAX_ENGINES_NAMED`.

A block is its hash, slot, checksum and the time of its last use in seconds since 1970; `drop` needs
the first three. Hashes are hexadecimal. `after` is the last `next`, or empty. With `start`, only
blocks whose hash begins with it are named.

A namespace that no node has open is opened. It stays open with its writer, unless its room is
needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ......errors import ConfigError
from ....segments.format import MAX_KEY_BYTES

if TYPE_CHECKING:
    from ..namespace.namespace_writer import NamespaceWriter
    from ..path_writer import PathWriter

MAX_BLOCKS_PER_ANSWER = 1024
"""Most blocks of one answer; other messages wait for it."""
MAX_ENGINES_NAMED = 64
Answer = dict[str, Any]


def describe(writer: PathWriter, body: Answer) -> Answer:
    """Answer `namespace`. Raises a `KVCascadeError`."""
    namespace = _namespace(writer, body)
    written, read = namespace.totals()
    day = namespace.day_totals()
    return {
        "blocks": namespace.space.used,
        "slots": namespace.home.slots,
        "epoch": namespace.epoch,
        "written_bytes": written,
        "read_bytes": read,
        "day": {"written_bytes": day.written, "read_bytes": day.read},
        "granted_slots": namespace.space.granted,
        "dropped_at_opening": namespace.space.dropped_at_opening,
        "engines": [c.name for c in writer.clients if c.namespace is namespace][:MAX_ENGINES_NAMED],
    }


def some_blocks(writer: PathWriter, body: Answer) -> Answer:
    """Answer `blocks`. Raises a `KVCascadeError`."""
    limit = body.get("limit", MAX_BLOCKS_PER_ANSWER)
    if type(limit) is not int or not 0 < limit <= MAX_BLOCKS_PER_ANSWER:
        raise ConfigError(f"give `limit`, from 1 to {MAX_BLOCKS_PER_ANSWER}")
    after, start = _key(body.get("after", "")), _key(body.get("start", ""))
    namespace = _namespace(writer, body)
    found = namespace.table.keys_after(max(after, start), limit)
    if start and after < start and len(start) <= MAX_KEY_BYTES:
        (entry,) = namespace.table.get_many([start])
        found = [*([] if entry is None else [(start, entry)]), *found][:limit]
    inside = [each for each in found if each[0].startswith(start)]
    has_more, found = len(inside) == len(found) > 0, inside
    used_s = namespace.recency.last_used_s([entry.slot for _, entry in found])
    rows = [
        [key.hex(), entry.slot, entry.checksum, used]
        for (key, entry), used in zip(found, used_s, strict=True)
    ]
    return {"blocks": rows, "next": rows[-1][0] if has_more else None}


def drop(writer: PathWriter, body: Answer) -> Answer:
    """Answer `drop`. Raises a `KVCascadeError`."""
    rows = body.get("blocks")
    if not isinstance(rows, list) or len(rows) > MAX_BLOCKS_PER_ANSWER:
        raise ConfigError(f"give `blocks`, at most {MAX_BLOCKS_PER_ANSWER}")
    try:
        wanted = {_key(key): (int(slot), int(checksum)) for key, slot, checksum, *_ in rows}
    except (TypeError, ValueError):
        raise ConfigError("each of `blocks` is a hash, a slot and a checksum") from None
    removed = writer.drop_blocks(_namespace(writer, body), wanted)
    if removed is None:
        raise ConfigError("the index could not be written; see the log of the writer")
    return {"dropped": len(removed)}


def _namespace(writer: PathWriter, body: Answer) -> NamespaceWriter:
    return writer.path.look_at(str(body.get("name")))


def _key(text: object) -> bytes:
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        raise ConfigError(f"{text!r} is not a hash in hexadecimal") from None
