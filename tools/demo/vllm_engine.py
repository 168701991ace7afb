"""One real engine in a process of its own, told what to do line by line.

`python -m kvcascade.tools.demo.vllm_engine` reads JSON lines from standard input and answers each
with a JSON line on standard output; what the engine prints goes to standard error.

    {"start": {...}}            keyword arguments of `vllm.LLM`     -> {"version": ...}
    {"generate": [[...], ...]}  prompts, sent together, and "answer_tokens" -> {"replies": [...]}
    {"metrics": true}           the engine's counters               -> {"metrics": {...}}
    {"stop": seconds}           clean shutdown within that time     -> {"stopped": true}

The end of the input means a clean shutdown too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import IO, Any

PROBE_TOKENS = [3] * 4
"""A prompt shorter than a block: it leaves no trace in any cache."""
PROBE_ANSWER_TOKENS = 3
STOP_S = 30.0
"""For a shutdown that nobody asked for."""


class Engine:
    """An `LLM` and the counters it had when it was ready."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        transfer = options.pop("kv_transfer_config", None)
        if transfer is not None:
            from vllm.config import KVTransferConfig

            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(**options)
        self.generate([PROBE_TOKENS], PROBE_ANSWER_TOKENS)  # what is done only once is done now
        self._at_start = self._counters()

    def generate(self, prompts: list[list[int]], answer_tokens: int) -> list[dict[str, Any]]:
        """Send requests together; returns what each got, in order."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=answer_tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)  # type: ignore[arg-type]
        return [
            {
                "prompt_tokens": len(output.prompt_token_ids or ()),
                "cached_tokens": output.num_cached_tokens or 0,
                "ttft_s": output.metrics.first_token_latency if output.metrics else 0.0,
                "tokens": list(output.outputs[0].token_ids),
            }
            for output in outputs
        ]

    def metrics(self) -> dict[str, float]:
        """Growth of every counter since the start.

        The counters of a request arrive with a later step of the engine: a probe makes one.
        """
        self.generate([PROBE_TOKENS], PROBE_ANSWER_TOKENS)
        now = self._counters()
        return {name: value - self._at_start.get(name, 0.0) for name, value in now.items()}

    def stop(self, timeout_s: float) -> None:
        """Shut down as a server does, with time to write what is only in memory."""
        self._llm.llm_engine.engine_core.shutdown(timeout=timeout_s)

    def _counters(self) -> dict[str, float]:
        """Counters by name and by the labels that are not about the model."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is None:
                continue
            labels = [
                f"{key}={text}"
                for key, text in sorted(metric.labels.items())
                if key not in ("model_name", "engine")
            ]
            name = f"{metric.name}{{{','.join(labels)}}}" if labels else metric.name
            found[name] = found.get(name, 0.0) + value
        return found


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Answer every line until told to stop, or until there are no more."""
    engine: Engine | None = None
    stop_s = STOP_S
    for line in commands:
        command = json.loads(line)
        answer: dict[str, Any]
        if "stop" in command:
            stop_s = command["stop"]
            break
        if "start" in command:
            began = time.monotonic()
            engine = Engine(command["start"])
            answer = {"start_s": time.monotonic() - began, "version": _version()}
        elif engine is None:
            answer = {"error": "not started"}
        elif "generate" in command:
            answer = {"replies": engine.generate(command["generate"], command["answer_tokens"])}
        else:
            answer = {"metrics": engine.metrics()}
        print(json.dumps(answer), file=answers, flush=True)
    if engine is not None:
        engine.stop(stop_s)
    print(json.dumps({"stopped": True}), file=answers, flush=True)


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def main() -> None:
    """Take over standard input and output: the engine's own processes shall not touch them."""
    commands = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdin = os.fdopen(nothing)
    serve(commands, answers)


if __name__ == "__main__":
    main()
