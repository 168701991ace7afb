"""Another process with the same NVMe tier: a `Rig` that obeys lines on its standard input.

Each command is answered by one JSON line, so that a test stages what happens in which order:

    with Peer(config) as other:
        other.store(range(8))
        assert rig.check(key(0))

`python -m support.nvme_peer CONFIG` is the process itself.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcascade.errors import KVCascadeError
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.tier import NvmeTierConfig

from .children import environment
from .clock import ManualClock
from .nvme_rig import BLOCK, Rig, config_for, content, key

END_TIMEOUT_S = 60.0


class PeerFailed(Exception):
    """The other process answered with an error."""


class Peer:
    """The other process, as a test sees it. Leaving the context closes it cleanly."""

    def __init__(self, config: NvmeTierConfig, policy: str = "lru") -> None:
        arguments = {
            "paths": [str(path) for path in config.paths],
            "capacity": config.capacity_bytes,
            "per_segment": config.slots_per_segment,
            "label": config.key.label,
            "fields": dict(config.key.fields),
            "ready": config.ready_bytes,
            "min_free": config.min_free_bytes,
            "policy": policy,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.nvme_peer", json.dumps(arguments)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.opened = self._answer()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self.ask("close")
        self._end()

    def kill(self) -> None:
        """`kill -9`."""
        self._process.send_signal(signal.SIGKILL)
        self._end()

    def begin(self, what: str, *numbers: int) -> None:
        """Send a command; `end` gives its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *numbers]) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """The answer to `begin`."""
        return self._answer()

    def ask(self, what: str, *numbers: int) -> Any:
        """A command and its answer."""
        self.begin(what, *numbers)
        return self._answer()

    def store(self, numbers: Iterable[int]) -> list[str]:
        """Store blocks; the outcomes of those that were not found."""
        found: list[str] = self.ask("store", *numbers)
        return found

    def hits(self, numbers: Iterable[int]) -> int:
        """How many of these blocks it has; a wrong one is an error there."""
        return int(self.ask("hits", *numbers))

    def maintain(self, seconds: int = 0) -> bool:
        """The end of a step, so much later; True if it found that there was a reset."""
        return bool(self.ask("maintain", seconds))

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed("it is gone")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(END_TIMEOUT_S)


class _Commands:
    """What the process obeys."""

    def __init__(self, config: NvmeTierConfig, policy: str) -> None:
        self.clock = ManualClock()
        self.rig = Rig(config, policy=policy, clock=self.clock)
        self.rig.tier.index.pause = self.clock.advance

    def store(self, *numbers: int) -> list[str]:
        outcomes = self.rig.store_bit_by_bit([key(i) for i in numbers])
        return [outcome.value for outcome in outcomes]

    def hits(self, *numbers: int) -> int:
        self.rig.maintain()
        return sum(self.rig.check(key(i)) for i in numbers)

    def maintain(self, seconds: int) -> bool:
        self.clock.advance(seconds)
        return self.rig.maintain()

    def touch(self, *numbers: int) -> None:
        self.rig.policy.touch([key(i) for i in numbers])

    def own(self) -> list[int]:
        self.rig.backend.get_num_free_blocks()
        return sorted(self.rig.tier.namespace.owners.segments)

    def blocks(self) -> int:
        return len(self.rig.policy)

    def coldest(self, n: int) -> list[int]:
        return [int.from_bytes(h[:4], "big") for h, _ in self.rig.policy.coldest(n)]

    def reset(self) -> None:
        self.rig.reset()

    def check_sums(self) -> None:
        self.rig.check_sums()

    def counters(self) -> dict[str, int]:
        counters = self.rig.tier.store.counters
        return {"held": counters.held, "corrupt": counters.corrupt, "gone": counters.gone}

    def begin_store(self, number: int) -> None:
        """Take a slot, and tell nobody."""
        (status,) = self.rig.begin_store([key(number)])
        self.late = (status, self.rig.backend.get_load_store_spec([key(number)], [status]))

    def end_store(self) -> str:
        """Write the block that `begin_store` took a slot for."""
        status, spec = self.late
        (outcome,) = self.rig.tier.store.write(
            spec.hashes,
            spec.slots.tolist(),
            [memoryview(content(spec.hashes[0]))],
            spec.epoch,
            spec.removals,
        )
        if outcome is BlockOutcome.OK:
            status.ref_cnt = 0
        elif self.rig.policy.get(spec.hashes[0]) is not None:
            self.rig.drop(spec.hashes[0])
        else:  # there was a reset meanwhile
            self.rig.backend.free(status)
        return outcome.value

    def find(self, number: int) -> None:
        """Look a block up as a promotion does, and remember what the index said."""
        self.rig.maintain()
        self.found = self.rig.pin(key(number))

    def read_found(self) -> str:
        """Read what was found before."""
        outcome, data = self.rig.read_pinned(self.found)
        assert outcome is not BlockOutcome.OK or data == content(self.found.hashes[0])
        return outcome.value

    def write_for_ever(self, first: int, n: int) -> None:
        """Store batch after batch of blocks; each is announced before it is begun."""
        batches = 0
        while True:
            numbers = [first + (7 * batches + i) % n for i in range(7)]
            print(json.dumps(batches), flush=True)
            self.rig.store([key(i) for i in dict.fromkeys(numbers)])
            self.rig.maintain()
            batches += 1

    def close(self) -> None:
        self.rig.close()


def main() -> None:
    """The process."""
    options = json.loads(sys.argv[1])
    config = config_for([Path(path) for path in options["paths"]])
    config = replace(
        config,
        capacity_bytes=options["capacity"],
        slots_per_segment=options["per_segment"],
        ready_bytes=options["ready"],
        min_free_bytes=options["min_free"],
        key=NamespaceKey(options["label"], options["fields"]),
    )
    try:
        commands = _Commands(config, options["policy"])
    except KVCascadeError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    report = commands.rig.tier.report
    print(json.dumps({"clean": report.was_clean, "blocks": report.blocks}), flush=True)
    for line in sys.stdin:
        what, *numbers = json.loads(line)
        try:
            answer = getattr(commands, what)(*numbers)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


__all__ = ["BLOCK", "BlockHash", "Peer", "PeerFailed"]

if __name__ == "__main__":
    main()
