"""Transfer rates of the tiers of a replay, with their sources."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import FormatError, os_errors
from ...tiers.nvme.segments.format import PAGE_BYTES
from ..commands.bench.bench_results import DOWN, OURS, TRANSFERS, UP, transfer_block_bytes
from ..commands.bench.raw_disk import CALL_BYTES, RawDisk
from .tier_options import GivenTier, TierOptions
from .virtual import Rate, RateSource

ASSUMED_CPU = Rate(20e9, 0.0, RateSource.ASSUMED)
"""Assumed rate between device and CPU tier: PCIe 4 x16 gives 25 GB/s, PCIe 5 about 55, two cores of
a CPU platform 6 to 16."""
ASSUMED_READ = Rate(3e9, 1e-4, RateSource.ASSUMED)
ASSUMED_WRITE = Rate(1e9, 1e-4, RateSource.ASSUMED)
"""Assumed rate of sustained writes to one data-centre NVMe drive."""
MEASURED_BYTES = 512 << 20
MEASURED_THREADS = 4


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Rates of every tier below the first."""

    read: Rate = ASSUMED_READ
    write: Rate = ASSUMED_WRITE


def with_rates(given: Sequence[GivenTier], disk: DiskRates) -> tuple[TierOptions, ...]:
    """Return the tiers with a rate for every direction.

    A given rate comes first. Otherwise the first tier has an assumed rate, and the others have
    that of `disk`.
    """
    assumed = DiskRates(ASSUMED_CPU, ASSUMED_CPU)
    return tuple(_with_rates(tier, disk if n else assumed) for n, tier in enumerate(given))


def _with_rates(tier: GivenTier, rates: DiskRates) -> TierOptions:
    def of(bytes_per_s: float | None, other: Rate) -> Rate:
        if bytes_per_s is not None:
            return Rate(bytes_per_s, tier.latency_s or 0.0, RateSource.GIVEN)
        if tier.latency_s is not None:
            return Rate(other.bytes_per_s, tier.latency_s, other.source)
        return other

    budget = tier.write_budget
    return TierOptions(
        tier.name,
        tier.capacity_bytes,
        tier.policy,
        of(tier.read_bytes_per_s, rates.read),
        of(tier.write_bytes_per_s, rates.write),
        tier.admission,
        None if budget is None else budget.of(tier.capacity_bytes),
    )


def rates_of_bench(path: Path, block_bytes: int) -> DiskRates:
    """Return the rates that `kvcascade bench` measured at the nearest block size.

    Raises `FormatError`, or the mapped form of an `OSError`.
    """
    with os_errors(f"reading {path}"):
        text = path.read_text()
    try:
        rows = [
            row
            for measurement in json.loads(text)["measurements"]
            if measurement["name"] == TRANSFERS
            for row in measurement["rows"]
        ]
        return DiskRates(*(_nearest(rows, kind, block_bytes) for kind in (UP, DOWN)))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} holds no measured transfers ({error!r}); give what "
            "`kvcascade bench PATH --json` printed"
        ) from None


def _nearest(rows: Sequence[dict[str, Any]], kind: str, block_bytes: int) -> Rate:
    """Return kvcascade's rate of one kind at the block size nearest to the given one."""
    rates = {
        size: float(row["median"][OURS])
        for row in rows
        if row["quantity"] == kind and (size := transfer_block_bytes(row["case"]))
    }
    if not rates:
        raise ValueError(f"no rates of {kind}")
    nearest = min(rates, key=lambda size: abs(math.log(size / block_bytes)))
    return Rate(rates[nearest] * 1e9, 0.0, RateSource.BENCH)


def measured_rates(folder: Path, block_bytes: int, total_bytes: int = MEASURED_BYTES) -> DiskRates:
    """Measure the disk of a folder alone: direct writes, then reads of as many bytes.

    The files are removed. Raises `BenchError` if the disk does not support direct I/O, and the
    mapped form of an `OSError`.
    """
    pages = max(1, min(block_bytes, CALL_BYTES) // PAGE_BYTES)
    with (
        os_errors(f"measuring the disk of {folder}"),
        TemporaryDirectory(prefix="kvcascade-rates-", dir=folder) as made,
        closing(RawDisk([Path(made)], pages * PAGE_BYTES, total_bytes)) as disk,
    ):
        write, read = disk.rates(MEASURED_THREADS)
    return DiskRates(*(Rate(rate, 0.0, RateSource.MEASURED) for rate in (read, write)))
