"""`kvcascade inspect --block`: place, checksum and tensors of one block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ....errors import ConfigError
from ....tiers.nvme.index.block_index import GENERATIONS_PER_SESSION
from ....tiers.nvme.offline.reader import Description
from ....tiers.nvme.path.block_reader import payload_checksum
from ....tiers.nvme.segments.chains import HEAD_BYTES, head_of
from ....tiers.nvme.segments.format import IndexEntry, SlotRecord, parse_record
from .. import show
from ..cache_access import OpenedCache, parse_hash
from .namespace_report import GROUP_BYTES, tokens_per_block

if TYPE_CHECKING:
    import torch

MAX_MATCHES = 8
MAX_LAYERS = 65536


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Part of a block that belongs to one layer."""

    layer: str
    rank: int
    offset: int
    """Byte offset in the block."""
    dtype: str
    shape: list[int]
    """Shape over all pages of the block; the first dimension counts pages."""
    count: int
    """Number of elements."""


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of one layer's part of a block; None if it has no finite number."""

    layer: str
    rank: int
    dtype: str
    shape: list[int]
    min: float | None
    max: float | None
    mean: float | None
    nan: int


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Report on one block, with the fields of the JSON document."""

    namespace: str
    hash: str
    slot: int
    segment: int
    path: str
    offset: int
    """Byte offset in the segment file."""
    length: int
    checksum: str
    verdict: str
    """Result of the checksum: "ok", "corrupt" or "unreadable"."""
    record: str
    """"ok", or the way in which the slot's record differs."""
    generation: int
    session: int
    """Number of the session (opening of the namespace) that wrote the block."""
    epoch: int | None
    group: int | None
    tokens: int | None
    prefix_tokens: int | None = None
    """Tokens of the prompt up to the end of this block; None if no engine recorded it."""
    prefix_position: int | None = None
    """Number of earlier blocks of the same group in the prompt."""
    parent: str | None = None
    """Head of the hash of the preceding block; "" for the first block of a prompt."""
    written_at: int | None = None
    last_use: int | None = None
    """Time of the last use, in seconds since 1970."""
    times_used: int | None = None
    layout: str = ""
    """Source of the shapes, or the reason why there are none."""
    layers: list[LayerStatistics] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


def look(cache: OpenedCache, text: str) -> BlockReport:
    """Return a report on the only block whose hash begins with `text`.

    Raises `ConfigError` if none or several match.
    """
    key = only_match(cache, text, "--block")
    entry = cache.index.entry(key)
    if entry is None:
        raise ConfigError(f"the index entry of {key.hex()} is damaged; run `kvcascade verify`")
    description = cache.description
    number, index = divmod(entry.slot, description.slots_per_segment)
    payload, verdict = _payload(cache, key, entry)
    record = parse_record(cache.segments.record(entry.slot))
    usage = cache.state.usage(max(entry.slot + 1, cache.slots))
    group = int.from_bytes(key[-GROUP_BYTES:], "big")
    tokens = tokens_per_block(dict(description.fields), group)
    layers, source = [], "the namespace does not record the layout of layers in a block"
    slices = layer_slices(description, group)
    if slices and verdict == "ok":
        try:
            layers, source = statistics(payload, slices), "namespace.json"
        except ImportError:
            source = "torch is not installed: no statistics"
    found = cache.segments.found.get(number)
    return BlockReport(
        namespace=description.name,
        hash=key.hex(),
        slot=entry.slot,
        segment=number,
        path=str(found.path) if found else "",
        offset=description.layout.header_bytes + index * description.block_bytes,
        length=entry.length,
        checksum=f"{entry.checksum:016x}",
        verdict=verdict,
        record=_compare(record, key, entry),
        generation=entry.generation,
        session=entry.generation // GENERATIONS_PER_SESSION,
        epoch=None if record is None else record.epoch,
        group=None if tokens is None else group,
        tokens=tokens,
        **_place_in_prompt(cache, key, tokens),
        written_at=int(usage.written_at[entry.slot]) or None,
        last_use=int(usage.last_use[entry.slot]) or None,
        times_used=int(usage.times[entry.slot]) if usage.written_at[entry.slot] else None,
        layout=source,
        layers=layers,
    )


def layer_slices(description: Description, group: int) -> list[LayerSlice]:
    """Return the place of each layer of a KV group in a block; empty if it is unknown or
    inconsistent."""
    about = description.about
    ranks, rank_bytes, layers = (about.get(n) for n in ("world_size", "rank_bytes", "layers"))
    if not (isinstance(ranks, int) and isinstance(rank_bytes, int) and isinstance(layers, list)):
        return []
    slices: list[LayerSlice] = []
    for rank in range(min(ranks, MAX_LAYERS)):
        for layer in layers[:MAX_LAYERS]:
            if not isinstance(layer, Mapping) or layer.get("group") != group:
                continue
            one = _slice(layer, rank, rank * rank_bytes)
            if one is None or one.offset >= description.block_bytes:
                return []
            slices.append(one)
    return slices


def statistics(payload: memoryview, slices: list[LayerSlice]) -> list[LayerStatistics]:
    """Return statistics by layer; torch computes them because it knows all types of a KV cache.

    Raises `ImportError` without torch.
    """
    import torch

    found: list[LayerStatistics] = []
    whole = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for each in slices:
        dtype = getattr(torch, each.dtype, None)
        if not isinstance(dtype, torch.dtype):
            continue
        length = each.count * dtype.itemsize
        if each.offset < 0 or each.offset + length > len(whole):
            continue
        values = whole[each.offset : each.offset + length].clone().view(dtype)
        found.append(_statistics_of(each, values))
    return found


def print_block(console: Console, report: BlockReport) -> None:
    """Print one block as tables."""
    known = (("KV group", report.group), ("tokens", report.tokens), ("uses", report.times_used))
    rows = [
        ("namespace", report.namespace),
        ("file", f"{report.path} at {report.offset}"),
        ("slot", f"{report.slot} (segment {report.segment})"),
        ("length", f"{report.length:,} bytes"),
        ("checksum", f"{report.checksum}: {report.verdict}"),
        ("slot record", report.record),
        ("written", f"generation {report.generation}, session {report.session}"),
        ("prefix position", _position(report)),
        *((name, show.UNKNOWN if value is None else str(value)) for name, value in known),
        ("layout", report.layout),
    ]
    console.print(show.facts(report.hash, rows))
    if not report.layers:
        return
    numbers = ["rank", "min", "max", "mean", "NaN"]
    table = show.columns("Layers", "layer", "rank", "type", "shape", *numbers[1:], right=numbers)
    for each in report.layers:
        cells = [show.NOTHING if v is None else f"{v:.4g}" for v in (each.min, each.max, each.mean)]
        shape = "×".join(map(str, each.shape))
        table.add_row(each.layer, str(each.rank), each.dtype, shape, *cells, str(each.nan))
    console.print(table)


def _place_in_prompt(cache: OpenedCache, key: bytes, tokens: int | None) -> dict[str, Any]:
    chains, head = cache.state.chains(), head_of(key)
    end, parent = chains.end_of(head), chains.parent_of(head)
    if end is None or parent is None:
        return {}
    position = end // tokens - 1 if tokens else None
    shown = parent.to_bytes(HEAD_BYTES, "big").hex() if parent else ""
    return {"prefix_tokens": end, "prefix_position": position, "parent": shown}


def _position(report: BlockReport) -> str:
    if report.prefix_tokens is None:
        return "unknown: no engine has recorded it"
    place = "" if report.prefix_position is None else f"block {report.prefix_position}, "
    before = f"after block {report.parent}" if report.parent else "the first of its prompt"
    return f"{place}up to token {report.prefix_tokens:,}, {before}"


def only_match(cache: OpenedCache, text: str, option: str) -> bytes:
    """Return the only block whose hash begins with `text`. Raises `ConfigError` if none or several
    match."""
    matches = cache.index.keys_from(parse_hash(text), MAX_MATCHES + 1)
    if not matches:
        raise ConfigError(f"{option}: there is no block {text} in {cache.description.name}")
    if len(matches) > 1:
        shown = ", ".join(key.hex() for key in matches[:MAX_MATCHES])
        raise ConfigError(f"{option}: {text} is the start of several blocks: {shown}")
    return matches[0]


def _payload(cache: OpenedCache, key: bytes, entry: IndexEntry) -> tuple[memoryview, str]:
    buffer = memoryview(bytearray(cache.description.block_bytes))
    try:
        cache.segments.read_run(entry.slot, [buffer])
    except OSError:
        return buffer, "unreadable"
    is_right = entry.length == len(buffer) and entry.checksum == payload_checksum(key, buffer)
    return buffer, "ok" if is_right else "corrupt"


def _compare(record: SlotRecord | None, key: bytes, entry: IndexEntry) -> str:
    if record is None:
        return "missing or damaged"
    if record.key != key:
        return f"of block {record.key.hex()}"
    right = (entry.generation, entry.checksum, entry.length)
    is_equal = (record.generation, record.checksum, record.length) == right
    return "ok" if is_equal else f"of generation {record.generation}"


def _slice(layer: Mapping[str, Any], rank: int, start: int) -> LayerSlice | None:
    """Return a layer from `namespace.json`, or None if its values are invalid."""
    offset, pages, shape = layer.get("offset"), layer.get("pages"), layer.get("shape")
    if not (isinstance(offset, int) and isinstance(pages, int) and isinstance(shape, list)):
        return None
    if not all(isinstance(n, int) and 0 < n < 2**40 for n in (pages, *shape)):
        return None
    full = [pages, *shape]
    name, dtype = str(layer.get("layer")), str(layer.get("dtype"))
    return LayerSlice(name, rank, start + offset, dtype, full, prod(full))


def _statistics_of(each: LayerSlice, values: torch.Tensor) -> LayerStatistics:
    numbers = values.float()
    nan = numbers.isnan()
    real = numbers[~nan]
    least, most, mean = (
        (float(real.min()), float(real.max()), float(real.mean())) if len(real) else (None,) * 3
    )
    return LayerStatistics(
        each.layer, each.rank, each.dtype, each.shape, least, most, mean, int(nan.sum())
    )
