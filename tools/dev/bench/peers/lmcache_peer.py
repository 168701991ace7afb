"""LMCache, which is measured where an environment of its own has it: its version, its options.

It asks for older packages than the ones pinned here, so a second Python runs it. Its disk tier is
the adapter `fs_native` with direct I/O, the fastest one here.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .....tiers.cpu.arena import DEFAULT_ARENA_DIR
from ....commands.bench.bench_results import GIB, BenchError
from ...server import BLOCK_TOKENS, LOG_LINES_SHOWN, free_port

if TYPE_CHECKING:
    import torch

    from ..measurement import MeasurementSetup
    from .vllm_calls import Key

OPTION = "--lmcache-python"
ASK_VERSION = "from importlib.metadata import version; print(version('lmcache'))"
ASK_TIMEOUT_S = 60.0
DRIVER = Path(__file__).with_name("lmcache_tiers.py")
CLOSE_TIMEOUT_S = 60.0
QUIET = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1"}


def version_of(python: Path) -> str:
    """Return the version of LMCache in the environment of this Python. Raises `BenchError`."""
    command = [str(python), "-c", ASK_VERSION]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"{OPTION}: {python} has no lmcache") from error
    return done.stdout.strip()


def is_measured(setup: MeasurementSetup) -> bool:
    """Return True if an environment with LMCache was named; store a note if none was."""
    if setup.lmcache_python is None:
        setup.note(f"LMCache is not measured: {OPTION} names the Python of an environment with it")
    return setup.lmcache_python is not None


def transfer_config(folder: Path, memory_bytes: int, on_cpu: bool) -> dict[str, Any]:
    """Return the `kv_transfer_config` of an engine that starts LMCache's server and ends it.

    A chunk is one block, so that it caches as many tokens of a prompt as the others. On CPU the
    memory tier is shared memory, which `remove_memory` removes.
    """
    server = [
        *("--chunk-size", str(BLOCK_TOKENS)),
        *("--l1-size-gb", str(memory_bytes / GIB), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
        *("--http-port", str(free_port()), "--prometheus-port", str(free_port())),
        *("--l2-adapter", json.dumps(adapter(folder))),
    ]
    if on_cpu:  # with its default the engine hangs there
        server += ["--supported-transfer-mode", "engine_driven", "--shm-name", _memory_name(folder)]
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": free_port(),
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": shlex.join(server),
        },
    }


def remove_memory(folder: Path) -> None:
    """Remove the shared memory that a killed server with this folder leaves."""
    (Path(DEFAULT_ARENA_DIR) / f"lmcache_l1_pool_{_memory_name(folder)}").unlink(missing_ok=True)


def _memory_name(folder: Path) -> str:
    return f"{folder.name}-{os.getpid()}"


def adapter(folder: Path) -> dict[str, Any]:
    """Return the options of LMCache's disk tier in a folder."""
    return {"type": "fs_native", "base_path": str(folder), "use_odirect": True}


class LMCacheTiers:
    """LMCache's tiers over a folder, without an engine, in a process of its own environment."""

    def __init__(self, python: Path, device: torch.Tensor, folder: Path) -> None:
        """Start the process and wait until it has opened the folder. Raises `BenchError`."""
        self.device = device
        self._memory = folder.with_name("lmcache-device")
        self._memory.write_bytes(_bytes_of(device))
        self._log = folder.with_name("lmcache.log")
        blocks, block_bytes = device.shape
        arguments = [json.dumps(adapter(folder)), self._memory, block_bytes, blocks]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), "-P", str(DRIVER), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **QUIET},
                text=True,
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def store(self, keys: Sequence[Key]) -> None:
        """Store what LMCache takes of the device's blocks, and wait until it is on disk."""
        self._tell("store", keys)

    offer = store

    def ask(self, keys: Sequence[Key]) -> list[int]:
        """Ask for each block by itself; return the numbers of those loaded to the device."""
        came = self._tell("ask", keys)
        found = self._memory.read_bytes()
        import torch

        self.device.copy_(torch.frombuffer(bytearray(found), dtype=torch.int8).view_as(self.device))
        return came

    def close(self) -> None:
        """End the process in its own way, or after `CLOSE_TIMEOUT_S` by `kill -9`."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, do: str, keys: Sequence[Key]) -> list[int]:
        assert self._process.stdin is not None
        with self._memory.open("r+b") as file:
            file.write(_bytes_of(self.device))
        print(
            json.dumps({"do": do, "keys": [bytes(key).hex() for key in keys]}),
            file=self._process.stdin,
            flush=True,
        )
        return [int(number) for number in self._answer()["blocks"]]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            ended = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            raise BenchError("LMCache ended: " + " / ".join(ended))
        answer: dict[str, Any] = json.loads(line)
        return answer


def _bytes_of(device: torch.Tensor) -> bytes:
    data: bytes = device.numpy().tobytes()
    return data
