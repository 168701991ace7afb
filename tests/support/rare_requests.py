"""Requests of the rarer kinds, as `engine_runner.py` sends them to the engine of its process.

A request is what JSON can hold:

    {"tokens": [...]}                    a prompt
    {"tokens": [...], "images": [...]}   a seed for each image, and as many image tokens
    {"embeds": [...]}                    tokens whose embeddings are sent instead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

IMAGE_PIXELS = 112
EMBEDDINGS = "model.embed_tokens.weight"
CALL_FIRST, CALL_EVERY = 4, 6
"""Outputs of the engine before the first call that interrupts requests, and between two calls."""
Request = Mapping[str, Any]


def prompts_of(model: Path, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Return the prompts as vLLM takes them."""
    table: Any = None
    found: list[dict[str, Any]] = []
    for request in requests:
        if "embeds" in request:
            import torch

            table = load_file(model / "model.safetensors")[EMBEDDINGS] if table is None else table
            found.append({"prompt_embeds": torch.from_numpy(table[request["embeds"]])})
            continue
        prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        if "images" in request:
            images = [_image(seed) for seed in request["images"]]
            prompt["multi_modal_data"] = {"image": images}
        found.append(prompt)
    return found


def _image(seed: int) -> Any:
    """Return an image of random pixels."""
    from PIL import Image

    shape = (IMAGE_PIXELS, IMAGE_PIXELS, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8))


def sampling_of(options: Mapping[str, Any]) -> Any:
    """Return sampling parameters: greedy ones, unless `options` say otherwise."""
    from vllm import SamplingParams

    given = {"temperature": 0, "detokenize": False, "ignore_eos": True, **options}
    if "regex" in given:
        from vllm.sampling_params import StructuredOutputsParams

        given["structured_outputs"] = StructuredOutputsParams(regex=given.pop("regex"))
    return SamplingParams(**given)


def beams(llm: Any, requests: Sequence[Request], options: Mapping[str, Any]) -> list[Any]:
    """Return each prompt's beams, best first, with their scores."""
    from vllm.sampling_params import BeamSearchParams

    prompts = [{"prompt_token_ids": request["tokens"]} for request in requests]
    outputs = llm.beam_search(prompts, BeamSearchParams(ignore_eos=True, **options))
    return [
        {
            "samples": [list(beam.tokens) for beam in output.sequences],
            "numbers": [[beam.cum_logprob for beam in output.sequences]],
        }
        for output in outputs
    ]


def answer_of(output: Any) -> dict[str, Any]:
    """Return one request's answer: `samples` are compared exactly, `numbers` with a tolerance."""
    positions = [position for one in output.outputs for position in one.logprobs or ()]
    positions += [position or {} for position in output.prompt_logprobs or ()]
    return {
        "samples": [list(one.token_ids) for one in output.outputs],
        "ids": [sorted(position) for position in positions],
        "numbers": [[position[i].logprob for i in sorted(position)] for position in positions],
        "cached": output.num_cached_tokens or 0,
    }


def interrupted(
    llm: Any, prompts: Sequence[Any], sampling: Any, name: str, arguments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the answers to prompts while method `name` of the engine is called again and again.

    The last element tells how often it succeeded: `{"calls": n}`.
    """
    llm.enqueue(prompts, sampling, use_tqdm=False)
    engine, finished, calls = llm.llm_engine, [], 0
    for number in _count_while(engine.has_unfinished_requests):
        finished += [output for output in engine.step() if output.finished]
        if number >= CALL_FIRST and (number - CALL_FIRST) % CALL_EVERY == 0:
            calls += _call(llm, name, arguments)
    finished.sort(key=lambda output: int(output.request_id))
    return [*(answer_of(output) for output in finished), {"calls": calls}]


def _count_while(is_so: Callable[[], bool]) -> Iterator[int]:
    number = 0
    while is_so():
        yield number
        number += 1


def _call(llm: Any, name: str, arguments: Mapping[str, Any]) -> bool:
    """Return True if the call succeeded. vLLM refuses it while a request loads blocks."""
    try:
        is_done = getattr(llm, name)(**arguments) is not False
    except Exception as error:
        if "Failed to reset" not in str(error):
            raise
        is_done = False
    if name == "sleep":
        llm.wake_up()
    return is_done
