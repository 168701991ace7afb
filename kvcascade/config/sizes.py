"""Amounts as people write them: 4096, "64GiB", "500 GB", or a share such as "50%".

All amounts are exact: a share is a fraction, and parsed text can be written back. The functions
raise `ValueError` with a clause about the allowed values; the caller completes it with key and
value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

MAX_BYTES = 2**63 - 1
"""Largest amount that file offsets can address."""
MAX_RECORD_BYTES = 1 << 20
"""Most bytes that are read of the record of a path."""

_BINARY = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {"": 1, "b": 1} | {name.lower(): n for name, n in (_BINARY | _DECIMAL).items()}

# The number of digits is bounded, and with it the value and the time to parse it.
_AMOUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*|%)")

_DRIVE_WRITES = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,20})?) ?DWPD", re.IGNORECASE)

BYTES_HINT = 'write a whole number of bytes or a string such as "64GiB" or "500GB"'
SHARE_HINT = 'write a share such as "50%"'
SIZE_HINT = f'{BYTES_HINT}, or a share such as "50%"'


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes."""

    count: int
    """The number, from 0 to `MAX_BYTES`."""
    text: str = field(default="", compare=False)
    """The value as it was written, for messages."""

    def of(self, total: int) -> int:
        """Return the amount in bytes; `total` does not matter."""
        return self.count

    def __str__(self) -> str:
        return self.text or _exact(self.count)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the memory, of a disk or of a tier, whose size is known later."""

    part: Fraction
    """From 0 to 1."""
    text: str = field(default="", compare=False)
    """The value as it was written, for messages."""

    def of(self, total: int) -> int:
        """Return this share of `total`, rounded down."""
        return int(total * self.part)

    def __str__(self) -> str:
        return self.text or f"{_decimal(self.part * 100)}%"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A number of blocks."""

    count: int
    """The number, at least 1."""

    def __str__(self) -> str:
        return str(self.count)


@dataclass(frozen=True, slots=True)
class DriveWrites:
    """A daily amount as a multiple of the drives' size, the unit of endurance (DWPD)."""

    times: Fraction
    """Writes of the whole drive per day."""
    text: str = field(default="", compare=False)
    """The value as it was written, for messages."""

    def of(self, total: int) -> int:
        """Return the amount in bytes for drives of `total` bytes, rounded down."""
        return min(MAX_BYTES, int(total * self.times))

    def __str__(self) -> str:
        return self.text or f"{_decimal(self.times)} DWPD"


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A share of the memory for each device of the machine, as large as the engine has devices.

    Engines that together use all devices take the share together, however they are started.
    """

    part: Fraction
    """Share for all devices of the machine, from 0 to 1."""
    used: int = 1
    """Devices that the engine uses: its workers."""
    present: int = 1
    """Devices of the machine."""

    def of(self, total: int) -> int:
        """Return this share of `total`, rounded down."""
        return int(total * self.part * min(self.used, self.present) / self.present)

    def __str__(self) -> str:
        return f"{self.used}/{self.present} of {_decimal(self.part * 100)}% of the memory"


@dataclass(frozen=True, slots=True)
class FreeShare:
    """A share of the disk space that is free or already used by the tier."""

    part: Fraction
    """From 0 to 1."""

    def of(self, total: int) -> int:
        """Return this share of `total`, the usable space, rounded down."""
        return int(total * self.part)

    def __str__(self) -> str:
        return f"{_decimal(self.part * 100)}% of the usable space"


Size = Bytes | Share
"""Types of a capacity as users write it."""
AnySize = Size | DeviceShare | FreeShare
"""Types of a capacity, defaults included."""


def share_of(capacity: AnySize) -> str | None:
    """Return the share of the machine that a default capacity takes; None if it was given."""
    return str(capacity) if isinstance(capacity, DeviceShare | FreeShare) else None


WriteAmount = Bytes | DriveWrites
"""Types of a daily write budget."""
Budget = Bytes | Share | Blocks
"""Types of a number of slots."""


def parse_size(value: object) -> Size:
    """Parse bytes or a share, above zero; a share is at most 100 %."""
    size = _parse(value, SIZE_HINT)
    if not size.of(MAX_BYTES):
        raise ValueError(f"is not above zero; {SIZE_HINT}")
    return size


def parse_reserve(value: object) -> Size:
    """Parse bytes or a share; zero is allowed."""
    return _parse(value, SIZE_HINT)


def parse_bytes(value: object) -> Bytes:
    """Parse bytes above zero; a share is not allowed."""
    size = _parse(value, BYTES_HINT)
    if not isinstance(size, Bytes):
        raise ValueError(f"is a share, which is not allowed here; {BYTES_HINT}")
    if not size.count:
        raise ValueError(f"is not above zero; {BYTES_HINT}")
    return size


def parse_daily_writes(value: object) -> WriteAmount:
    """Parse bytes above zero, or drive writes per day such as "0.3 DWPD"."""
    match = _DRIVE_WRITES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f'{error}, or drive writes per day such as "0.3 DWPD"') from None
    times = Fraction(match[1])
    if not times:
        raise ValueError('is not above zero; write drive writes per day such as "0.3 DWPD"')
    return DriveWrites(times, match[0])


def parse_share(value: object) -> Share:
    """Parse a share above zero and at most 100 %."""
    size = _parse(value, SHARE_HINT)
    if not isinstance(size, Share):
        raise ValueError(f"is not a share; {SHARE_HINT}")
    if not size.part:
        raise ValueError(f"is not above zero; {SHARE_HINT}")
    return size


def parse_budget(value: object) -> Budget:
    """Parse a share, bytes with a unit, or a plain whole number, which counts blocks."""
    hint = 'write a share such as "50%", a size such as "8GiB", or a whole number of blocks'
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 < value <= MAX_BYTES:
            raise ValueError(f"is not above zero or too large; {hint}")
        return Blocks(value)
    size = _parse(value, hint)
    if not size.of(MAX_BYTES):
        raise ValueError(f"is not above zero; {hint}")
    return size


def budget_blocks(budget: Budget, tier_blocks: int, block_bytes: int) -> int:
    """Return a budget as a number of a tier's blocks: at least 1, at most all."""
    match budget:
        case Blocks(count):
            blocks = count
        case Bytes(count):
            blocks = count // block_bytes
        case Share():
            blocks = budget.of(tier_blocks)
    return max(1, min(blocks, tier_blocks))


def human(count: int) -> str:
    """Return a number of bytes for people, rounded: "1.8 TiB"."""
    for name, unit in _BINARY.items():
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _parse(value: object, hint: str) -> Size:
    """Parse bytes or a share from 0 up; `hint` states the allowed values."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"is not a size; {hint}")
    text = str(value).strip()
    if text.startswith("-"):
        raise ValueError(f"is negative; {hint}")
    match = _AMOUNT.fullmatch(text)
    if not match:
        raise ValueError(f"is not a size; {hint}")
    number, unit = Fraction(match[1]), match[2]
    if unit == "%":
        if number > 100:
            raise ValueError(f"is more than the whole; {hint}")
        return Share(number / 100, text)
    if unit.lower() not in _UNITS:
        raise ValueError(f"{_unit_problem(unit)}; {hint}")
    count = int(number * _UNITS[unit.lower()])
    if count > MAX_BYTES:
        raise ValueError(f"is larger than any file system supports; {hint}")
    return Bytes(count, text)


def _unit_problem(unit: str) -> str:
    """Return the problem with a unit; a bare letter could be binary or decimal."""
    if unit.upper() in {"K", "M", "G", "T"}:
        letter = unit.upper()
        return f"has a unit that may mean {letter}iB or {letter}B: write out which"
    return f'has the unknown unit "{unit}": KiB, MiB, GiB, TiB, kB, MB, GB and TB are known'


def _exact(count: int) -> str:
    """Return a number of bytes in the largest binary unit that divides it."""
    for name, unit in _BINARY.items():
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def _decimal(number: Fraction) -> str:
    """Return a fraction in decimal digits, exact to 20 of them."""
    scaled = f"{int(number * 10**20):021d}"
    return f"{scaled[:-20]}.{scaled[-20:]}".rstrip("0").rstrip(".")
