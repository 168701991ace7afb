"""All three kinds of trace are read, and what is none is refused in one sentence."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import TRACES, block_references, reference

from kvcascade.errors import ConfigError, FormatError, KVCascadeError
from kvcascade.tools.replay import traces
from kvcascade.tools.replay.simulation import hashes_of
from kvcascade.tools.replay.traces import read_trace

FORMAT = (Path(__file__).resolve().parents[2] / "FORMAT.md").read_text()
TAU = "tau_airline_toolagent"


def test_npz_archives() -> None:
    known = reference(TAU)
    trace = read_trace(TRACES / f"{TAU}.npz")
    assert len(trace.requests) == known["requests"]
    assert (trace.references, trace.block_tokens) == (known["block_references"], 16)
    assert sum(request.input_tokens for request in trace.requests) == known["input_tokens"]
    first = [i for request in trace.requests for i in request.ids.tolist()]
    assert first == list(block_references(TAU))
    assert len(read_trace(TRACES / f"{TAU}.npz", limit=7).requests) == 7


def test_arrivals_alone_are_refused() -> None:
    reference(TAU)
    with pytest.raises(FormatError, match="names no blocks"):
        read_trace(TRACES / "azure2023_code_arrivals.npz")


def test_mooncake_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]},
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(path)
    assert (trace.block_tokens, trace.references, trace.duration_s) == (512, 4, 3.0)
    assert [request.ids.tolist() for request in trace.requests] == [[7, 8], [7, 9]]
    assert read_trace(path, block_tokens=256).block_tokens == 256


def record_line(digests: bytes, ms: int = 0) -> str:
    encoded = base64.b64encode(digests).decode()
    return json.dumps({"t": ms, "d": 1, "n": 2 * len(digests), "b": encoded}) + "\n"


def header(part: int = 0, version: int = 1, tokens: Any = 16.0) -> str:
    facts = {"kvcascade_record": version, "part": part, "tokens_per_block": tokens}
    return json.dumps(facts) + "\n"


def test_recordings_part_by_part(tmp_path: Path) -> None:
    a, b, c = bytes(8), b"1" * 8, b"2" * 8
    old, new = "requests-20260101T000000-1-aaaaaa", "requests-20260102T000000-1-bbbbbb"
    (tmp_path / f"{old}-000000.jsonl").write_text(header() + record_line(c))
    (tmp_path / f"{new}-000000.jsonl").write_text(header() + record_line(a + b))
    cut = record_line(b + c, 2000)[:-9]
    (tmp_path / f"{new}-000001.jsonl").write_text(header(1) + record_line(a, 500) + cut)
    trace = read_trace(tmp_path)
    assert [len(request.ids) for request in trace.requests] == [2, 1], "the newest, cut line out"
    assert trace.requests[0].ids[0] == trace.requests[1].ids[0]
    assert (trace.block_tokens, trace.requests[1].arrived_s) == (16, 0.5)
    assert read_trace(tmp_path / f"{old}-000000.jsonl").references == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is not a trace"),
        ("[1]\n", "is not a trace"),
        ('{"hash_ids": [1]}\n', "line 1 is not a request"),
        (header(version=9) + record_line(bytes(8)), "record version 9"),
        (header() + record_line(bytes(7)), "line 2 is not a request"),
        (header(), "names no blocks"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(FormatError, match=problem):
        read_trace(path)


def test_other_ways_to_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no recording"):
        read_trace(tmp_path)
    with pytest.raises(KVCascadeError, match="No such file"):
        read_trace(tmp_path / "nothing.jsonl")
    (tmp_path / "x.npz").write_bytes(b"PK nothing")
    with pytest.raises(FormatError, match="not such an archive"):
        read_trace(tmp_path / "x.npz")
    path = tmp_path / "t.jsonl"
    path.write_text(header(tokens=0) + record_line(bytes(8)))
    with pytest.raises(ConfigError, match="--block-tokens"):
        read_trace(path)


def mooncake(**changed: object) -> str:
    return json.dumps({"timestamp": 1, "input_length": 512, "hash_ids": [1], **changed}) + "\n"


@pytest.mark.parametrize(
    "line",
    [
        mooncake(hash_ids=[-1]),
        mooncake(hash_ids=[2**64]),
        mooncake(hash_ids=[1.5]),
        mooncake(hash_ids=[[1]]),
        mooncake(hash_ids="1"),
        mooncake(hash_ids=None),
        mooncake(timestamp=10**400),
        mooncake(timestamp=math.inf),
        mooncake(timestamp=math.nan),
        mooncake(timestamp="1"),
        mooncake(input_length=math.inf),
        mooncake(input_length=-5),
        mooncake(input_length=10**30),
        "[" * 100_000 + "]" * 100_000 + "\n",
        "[1, 2]\n",
        "\n",
    ],
)
def test_odd_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake() + line + mooncake())
    with pytest.raises(FormatError, match="line 2 is not a request"):
        read_trace(path)
    path.write_text(line)
    with pytest.raises(FormatError, match=r"line 1 is not a request|is not a trace"):
        read_trace(path)


ARRAYS = {
    "meta": np.array('{"block_size_tokens": 16}'),
    "timestamp_ms": np.array([0.0, 1.0]),
    "input_length": np.array([16, 16]),
    "run_offset": np.array([0, 1, 2]),
    "run_start": np.array([1, 5]),
    "run_len": np.array([1, 1]),
}


def archive(path: Path, **changed: Any) -> None:
    """A trace of two requests with other arrays in place of its own."""
    arrays: dict[str, Any] = {**ARRAYS, **changed}
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    "changed",
    [
        {"run_offset": np.array([0])},
        {"run_offset": np.array([0.0, 1.0, 2.0])},
        {"run_len": np.array([1 << 60, 1])},
        {"run_len": np.array([1 << 22, 1]), "run_offset": np.array([0, 2, 2])},
        {"run_len": np.array([-3, 1])},
        {"run_len": np.array(["a", "b"])},
        {"run_start": np.array([[1], [5]])},
        {"meta": np.array("[]")},
        {"meta": np.array("null")},
        {"meta": np.array("[" * 100_000)},
        {"input_length": np.array([16])},
        {"input_length": np.array([16, -1])},
        {"timestamp_ms": np.array([0.0, np.nan])},
        {"timestamp_ms": np.array(0.0)},
    ],
)
def test_odd_archives_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "trace.npz"
    archive(path)
    assert read_trace(path).references == 2
    archive(path, **changed)
    with pytest.raises(FormatError, match="not such an archive"):
        read_trace(path)


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04" + b"x" * 100])
def test_what_is_no_archive(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(data)
    with pytest.raises(FormatError, match="not such an archive"):
        read_trace(path)
    np.save(tmp_path / "plain.npy", np.zeros(3))
    with pytest.raises(FormatError, match="not such an archive"):
        read_trace((tmp_path / "plain.npy").rename(path))


@pytest.mark.parametrize("tokens", ["x", [16], math.inf, math.nan, 1 << 60, -1])
def test_a_block_of_no_size_wants_the_option(tmp_path: Path, tokens: Any) -> None:
    path = tmp_path / "trace.npz"
    archive(path, meta=np.array(json.dumps({"block_size_tokens": tokens})))
    with pytest.raises(ConfigError, match="--block-tokens"):
        read_trace(path)
    path = tmp_path / "trace.jsonl"
    path.write_text(header(tokens=tokens) + record_line(bytes(8)))
    with pytest.raises(ConfigError, match="--block-tokens"):
        read_trace(path)
    assert read_trace(path, block_tokens=16.0).block_tokens == 16


def test_what_is_read_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_REFERENCES", 3)
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake(hash_ids=[1, 2]) * 2)
    with pytest.raises(FormatError, match="--limit 1"):
        read_trace(path)
    assert read_trace(path, limit=1).references == 2
    archive(tmp_path / "trace.npz", run_len=np.array([2, 2]))
    with pytest.raises(FormatError, match="--limit 1"):
        read_trace(tmp_path / "trace.npz")
    monkeypatch.setattr(traces, "MAX_ARCHIVE_BYTES", 200)
    with pytest.raises(FormatError, match="unpacks to more than 200 bytes"):
        read_trace(tmp_path / "trace.npz", limit=1)
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(FormatError, match="a line of over"):
        read_trace(Path("/dev/zero"))


def test_hashes_differ_in_all_their_bits() -> None:
    hashes = hashes_of(np.arange(1000, dtype=np.uint64))
    assert len(set(hashes)) == 1000 and {len(h) for h in hashes} == {16}
    assert hashes == hashes_of(np.arange(1000, dtype=np.uint64))


def test_an_archive_made_as_the_format_says(tmp_path: Path) -> None:
    section = FORMAT.split("## Traces")[1].partition("\n## ")[0]
    arrays = {
        "meta": np.array(json.dumps({"block_size_tokens": 32})),
        "timestamp_ms": np.array([0.0, 1500.0]),
        "input_length": np.array([160, 70]),
        "run_offset": np.array([0, 2, 3]),
        "run_start": np.array([7, 100, 7]),
        "run_len": np.array([2, 3, 2]),
    }
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([a-z_]+)`", "".join(rows))) == arrays.keys()
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    trace = read_trace(path)
    assert (trace.block_tokens, trace.duration_s) == (32, 1.5)
    assert [request.input_tokens for request in trace.requests] == [160, 70]
    assert [request.ids.tolist() for request in trace.requests] == [[7, 8, 100, 101, 102], [7, 8]]


def test_the_format_names_what_is_read_of_a_line() -> None:
    assert all(f"`{name}`" in FORMAT for name in ("timestamp", "input_length", "hash_ids"))
