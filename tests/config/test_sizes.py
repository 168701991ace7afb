"""Amounts as people write them: what is accepted, what it means, and what is refused how."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.sizes import (
    MAX_BYTES,
    Blocks,
    Bytes,
    Share,
    budget_blocks,
    human,
    parse_budget,
    parse_bytes,
    parse_reserve,
    parse_share,
    parse_size,
)

UNITS = {
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "B": 1,
    "": 1,
}


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("64GiB", 64 * 2**30),
        ("64 GiB", 64 * 2**30),
        (" 1kB ", 1000),
        ("1KB", 1000),
        ("2gib", 2 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("0.5GB", 500_000_000),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_bytes(written: object, count: int) -> None:
    size = parse_size(written)
    assert size == Bytes(count)
    assert size.of(7) == count


@pytest.mark.parametrize(
    ("written", "part"),
    [("50%", (1, 2)), ("12.5 %", (1, 8)), ("100%", (1, 1)), ("0.1%", (1, 1000))],
)
def test_shares(written: str, part: tuple[int, int]) -> None:
    share = parse_size(written)
    assert share == Share(Fraction(*part))
    assert share.of(8000) == 8000 * part[0] // part[1]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (0, "is not above zero"),
        ("0GiB", "is not above zero"),
        ("0.0001B", "is not above zero"),
        ("0%", "is not above zero"),
        (-1, "is negative"),
        ("-5GiB", "is negative"),
        ("101%", "is more than the whole"),
        ("12 parsecs", 'unknown unit "parsecs"'),
        ("12G", "may mean GiB or GB"),
        ("12m", "may mean MiB or MB"),
        (MAX_BYTES + 1, "is larger than any file system supports"),
        ("8388608TiB", "is larger than any file system supports"),
        ("9" * 500, "is not a size"),
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("1e9", "is not a size"),
        ("1,5GiB", "is not a size"),
        ("64GiB/day", "is not a size"),
        ("٣GiB", "is not a size"),
        ("inf", "is not a size"),
        (1.5e9, "is not a size"),
        (True, "is not a size"),
        (None, "is not a size"),
        (["1GiB"], "is not a size"),
    ],
)
def test_refused(written: object, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(written)
    assert problem in str(caught.value)
    assert "64GiB" in str(caught.value), "the remedy shows what a size looks like"


def test_each_kind_refuses_the_other() -> None:
    with pytest.raises(ValueError, match="a share, which is not allowed"):
        parse_bytes("50%")
    with pytest.raises(ValueError, match="is not a share"):
        parse_share("5GiB")
    with pytest.raises(ValueError, match="not above zero"):
        parse_share("0%")
    with pytest.raises(ValueError, match="not above zero"):
        parse_bytes(0)
    assert parse_reserve(0) == Bytes(0)
    assert parse_reserve("0%") == Share(Fraction(0))


@given(st.integers(min_value=1, max_value=MAX_BYTES))
def test_bytes_round_trip(count: int) -> None:
    assert parse_size(count) == Bytes(count)
    assert parse_size(str(Bytes(count))) == Bytes(count)


@given(st.integers(min_value=1, max_value=10**6), st.sampled_from(sorted(UNITS)))
def test_units_round_trip(number: int, unit: str) -> None:
    size = parse_size(f"{number}{unit}")
    assert size == Bytes(number * UNITS[unit])
    assert parse_size(str(size)) == size


@given(st.integers(min_value=1, max_value=10**6), st.integers(min_value=0, max_value=MAX_BYTES))
def test_shares_round_trip(millionths: int, total: int) -> None:
    share = Share(Fraction(millionths, 10**6))
    assert parse_share(str(share)) == share
    assert 0 <= share.of(total) <= total
    assert share.of(total) == total * millionths // 10**6


@given(st.text(max_size=30) | st.integers() | st.floats() | st.none() | st.booleans())
def test_anything_is_a_size_or_a_value_error(value: object) -> None:
    try:
        size = parse_size(value)
    except ValueError:
        return
    assert 0 < size.of(MAX_BYTES) <= MAX_BYTES


def test_budget_in_blocks() -> None:
    assert parse_budget(7) == Blocks(7)
    assert parse_budget("7") == Bytes(7), "text is bytes, as everywhere else"
    assert budget_blocks(parse_budget(7), tier_blocks=100, block_bytes=1 << 20) == 7
    assert budget_blocks(parse_budget("50%"), tier_blocks=101, block_bytes=1 << 20) == 50
    assert budget_blocks(parse_budget("8MiB"), tier_blocks=100, block_bytes=1 << 20) == 8
    assert budget_blocks(parse_budget(700), tier_blocks=100, block_bytes=1) == 100
    assert budget_blocks(parse_budget("1%"), tier_blocks=10, block_bytes=1) == 1
    for wrong in (0, -3, True, 2**63, "0%", "0GiB"):
        with pytest.raises(ValueError):
            parse_budget(wrong)


def test_human() -> None:
    assert [human(n) for n in (0, 1023, 1024, 3 * 2**29, 2**41)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "2.0 TiB",
    ]
