"""A recording: what is in its files, what is not, their bounds; and it can be replayed."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest
from support.cascade import key
from support.clock import ManualClock

from kvcascade.errors import FormatError, KVCascadeError
from kvcascade.observe import recording
from kvcascade.observe.recording import Recorder, RecordFacts, RecordFiles, open_recorder
from kvcascade.tools.replay.simulation import replay
from kvcascade.tools.replay.tier_options import ReplayOptions, TierOptions
from kvcascade.tools.replay.traces import read_trace

FACTS = RecordFacts(tokens_per_block=16, block_bytes=4096)
KEYS = [key(i) for i in range(40)]


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    clock = ManualClock()
    recorder = open_recorder(tmp_path / "record", FACTS, clock)
    for n in (10, 20, 40):
        clock.advance(2.0)
        arrived_s = clock()
        clock.advance(0.5)
        recorder.note(arrived_s, KEYS[:n])
    recorder.close()
    recorder.close()
    recorder.note(clock(), KEYS)
    assert (recorder.recorded_requests, recorder.dropped_requests) == (3, 1)
    trace = read_trace(tmp_path / "record")
    assert [len(request.ids) for request in trace.requests] == [10, 20, 40]
    assert [request.arrived_s for request in trace.requests] == [2.0, 4.5, 7.0]
    assert [request.input_tokens for request in trace.requests] == [160, 320, 640]
    report = replay(trace, ReplayOptions((TierOptions("cpu", 1 << 20),), 256))
    assert (report.hit_tokens, report.block_bytes) == (30 * 16, 4096)


@pytest.mark.parametrize("content", ["", '{"kvcascade_rec', "HEADER", 'HEADER{"t": 1'])
@pytest.mark.parametrize("name", ["requests-29990101T000000-1-abcdef-000000", None])
def test_what_has_no_request_yet_hides_no_recording(
    tmp_path: Path, content: str, name: str | None
) -> None:
    """The file of an engine that just started, or the part that just began."""
    recorder = open_recorder(tmp_path, FACTS, ManualClock())
    recorder.note(1000.0, KEYS)
    recorder.close()
    (part,) = tmp_path.iterdir()
    header = part.read_text().splitlines(keepends=True)[0]
    begun = tmp_path / f"{name or part.stem[:-1] + '1'}.jsonl"
    begun.write_text(content.replace("HEADER", header))
    assert len(read_trace(tmp_path).requests) == 1
    part.unlink()
    with pytest.raises(FormatError, match="holds no recording with a request"):
        read_trace(tmp_path)


class ToldFlush(RecordFiles):
    """Tells of its first flush."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FACTS)
        self.flushed = threading.Event()

    def flush(self) -> None:
        super().flush()
        self.flushed.set()


def test_a_recording_has_its_header_before_any_request(tmp_path: Path) -> None:
    files = ToldFlush(tmp_path)
    recorder = Recorder(files, FACTS, ManualClock())
    assert files.flushed.wait(10)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["tokens_per_block"] == 16
    recorder.close()


def test_nothing_in_it_leads_back_to_the_hashes(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        recorder = open_recorder(tmp_path / name, FACTS, ManualClock())
        recorder.note(1000.0, KEYS[:3])
        recorder.close()
        (path,) = (tmp_path / name).iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        header, line = map(json.loads, path.read_text().splitlines())
        assert set(header) == {
            "kvcascade_record", "started", "part", "tokens_per_block", "block_bytes"
        }  # fmt: skip
        assert set(line) == {"t", "d", "n", "b"}
        texts.append(line["b"])
    assert texts[0] != texts[1], "every recording has a salt of its own"


def test_files_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path, FACTS, file_bytes=2000, max_files=3)
    recorder = Recorder(files, FACTS, ManualClock())
    for _ in range(50):
        recorder.note(1000.0, KEYS)
    recorder.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3 and recorder.recorded_requests == 50
    assert all(path.stat().st_size <= 2000 for path in paths)
    parts = [json.loads(path.read_text().splitlines()[0])["part"] for path in paths]
    assert parts[0] > 0 and parts == list(range(parts[0], parts[0] + 3))
    assert {len(request.ids) for request in read_trace(tmp_path).requests} == {40}


def write_files(folder: Path, count: int) -> RecordFiles:
    """A recording of so many files at three a folder, open."""
    files = RecordFiles(folder, FACTS, file_bytes=1000, max_files=3)
    for _ in range(count - 1):
        files.write(b"x" * 990)
    return files


def test_recordings_that_ended_count_towards_the_bound(tmp_path: Path) -> None:
    (tmp_path / "requests-kept.jsonl").write_text("the user's own")
    for _ in range(5):
        write_files(tmp_path, 2).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3 + 1 and "requests-kept.jsonl" in names
    last = write_files(tmp_path, 5)
    assert len(list(tmp_path.iterdir())) == 3 + 1
    assert len(list(tmp_path.glob("*-000004.jsonl"))) == 1, "the newest is there"
    last.close()


def test_a_recording_that_is_written_is_left_alone(tmp_path: Path) -> None:
    first = write_files(tmp_path, 3)
    own = set(tmp_path.iterdir())
    for _ in range(3):
        write_files(tmp_path, 3).close()
    assert own < set(tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 3 + 3
    first.write(b"x" * 990)
    first.close()
    write_files(tmp_path, 1).close()
    assert len(list(tmp_path.iterdir())) == 3


def test_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, FACTS, ManualClock())
    recorder.note(1000.0, KEYS * (recording.MAX_QUEUED_BLOCKS // len(KEYS) + 1))
    recorder.close()
    assert (recorder.recorded_requests, recorder.dropped_requests) == (0, 1)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KVCascadeError, match=r"recording requests in .*file.*\(record\)"):
        open_recorder(tmp_path / "file", FACTS, ManualClock())


class FullDisk(RecordFiles):
    """Takes the header, and nothing more."""

    def write(self, line: bytes) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(FullDisk(tmp_path, FACTS), FACTS, ManualClock())
    recorder.note(1000.0, KEYS)
    recorder.close()
    recorder.note(1000.0, KEYS)
    assert (recorder.recorded_requests, recorder.dropped_requests) == (0, 1)
    assert "recording ended" in caplog.text
