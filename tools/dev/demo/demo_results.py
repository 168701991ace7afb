"""Measurements of the demo's phases, with the checks for consistency and success.

Plain data and pure functions, without access to an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ...commands.bench.bench_results import quantile
from ..server import Completion, ServerError
from .workload import Turn

FORMAT = 2
"""Version of the JSON document."""

LOADED_BLOCKS = "vllm:kvcascade_loaded_blocks"
READ_BYTES = "vllm:kvcascade_promoted_bytes"
WRITTEN_BYTES = "vllm:kvcascade_demoted_bytes"
DEVICE_HITS = "vllm:prefix_cache_hits"
HITS_BY_SOURCE = "vllm:prompt_tokens_cached_by_source"


class DemoError(ServerError):
    """The demo cannot continue; the message gives the reason and the file to look at."""


@dataclass(frozen=True, slots=True)
class Reply(Completion):
    """The answer to a turn."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Metrics:
    """The engine's own counters; labels as `name{label=value}`."""

    values: Mapping[str, float]

    def get(self, name: str, **labels: str) -> float:
        """Return the value of a counter, or 0 if it was never counted."""
        inner = ",".join(f"{key}={value}" for key, value in labels.items())
        return self.values.get(f"{name}{{{inner}}}" if labels else name, 0.0)

    def has(self, name: str) -> bool:
        """Return True if the engine has a counter of that name, with any labels."""
        return any(key.partition("{")[0] == name for key in self.values)


@dataclass(frozen=True, slots=True)
class Sources:
    """Numbers of prompt tokens of a phase, by source."""

    gpu: int
    cpu: int
    nvme: int
    recomputed: int
    remote: int = 0


@dataclass(frozen=True, slots=True)
class DemoTimes:
    """Percentiles of the time to the first token, in seconds."""

    p50_s: float
    p95_s: float


class Need(StrEnum):
    """Tier from which a phase must load tokens; a field of `Sources` but for NOTHING."""

    NOTHING = ""
    """The phase is the reference."""
    NVME = "nvme"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Other:
    """How a server without kvcascade answered the requests of a phase."""

    sources: Sources
    ttft: DemoTimes
    wrong_tokens: int = 0
    """Number of answer tokens that differ from the reference."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One engine process, from its start to its end."""

    key: str
    """Letter of the phase, from a on."""
    title: str
    replies: Sequence[Reply]
    sources: Sources
    wrong_tokens: int
    """Number of answer tokens that differ from the reference."""
    reference: Other
    """The same requests without offloading, in phase (a)."""
    start_s: float
    """Duration of the engine's start."""
    written_bytes: int = 0
    """Bytes written to NVMe, including those at shutdown."""
    read_bytes: int = 0
    """Bytes read from NVMe and verified."""
    remote_written_bytes: int = 0
    """Bytes written to the remote tier, without those at shutdown."""
    remote_read_bytes: int = 0
    """Bytes read from the remote tier and verified."""
    needs: Need = Need.NVME
    tiering: Other | None = None
    """The same requests with vLLM's own tiering; None if it was left out."""
    leftovers: Sequence[str] = field(default=())
    """Our files that are left in shared memory after the end."""

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of all requests."""
        return sum(reply.prompt_tokens for reply in self.replies)

    @property
    def ttft(self) -> DemoTimes:
        """Return the percentiles over all requests."""
        return times(reply.ttft_s for reply in self.replies)


def times(values_s: Iterable[float]) -> DemoTimes:
    """Return percentiles of times; 0 if there are none."""
    values = list(values_s) or [0.0]
    return DemoTimes(quantile(values, 0.5), quantile(values, 0.95))


def sources_of(replies: Sequence[Reply], metrics: Metrics, block_tokens: int) -> Sources:
    """Return the sources of the tokens by the engine's counters; raise if they are inconsistent.

    Three counts must agree: the cached tokens of the answers, vLLM's hits on the device, and the
    blocks that kvcascade loaded from each tier. vLLM 0.32 and later also count hits by source, and
    that count must agree as well.
    """
    gpu = int(metrics.get(DEVICE_HITS))
    cpu = int(metrics.get(LOADED_BLOCKS, tier="cpu")) * block_tokens
    nvme = int(metrics.get(LOADED_BLOCKS, tier="nvme")) * block_tokens
    remote = int(metrics.get(LOADED_BLOCKS, tier="remote")) * block_tokens
    prompt = sum(reply.prompt_tokens for reply in replies)
    cached = sum(reply.cached_tokens for reply in replies)
    if any(reply.cached_tokens > reply.prompt_tokens for reply in replies):
        raise DemoError("an answer reports more cached tokens than its prompt has")
    if gpu + cpu + nvme + remote != cached:
        raise DemoError(
            f"the counts do not add up: the answers report {cached} cached of {prompt} prompt "
            f"tokens, the counters {gpu} (GPU) + {cpu} (CPU) + {nvme} (NVMe) + {remote} (remote)"
        )
    if metrics.has(HITS_BY_SOURCE):
        names = {"device": gpu, "host": cpu, "disk": nvme + remote}
        counted = {name: int(metrics.get(HITS_BY_SOURCE, source=name)) for name in names}
        if counted != names:
            raise DemoError(f"vLLM counts {counted} cached tokens, kvcascade {names}")
    return Sources(gpu, cpu, nvme, prompt - cached, remote)


def device_sources(replies: Sequence[Reply]) -> Sources:
    """Return the sources of tokens in an engine without offloading."""
    cached = sum(reply.cached_tokens for reply in replies)
    return Sources(cached, 0, 0, sum(reply.prompt_tokens for reply in replies) - cached)


def tiering_sources(replies: Sequence[Reply], metrics: Metrics) -> Sources:
    """Return the sources of tokens in an engine with vLLM's own tiering, by vLLM's counters."""
    gpu, cpu, disk = (
        int(metrics.get(HITS_BY_SOURCE, source=name)) for name in ("device", "host", "disk")
    )
    prompt = sum(reply.prompt_tokens for reply in replies)
    return Sources(gpu, cpu, disk, prompt - sum(reply.cached_tokens for reply in replies))


def problems(phases: Sequence[Phase]) -> list[str]:
    """Return the reasons why the demo failed, one sentence each; empty if it succeeded."""
    found: list[str] = []
    for phase in phases:
        name = f"({phase.key}) {phase.title}"
        if not phase.replies:
            found.append(f"{name}: no request was answered.")
        if phase.wrong_tokens:
            found.append(f"{name}: {phase.wrong_tokens} tokens differ from the reference.")
        if phase.needs is Need.NVME and not (phase.sources.nvme and phase.read_bytes):
            found.append(f"{name}: nothing came back from NVMe.")
        if phase.needs is Need.REMOTE and not (phase.sources.remote and phase.remote_read_bytes):
            found.append(f"{name}: nothing came from the remote tier.")
        if phase.leftovers:
            found.append(f"{name}: left in shared memory: {', '.join(phase.leftovers)}.")
    return found or ([] if phases else ["No phase was run."])


def document(phases: Sequence[Phase], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return all results as JSON values; `facts` describe the machine and the settings."""
    return {
        "format": FORMAT,
        **facts,
        "phases": [_phase(phase) for phase in phases],
        "problems": problems(phases),
    }


def _phase(phase: Phase) -> dict[str, Any]:
    first = phase.replies[0] if phase.replies else None
    return {
        "phase": phase.key,
        "title": phase.title,
        "requests": len(phase.replies),
        "prompt_tokens": phase.prompt_tokens,
        "tokens_from": asdict(phase.sources),
        "ttft": asdict(phase.ttft),
        "reference": asdict(phase.reference),
        "tiering": phase.tiering and asdict(phase.tiering),
        "nvme_written_bytes": phase.written_bytes,
        "nvme_read_bytes": phase.read_bytes,
        "remote_written_bytes": phase.remote_written_bytes,
        "remote_read_bytes": phase.remote_read_bytes,
        "wrong_tokens": phase.wrong_tokens,
        "engine_start_s": phase.start_s,
        "first_request": first and {"prompt": first.prompt_tokens, "cached": first.cached_tokens},
        "left_in_shared_memory": list(phase.leftovers),
        "replies": [
            {
                **reply.turn._asdict(),
                "prompt_tokens": reply.prompt_tokens,
                "cached_tokens": reply.cached_tokens,
                "ttft_s": round(reply.ttft_s, 6),
                "tokens": list(reply.tokens),
            }
            for reply in phase.replies
        ],
    }
