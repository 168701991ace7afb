"""`kvcascade export` and `import` with paths that have one writer, closed and beside engines."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.cache_rig import Answer, call, call_outside, flip
from support.keys import key
from support.path_cache import (
    BLOCK,
    HEADER,
    engine_on,
    fill_path,
    folder_in,
    held_in,
    note_use,
    running_engine,
    segment,
)
from support.path_engine import PathEngine

import kvcascade
from kvcascade.block_cache import BlockCache, PutOutcome
from kvcascade.config.machine import Disk, Machine
from kvcascade.tiers.nvme.disk.filesystem import RealFile, RealFileSystem
from kvcascade.tiers.nvme.path.block_reader import payload_checksum
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_options import load_record
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tools.commands.block_scan import NamedBlock
from kvcascade.tools.commands.carry import import_report
from kvcascade.tools.commands.carry.carried import CarriedReader, parse_record
from kvcascade.tools.commands.carry.export_path import _chosen
from kvcascade.tools.commands.carry.export_writer import Choice, whole_or_nothing
from kvcascade.tools.commands.carry.import_path import import_into_path
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.path_blocks import OpenPath, open_path
from kvcascade.tools.commands.path_session import PathSession

BLOCKS = 20
FS = RealFileSystem()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An export of a cache of 20 blocks in `tmp_path / "from"`."""
    fill_path(tmp_path / "from", BLOCKS)
    path = tmp_path / "warm.safetensors"
    answer = call("export", tmp_path / "from", path, "--json")
    assert answer.code == ExitCode.OK and answer.document["blocks"] == BLOCKS
    return path


def small(root: Path, segments: int) -> PathEngine:
    """An engine on a path that holds few segments of 8 blocks."""
    root.mkdir()
    options = PathOptions(capacity_of(segments, 8, BLOCK), segment_bytes=8 * BLOCK)
    return PathEngine([root], options, is_thread=True, capacity=64).open()


def test_two_exports_to_one_file_do_not_mix(tmp_path: Path) -> None:
    fill_path(tmp_path / "from", BLOCKS)
    path = tmp_path / "warm.safetensors"
    with whole_or_nothing(path) as other:
        other.pwritev([memoryview(b"its bytes")], 0)
        answer = call("export", tmp_path / "from", path, "--json")
        assert answer.code == ExitCode.IN_USE and other.size() == len(b"its bytes")
    assert path.read_bytes() == b"its bytes"


def test_a_file_system_without_locks_takes_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with whole_or_nothing(tmp_path / "file") as file:
            file.pwritev([memoryview(b"bytes")], 0)
    assert (tmp_path / "file").read_bytes() == b"bytes"


def test_the_file_has_every_block(file: Path) -> None:
    with safe_open(str(file), "np") as opened:
        blocks, rows = opened.get_tensor("blocks"), opened.get_tensor("slots")
    records = [parse_record(row.tobytes()) for row in rows]
    assert {record.key for record in records if record} == {key(n) for n in range(BLOCKS)}
    for record, payload in zip(records, blocks, strict=True):
        assert record is not None
        assert record.checksum == payload_checksum(record.key, memoryview(payload.tobytes()))


def test_round_trip(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "to"
    fill_path(target, 4)
    before = load_record(FS, target)
    answer = call("import", target, file, "--json")
    assert answer.code == ExitCode.OK
    document = answer.document
    assert (document["imported"], document["already_there"]) == (16, 4)
    assert document["namespace"] == folder_in(target).name
    assert load_record(FS, target) == before
    assert call("import", folder_in(target), file, "--json").document["already_there"] == BLOCKS
    assert held_in(target, range(BLOCKS)) == list(range(BLOCKS))


def test_beside_running_engines(file: Path, tmp_path: Path) -> None:
    with running_engine(tmp_path / "to") as engine:
        assert call("import", tmp_path / "to", file, "--json").document["imported"] == BLOCKS
        assert engine.holds(range(BLOCKS)) == list(range(BLOCKS))
        engine.get(range(BLOCKS))
        again = tmp_path / "again.safetensors"
        assert call("export", tmp_path / "to", again, "--json").document["blocks"] == BLOCKS


def test_a_full_tier_takes_more_only_on_request(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "to"
    engine = small(target, 3)
    engine.store(range(100, 116))
    engine.close()
    answer = call("import", target, file, "--json")
    assert answer.code == ExitCode.NO_SPACE and "--make-room" in answer.document["reason"]
    assert (answer.document["imported"], answer.document["failed"]) == (8, 12)
    assert set(range(100, 116)) <= set(held_in(target, [*range(BLOCKS), *range(100, 116)]))
    answer = call("import", target, file, "--make-room", "--json")
    assert answer.code == ExitCode.OK
    assert answer.document["imported"] + answer.document["already_there"] == BLOCKS
    assert held_in(target, range(BLOCKS)) == list(range(BLOCKS))


def test_blocks_that_an_engine_stores_meanwhile_are_not_evicted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_report, "MAX_BATCH_BLOCKS", 4)
    engine = small(tmp_path / "to", 3)
    meanwhile = [range(100, 116)]

    def progress(rows: int) -> None:
        if meanwhile:
            engine.store(meanwhile.pop())

    try:
        with closing(CarriedReader(file)) as carried:
            report = import_into_path(
                [tmp_path / "to"],
                None,
                carried,
                may_create=False,
                may_evict=False,
                progress=progress,
            )
        assert (report.imported, report.failed) == (8, 12)
        assert engine.holds(range(100, 116)) == list(range(100, 116))
    finally:
        engine.close()


LARGE = 16 << 10
"""Bytes of a block: its segments of 1 MiB are not much smaller than the tables."""


def cache_on(
    paths: Path | list[Path], namespace: str, blocks: range, mib: int, policy: str | None = None
) -> tuple[str, int]:
    """Store large blocks in a closed cache; return its name, and the number of blocks it holds."""
    for path in [paths] if isinstance(paths, Path) else paths:
        path.mkdir(parents=True, exist_ok=True)
    with kvcascade.open(
        paths,
        namespace=namespace,
        block_bytes=LARGE,
        capacity=mib << 20,
        segment_size=1 << 20,
        min_free=0,
        policy=policy,
    ) as cache:
        cache.put([key(n) for n in blocks], [bytes(LARGE)] * len(blocks))
        return cache.name, sum(cache.exists([key(n) for n in blocks]))


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """An export of 1200 blocks of the namespace "mine"."""
    cache_on(tmp_path / "from", "mine", range(1200), 64)
    path = tmp_path / "large.safetensors"
    assert call("export", tmp_path / "from", path).code == ExitCode.OK
    return path


def blocks_in(root: Path) -> dict[str, int]:
    """Number of blocks by the name of the namespace."""
    with open_path(root) as opened:
        return {name: int(opened.facts(name)["blocks"]) for name in opened.names}


@pytest.mark.parametrize("mib", [27, 33, 35])
def test_no_block_is_evicted_in_a_tier_of_two_folders_and_namespaces(
    large_file: Path, tmp_path: Path, mib: int
) -> None:
    """Each folder has a share of its own: what is left of both makes no segment together."""
    paths = [tmp_path / "a", tmp_path / "b"]
    mine, held = cache_on(paths, "mine", range(2000, 2300), mib)
    other, others = cache_on(paths, "other", range(3000, 3330), mib)
    document = call("import", paths[0], large_file, "--json").document
    assert document["failed"] and document["imported"] + document["failed"] == 1200
    assert blocks_in(paths[0]) == {mine: held + document["imported"], other: others}


def test_no_segment_of_a_colder_namespace_is_taken_for_an_import(
    large_file: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    other, others = cache_on(paths, "other", range(3000, 3330), 30)
    note_use(paths[0] / other, range(3000, 3330), at_s=time.time() - 3600)
    mine, held = cache_on(paths, "mine", range(2000, 2300), 30)
    document = call("import", paths[0], large_file, "--json").document
    assert document["failed"]
    assert blocks_in(paths[0]) == {mine: held + document["imported"], other: others}


def test_a_tier_of_an_older_writer_evicts_nothing_for_an_import(
    large_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not tell what is left of each path."""
    ask = PathSession.ask

    def older(session: PathSession, what: str, *limit: float, **body: Any) -> dict[str, Any]:
        answer = ask(session, what, *limit, **body)
        return {name: value for name, value in answer.items() if name != "left_bytes"}

    monkeypatch.setattr(PathSession, "ask", older)
    paths = [tmp_path / "a", tmp_path / "b"]
    mine, held = cache_on(paths, "mine", range(2000, 2300), 33)
    document = call("import", paths[0], large_file, "--json").document
    assert document["imported"] and document["failed"]
    assert blocks_in(paths[0]) == {mine: held + document["imported"]}


def import_into_used_tier(root: Path, file: Path, policy: str) -> tuple[Answer, int]:
    """Import with --make-room into a full tier of used blocks that has some of the file.

    Return the answer, and how many blocks of the file the tier holds then.
    """
    cache_on(root, "mine", range(2000, 3300), 24, policy)
    with kvcascade.open(root, namespace="mine", block_bytes=LARGE) as cache:
        for _ in range(3):
            cache.get([key(n) for n in range(2000, 3300)])
        cache.put([key(n) for n in range(1160, 1200)], [bytes(LARGE)] * 40)
    answer = call("import", root, file, "--make-room", "--json")
    with kvcascade.open(root, namespace="mine", block_bytes=LARGE) as cache:
        return answer, sum(cache.exists([key(n) for n in range(1200)]))


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "slru"])
def test_blocks_that_leave_during_an_import_have_failed(
    large_file: Path, tmp_path: Path, policy: str
) -> None:
    """Some policies evict new blocks before used ones."""
    answer, held = import_into_used_tier(tmp_path / "to", large_file, policy)
    document = answer.document
    assert document["imported"] + document["already_there"] == held
    assert document["failed"] == 1200 - held
    assert (held == 1200) == (policy == "lru")
    assert answer.code == (ExitCode.OK if held == 1200 else ExitCode.NO_SPACE)
    assert (document["reason"] is None) == (held == 1200)


def test_a_tier_that_is_too_small_keeps_what_was_imported(file: Path, tmp_path: Path) -> None:
    small(tmp_path / "to", 2).close()
    answer = call("import", tmp_path / "to", file, "--make-room", "--json")
    assert answer.code == ExitCode.NO_SPACE and "larger capacity" in answer.document["reason"]
    assert answer.document["imported"] == len(held_in(tmp_path / "to", range(BLOCKS))) == 16


def test_other_blocks_are_refused_and_a_namespace_is_made_on_request(
    file: Path, tmp_path: Path
) -> None:
    root = tmp_path / "to"
    with kvcascade.open(
        root, namespace="mine", block_bytes=BLOCK, capacity="64MiB", min_free=0
    ) as cache:
        name = cache.name
    answer = call("import", root, file)
    assert answer.code == ExitCode.DIFFERENT and "model" in answer.err
    assert call("import", root, file, "-n", name).code == ExitCode.DIFFERENT
    answer = call("import", root, file, "--create", "--json")
    assert answer.code == ExitCode.OK and answer.document["imported"] == BLOCKS
    with kvcascade.open(root, namespace=answer.document["namespace"]) as cache:
        assert all(block is not None for block in cache.get([key(n) for n in range(BLOCKS)]))


def test_some_blocks(tmp_path: Path) -> None:
    fill_path(tmp_path / "kv", BLOCKS)
    out = tmp_path / "out.safetensors"
    some = [key(n).hex() for n in (3, 5)]
    answer = call("export", tmp_path / "kv", out, "--hash", some[0], "--hash", some[1], "--json")
    assert answer.document["blocks"] == 2
    assert call("export", tmp_path / "kv", out).code == ExitCode.USAGE, "it exists"
    options = ("--force", "--hot", str(3 * BLOCK), "--json")
    assert call("export", tmp_path / "kv", out, *options).document["blocks"] == 3


def test_the_most_recently_used_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_path(tmp_path, BLOCKS)
    out = tmp_path / "out.safetensors"
    blocks = OpenPath.blocks
    uses: dict[bytes, int] = {key(n): 100 + n for n in range(BLOCKS)}
    monkeypatch.setattr(
        OpenPath,
        "blocks",
        lambda self, name: (
            dataclasses.replace(each, used_s=uses[each.key]) for each in blocks(self, name)
        ),
    )
    call("export", tmp_path, out, "--hot", str(3 * BLOCK))
    with safe_open(str(out), "np") as opened:
        records = [parse_record(row.tobytes()) for row in opened.get_tensor("slots")]
    assert {each.key for each in records if each} == {key(n) for n in range(17, 20)}


def test_damaged_blocks_are_left_out(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    flip(folder / "segments" / "000000.safetensors", HEADER + 3 * BLOCK + 1)
    answer = call("export", tmp_path, tmp_path / "out.safetensors", "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert (answer.document["blocks"], answer.document["skipped"]) == (BLOCKS - 1, 1)
    call("import", tmp_path, tmp_path / "out.safetensors")


def test_damage_in_the_file_costs_the_block(file: Path, tmp_path: Path) -> None:
    fill_path(tmp_path / "to", 0)
    flip(file, HEADER + 2 * BLOCK + 5)
    answer = call("import", tmp_path / "to", file, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert (answer.document["imported"], answer.document["damaged"]) == (BLOCKS - 1, 1)


def test_a_reset_refuses_both_ways(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "to"
    engine = engine_on(root)
    engine.tier.reset()
    engine.until(lambda: not engine.tier._resets_due)
    engine.store([50])
    assert call("import", root, file).code == ExitCode.IN_USE
    answer = call("export", root, tmp_path / "out.safetensors")
    assert answer.code == ExitCode.USAGE and "were reset" in answer.err
    engine.close()
    assert call("export", root, tmp_path / "out.safetensors").code == ExitCode.USAGE
    assert call("import", root, file, "--json").document["imported"] == BLOCKS
    assert call("export", root, tmp_path / "out.safetensors", "--json").document["blocks"] == BLOCKS


def test_a_budget_is_a_reason(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "to"
    root.mkdir()
    options = PathOptions(64 << 20, segment_bytes=8 * BLOCK, write_budget_bytes=4 * BLOCK)
    PathEngine([root], options, is_thread=True).open().close()
    answer = call("import", root, file, "--json")
    assert answer.code == ExitCode.NO_SPACE and "budget" in answer.document["reason"]


def puts_with(
    patch: pytest.MonkeyPatch, batches: list[PutOutcome | None]
) -> Callable[[], list[PutOutcome | None]]:
    """Batches of 4 blocks have these outcomes in turn; None stores. Return what is left of them."""
    left, put = list(batches), BlockCache.put

    def with_outcome(self: BlockCache, keys: Any, buffers: Any) -> list[PutOutcome]:
        outcome = left.pop(0)
        return put(self, keys, buffers) if outcome is None else [outcome] * len(list(keys))

    patch.setattr(BlockCache, "put", with_outcome)
    patch.setattr(import_report, "MAX_BATCH_BLOCKS", 4)
    return lambda: left


@pytest.mark.parametrize("outcome", [PutOutcome.FAILED, PutOutcome.TIMED_OUT])
def test_a_device_that_refuses_everything_ends_an_import(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: PutOutcome
) -> None:
    """Each batch may take 30 s: a large file would take days."""
    fill_path(tmp_path / "to", 0)
    left = puts_with(monkeypatch, [None, outcome, outcome, outcome, None])
    answer = call("import", tmp_path / "to", file, "--json")
    assert answer.code == ExitCode.CANNOT_OPEN and left() == [None]
    assert (answer.document["imported"], answer.document["failed"]) == (4, BLOCKS - 4)
    assert answer.document["was_given_up"] and "import again" in answer.document["reason"]


def test_a_device_that_fails_now_and_then_does_not_end_an_import(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_path(tmp_path / "to", 0)
    failed = PutOutcome.FAILED
    left = puts_with(monkeypatch, [failed, failed, None, failed, failed])
    answer = call("import", tmp_path / "to", file, "--json")
    assert answer.code == ExitCode.NO_SPACE and left() == []
    assert (answer.document["imported"], answer.document["failed"]) == (4, BLOCKS - 4)
    assert not answer.document["was_given_up"]


def test_a_file_that_is_there_is_kept(file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    answer = call("export", tmp_path / "from", file)
    assert answer.code == ExitCode.USAGE and "--force" in answer.err
    assert file.read_bytes() == before


@pytest.mark.timeout(60)
def test_a_device_that_takes_no_byte_ends_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(tmp_path / "a", BLOCKS):
        monkeypatch.setattr(RealFile, "pwritev", lambda file, buffers, offset: 0)
        answer = call("export", tmp_path / "a", tmp_path / "out.safetensors")
    assert answer.code == ExitCode.CANNOT_OPEN and "writing less" in " ".join(answer.err.split())
    assert not list(tmp_path.glob("out*")), "nothing half done is left"


@pytest.mark.parametrize("offset", [0, 3, 8, 40, 200, 900])
def test_a_damaged_head_is_refused(file: Path, tmp_path: Path, offset: int) -> None:
    fill_path(tmp_path / "to", 0)
    flip(file, offset)
    answer = call("import", tmp_path / "to", file)
    assert answer.code == ExitCode.CANNOT_OPEN and answer.err.count("\n") == 1


def test_a_damaged_index_cannot_be_opened(file: Path, tmp_path: Path) -> None:
    folder = fill_path(tmp_path / "to", 4)
    (folder / "blocks" / "data.mdb").write_bytes(bytes(1 << 16))
    answer = call("import", tmp_path / "to", file)
    assert answer.code == ExitCode.CANNOT_OPEN and "index" in answer.err


def test_strange_files_are_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    fill_path(tmp_path / "to", 0)
    strange = tmp_path / "strange"
    for data in (b"", b"x" * 7, b"\xff" * 100, whole[:-1], whole + b"x", whole[:5000]):
        strange.write_bytes(data)
        assert call("import", tmp_path / "to", strange).code == ExitCode.CANNOT_OPEN
    other = whole.replace(b'"format_version":"1"', b'"format_version":"9"', 1)
    strange.write_bytes(other)
    assert "format version 9" in call("import", tmp_path / "to", strange).err
    assert call("import", tmp_path / "to", segment(fill_path(tmp_path / "x"))).code == 3


def test_blocks_of_a_list(file: Path, tmp_path: Path) -> None:
    listed, out = tmp_path / "list", tmp_path / "some.safetensors"
    listed.write_text(f"{key(3).hex()}\n{key(5).hex()[:10]}\n")
    answer = call("export", tmp_path / "from", out, "--hashes", listed, "--json")
    assert answer.code == ExitCode.OK and answer.document["blocks"] == 2


class ListedPath:
    """The blocks of a path; it counts the comparisons of their keys with starts of hashes."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.compared = 0
        listed = self

        class Key(bytes):
            def startswith(self, *start: Any) -> bool:
                starts = start[0] if isinstance(start[0], tuple) else start
                listed.compared += len(starts)
                return super().startswith(*start)

        self._keys = list(map(Key, keys))

    def blocks(self, name: str) -> Iterator[NamedBlock]:
        return (NamedBlock(each, slot, 0, 0) for slot, each in enumerate(self._keys))


def test_a_long_list_of_hashes_is_not_compared_with_every_block(tmp_path: Path) -> None:
    """10,000 hashes of 200,000 blocks took 100 s."""
    folder = fill_path(tmp_path / "kv", 1)
    with open_path(folder.parent) as opened:
        namespace = opened.namespace(folder.name)
    keys = [key(n) for n in range(500)]
    starts = (*keys[:200], keys[300][:5], keys[300][:6], b"absent")
    path: Any = ListedPath(keys)
    found, missing = _chosen(path, namespace, Choice(prefixes=starts), set())
    assert {each.slot for each in found} == {*range(200), 300} and missing == 1
    assert path.compared < 10 * len(keys)


def test_a_path_that_no_engine_has_used_takes_a_namespace(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "disk", lambda *_: Disk(1, total=1 << 30, free=1 << 30))
    root = tmp_path / "new"
    root.mkdir()
    assert call("import", root, file).code == ExitCode.DIFFERENT
    answer = call("import", root, file, "--create", "--json")
    assert answer.code == ExitCode.OK and answer.document["imported"] == BLOCKS, answer


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hash", "ffff"], "no block of"),
        (["--hot", "10"], "10 bytes hold no block"),
        (["--hashes", "LIST"], "no block of"),
        (["--hashes", "EMPTY"], "lists no hash"),
    ],
)
def test_an_empty_choice_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    fill_path(tmp_path / "kv", 4)
    (tmp_path / "LIST").write_text("ffff\n")
    (tmp_path / "EMPTY").write_text("\n")
    words = [tmp_path / word if word.isupper() else word for word in options]
    answer = call("export", tmp_path / "kv", tmp_path / "out", *words)
    assert answer.code == ExitCode.USAGE and said in answer.err
    assert not (tmp_path / "out").exists()


def test_hashes_that_no_block_has_are_missing(tmp_path: Path) -> None:
    fill_path(tmp_path / "kv", 4)
    (tmp_path / "list").write_text(f"{key(1).hex()}\nffff\n{key(9).hex()}\n")
    answer = call("export", tmp_path / "kv", tmp_path / "out", "--hashes", tmp_path / "list")
    assert answer.code == ExitCode.PROBLEMS and "1 blocks of" in answer.out
    assert "2 that were asked for are not stored" in answer.out


def test_standard_output_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call("export", fill_path(tmp_path / "kv", 4).parent, "-")
    assert answer.code == ExitCode.USAGE and "name of a file" in answer.err
    assert not (tmp_path / "-").exists()


def test_a_link_to_a_tier_of_two_folders_is_followed(large_file: Path, tmp_path: Path) -> None:
    """`export` follows it; `import` said that the folders have moved."""
    paths, link = [tmp_path / "a", tmp_path / "b"], tmp_path / "link"
    cache_on(paths, "mine", range(2000, 2010), 64)
    link.symlink_to(paths[0])
    for also in ((), ("--also", paths[1])):
        answer = call("import", link, large_file, *also, "--json")
        assert answer.code == ExitCode.OK, answer.out
        held = answer.document["imported"] + answer.document["already_there"]
        assert held == 1200
    assert call("import", tmp_path / "from", large_file, "--also", paths[1]).code == ExitCode.USAGE


@pytest.mark.parametrize("more", [[], ["--create"]])
def test_a_missing_folder_is_said_once(file: Path, tmp_path: Path, more: list[str]) -> None:
    answer = call_outside("import", tmp_path / "nowhere", file, *more)
    assert (answer.code, answer.err.count("\n")) == (ExitCode.CANNOT_OPEN, 1), answer.err
    assert "create it" in answer.err and not (tmp_path / "nowhere").exists()
