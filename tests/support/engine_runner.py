"""A real engine in a process of its own: JSON lines in, JSON lines out, its log on standard error.

    {"do": "start", "options": {...}}        keyword arguments of `vllm.LLM`
    {"do": "generate", "prompts": [...], "max_tokens": n}  -> [{"tokens": [...], "cached": n}, ...]
    {"do": "ask", "requests": [...], ...}    requests of rarer kinds: `rare_requests.py`
    {"do": "reset", "connector": true}       `reset_prefix_cache`
    {"do": "metrics"}                        -> {"name[label,...]": value, ...}
    {"do": "stop"}                           a clean shutdown

An exception is answered with {"error": its text}. Run it with `python -m support.engine_runner`.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NETWORK = "KVCASCADE_TEST_NETWORK"
"""Variable with the name of the network namespace in which the engine shall be."""
CLONE_NEWNET = 0x40000000
PROBE = [3] * 4
"""A prompt shorter than a block: counters of earlier steps arrive with its answer."""


class Runner:
    """Obeys one command after the other."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._adapters: list[str] = []

    def start(self, options: dict[str, Any]) -> None:
        """Make the engine."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = options.pop("kv_transfer_config", None)
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(**options)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> list[dict[str, Any]]:
        """Send all prompts together; greedy answers. `salt`: the tenant's cache salt; `adapter`:
        the folder of a LoRA adapter."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        tenant = {} if salt is None else {"cache_salt": salt}
        requests = [{"prompt_token_ids": prompt, **tenant} for prompt in prompts]
        outputs = self._llm.generate(
            requests, sampling, use_tqdm=False, lora_request=self._adapter(adapter)
        )
        return [
            {"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens or 0}
            for out in outputs
        ]

    def ask(
        self,
        requests: list[dict[str, Any]],
        samplings: list[dict[str, Any]],
        beams: dict[str, Any] | None = None,
        call: list[Any] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Send requests together, each with its sampling; `options` are those of `generate`.

        `beams`: parameters of a beam search instead. `call`: a method of the engine and its
        arguments, called while the requests run.
        """
        from support import rare_requests

        if beams is not None:
            return rare_requests.beams(self._llm, requests, beams)
        model = Path(self._llm.llm_engine.model_config.model)
        prompts = rare_requests.prompts_of(model, requests)
        sampling = [rare_requests.sampling_of(each) for each in samplings]
        if call is not None:
            return rare_requests.interrupted(self._llm, prompts, sampling, *call)
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False, **options)
        return [rare_requests.answer_of(output) for output in outputs]

    def reset(self, connector: bool) -> None:
        """Forget the device's cache, and what was offloaded if `connector`."""
        assert self._llm.reset_prefix_cache(reset_connector=connector)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges, by name and by the labels that are not about the model."""
        self.generate([PROBE], 2)
        return dict(self._samples())

    def stop(self) -> None:
        """Shut down as a server does."""
        shutdown = self._llm.llm_engine.engine_core.shutdown
        if "timeout" in inspect.signature(shutdown).parameters:
            shutdown(timeout=30.0)
        else:  # up to 0.18: as long as it takes them, five seconds at most
            shutdown()

    def _adapter(self, folder: str | None) -> Any:
        """The same name and number for a folder each time."""
        if folder is None:
            return None
        from vllm.lora.request import LoRARequest

        if folder not in self._adapters:
            self._adapters.append(folder)
        return LoRARequest(os.path.basename(folder), 1 + self._adapters.index(folder), folder)

    def _samples(self) -> Iterator[tuple[str, float]]:
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is None:
                continue
            skipped = ("model_name", "engine")
            labels = [str(text) for key, text in metric.labels.items() if key not in skipped]
            yield (f"{metric.name}[{','.join(labels)}]" if labels else metric.name), float(value)


def _enter_network(name: str) -> None:
    """Move this process, which has one thread, and all that it starts to a network namespace."""
    with open(f"/run/netns/{name}") as namespace:  # os.setns came with Python 3.12
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def main() -> None:
    """Keep the two pipes to ourselves: the engine's processes must not write into them."""
    if os.environ.get(NETWORK):
        _enter_network(os.environ[NETWORK])
    commands = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    runner = Runner()
    for line in commands:
        command = json.loads(line)
        try:
            answer = getattr(runner, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
