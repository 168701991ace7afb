"""`kvcascade inspect --block`: place, checksum and tensors of one block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ....tiers.base import GROUP_BYTES
from ....tiers.nvme.segments.chains import HEAD_BYTES, head_of
from .. import show
from ..block_scan import BlockFinding, NamedBlock, scan_blocks
from ..path_blocks import OpenPath
from ..path_folders import NamespaceFolder
from ..prompt_chains import Chains
from .namespace_report import tokens_per_block

if TYPE_CHECKING:
    import torch

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
    """Result of the checksum: "ok", "corrupt", "unreadable", "no_segment"; "changed" if the block
    was removed or replaced meanwhile."""
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


def look(opened: OpenPath, name: str, text: str) -> BlockReport:
    """Return a report on the only block of a namespace whose hash begins with `text`.

    Raises `ConfigError` if none or several match, or another `KVCascadeError`.
    """
    namespace = opened.namespace(name)
    block = opened.only_block(name, text, "--block")
    payload, verdict = _payload(opened, namespace, block)
    layout = namespace.layout
    number, index = divmod(block.slot, layout.slots)
    group = int.from_bytes(block.key[-GROUP_BYTES:], "big")
    tokens = tokens_per_block(dict(namespace.document["fields"]), group)
    layers, source = [], "the namespace does not record the layout of layers in a block"
    slices = layer_slices(namespace.document, group)
    if slices and verdict is BlockFinding.OK:
        try:
            layers, source = statistics(payload, slices), "namespace.json"
        except ImportError:
            source = "torch is not installed: no statistics"
    state = opened.state(name)
    use, at = state.use(block.slot + 1), block.slot
    return BlockReport(
        namespace=name,
        hash=block.key.hex(),
        slot=block.slot,
        segment=number,
        path=str(namespace.segment_files().get(number, "")),
        offset=layout.header_bytes + index * layout.block_bytes,
        length=layout.block_bytes,
        checksum=f"{block.checksum:016x}",
        verdict=verdict,
        group=None if tokens is None else group,
        tokens=tokens,
        **_place_in_prompt(state.chains(), block.key, tokens),
        written_at=int(use.written_at[at]) or None,
        last_use=block.used_s or None,
        times_used=int(use.times[at]) if use.written_at[at] else None,
        layout=source,
        layers=layers,
    )


def layer_slices(description: Mapping[str, Any], group: int) -> list[LayerSlice]:
    """Return the place of each layer of a KV group in a block; empty if it is unknown or
    inconsistent."""
    about = description.get("about")
    if not isinstance(about, Mapping):
        return []
    ranks, rank_bytes, layers = (about.get(n) for n in ("world_size", "rank_bytes", "layers"))
    if not (isinstance(ranks, int) and isinstance(rank_bytes, int) and isinstance(layers, list)):
        return []
    slices: list[LayerSlice] = []
    for rank in range(min(ranks, MAX_LAYERS)):
        for layer in layers[:MAX_LAYERS]:
            if not isinstance(layer, Mapping) or layer.get("group") != group:
                continue
            one = _slice(layer, rank, rank * rank_bytes)
            if one is None or one.offset >= description["block_bytes"]:
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


def print_block(report: BlockReport) -> None:
    """Print one block as tables."""
    console = show.console()
    known = (("KV group", report.group), ("tokens", report.tokens), ("uses", report.times_used))
    rows = [
        ("namespace", report.namespace),
        ("file", f"{report.path} at {report.offset}"),
        ("slot", f"{report.slot} (segment {report.segment})"),
        ("length", f"{report.length:,} bytes"),
        ("checksum", f"{report.checksum}: {report.verdict}"),
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


def _place_in_prompt(chains: Chains, key: bytes, tokens: int | None) -> dict[str, Any]:
    head = head_of(key)
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


def _payload(
    opened: OpenPath, namespace: NamespaceFolder, block: NamedBlock
) -> tuple[memoryview, BlockFinding]:
    """Return the payload of a block, and what its checksum says."""
    found = bytearray()
    with opened.source(namespace) as source:
        ((_, verdict),) = next(
            iter(scan_blocks(source, [block], None, lambda _, v: found.extend(v)))
        )
    return memoryview(found), verdict


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
