"""Every public method of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.assembly import backend
from quire.types import RequestOutput, StructuredOutputsParams
from tests.surface.deployment import Deployment
from tests.surface.items import Item

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=6, n=2)
LONG = "Once upon a time there was a little dog. The dog had a red ball and a blue boat. " * 4
"""More than a chunk."""

TALK = [{"role": "user", "content": "Tell me about a boat."}]


def texts_of(outputs: list[RequestOutput]) -> Any:
    return [(one.prompt, [(c.text, c.token_ids, c.finish_reason) for c in one.outputs]) for one in outputs]


def generate(deployment: Deployment) -> Any:
    llm, chosen = deployment.llm, StructuredOutputsParams(choice=("yes", "no"))
    how = [GREEDY, SEEDED, SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=chosen), GREEDY]
    with deployment.here():
        return texts_of(llm.generate(["Once upon a time", "The little dog", "Is a dog an animal? ", LONG], how))


def enqueue(deployment: Deployment) -> Any:
    """Two calls that run at once, with an answer that was asked for meanwhile."""
    llm = deployment.llm
    with deployment.here():
        ids = [*llm.enqueue(["Once upon a time", LONG], GREEDY), *llm.enqueue("The little dog", SEEDED)]
        between = llm.generate("One day", GREEDY)
        outputs = llm.wait_for_completion()
    assert [one.request_id for one in outputs] == ids
    return texts_of([*between, *outputs])


def beam_search(deployment: Deployment) -> Any:
    with deployment.here():
        found = deployment.llm.beam_search(["Once upon a time", "The little dog"], BeamSearchParams(2, 6))
    return [[(one.tokens, one.finish_reason) for one in output.sequences] for output in found]


def chat(deployment: Deployment) -> Any:
    with deployment.here():
        return texts_of(deployment.llm.chat([TALK, [{"role": "user", "content": "Hello!"}]], GREEDY))


def stream(deployment: Deployment) -> Any:
    """A long prompt's chunks bring nothing, nor do steps whose results are still on their way."""
    with deployment.here():
        whole = ["".join(deployment.llm.stream(prompt, GREEDY)) for prompt in ("Once upon a time", LONG)]
        left = deployment.llm.stream("The little dog", GREEDY)
        first = next(left)
        left.close()
    return whole, first


def stream_chat(deployment: Deployment) -> Any:
    with deployment.here():
        return "".join(deployment.llm.stream_chat(TALK, GREEDY))


def stream_chat_parts(deployment: Deployment) -> Any:
    with deployment.here():
        parts = list(deployment.llm.stream_chat_parts(TALK, GREEDY))
    assert {part.kind for part in parts} == {"content"}
    return "".join(part.text for part in parts)


def embed(deployment: Deployment) -> Any:
    with deployment.here():
        outputs = deployment.llm.embed(["a little dog", LONG], dimensions=8)
    return [round(number, 4) for one in outputs for number in one.outputs.embedding]


def reset_prefix_cache(deployment: Deployment) -> Any:
    """How much of a prompt is found, before and after."""
    with deployment.here():
        deployment.llm.reset_prefix_cache()
        once = SamplingParams(temperature=0.0, max_tokens=2)
        found = [deployment.llm.generate(LONG, once)[0].num_cached_tokens for _ in range(2)]
        deployment.llm.reset_prefix_cache()
        found.append(deployment.llm.generate(LONG, once)[0].num_cached_tokens)
    assert found[0] == found[2] == 0 < found[1]
    return found


def close(deployment: Deployment) -> Any:
    """Also when a stream is still being read, and twice."""
    deployment.rest()
    with deployment.here():
        llm = LLM(**deployment.options())
        first = next(llm.stream("Once upon a time", GREEDY))
        llm.close()
        with LLM(**deployment.options()) as another:
            return first, texts_of(another.generate("Once upon a time", GREEDY))


def async_generate(deployment: Deployment) -> Any:
    """Several tasks at once, and one that is aborted before."""
    deployment.rest()
    chosen = StructuredOutputsParams(choice=("yes", "no"))
    how = [GREEDY, SEEDED, SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=chosen), GREEDY]
    prompts = ["Once upon a time", "The little dog", "Is a dog an animal? ", LONG]

    async def last(llm: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
        [found] = [one async for one in llm.generate(prompt, replace(params, output_kind="final_only"), prompt)]
        return found

    async def at_once() -> list[RequestOutput]:
        async with AsyncLLM(**deployment.options(), standby_engine=False) as llm:
            reasons = []
            async for output in llm.generate("One day", SamplingParams(temperature=0.0, max_tokens=200), "first"):
                reasons.append(output.outputs[0].finish_reason)
                await llm.abort("first")
            assert reasons[-1] == "abort"
            return await asyncio.gather(*(last(llm, *one) for one in zip(prompts, how, strict=True)))

    with pytest.MonkeyPatch.context() as patch:
        if deployment.interpreted:
            there = partial(backend.engine_process, child=deployment.module)
            patch.setattr("quire.async_llm.engine_process", there)
        return texts_of(asyncio.run(at_once()))


METHODS = (
    Item("LLM.generate", generate, part="llm"),
    Item("LLM.enqueue", enqueue, part="llm"),
    Item("LLM.beam_search", beam_search, part="llm"),
    Item("LLM.chat", chat, part="llm"),
    Item("LLM.stream", stream, part="llm"),
    Item("LLM.stream_chat", stream_chat, part="llm"),
    Item("LLM.stream_chat_parts", stream_chat_parts, part="llm"),
    Item("LLM.embed", embed, part="llm"),
    Item("LLM.reset_prefix_cache", reset_prefix_cache, part="llm"),
    Item(
        "LLM.default_sampling_params",
        lambda deployment: deployment.llm.default_sampling_params(max_tokens=3),
        part="llm",
    ),
    Item("LLM.get_tokenizer", lambda deployment: deployment.llm.get_tokenizer().encode("One day"), part="llm"),
    Item("LLM.close", close),
    Item("AsyncLLM.generate", async_generate, ci=("local", "grpc")),
)
