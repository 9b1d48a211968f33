"""Every public method of `LLM`."""

from __future__ import annotations

from typing import Any

from quire import LLM, SamplingParams
from quire.types import RequestOutput, StructuredOutputsParams
from tests.surface.house import House
from tests.surface.items import Item

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=6, n=2)
LONG = "Once upon a time there was a little dog. The dog had a red ball and a blue boat. " * 4
"""More than a chunk."""

TALK = [{"role": "user", "content": "Tell me about a boat."}]


def told(outputs: list[RequestOutput]) -> Any:
    return [(one.prompt, [(c.text, c.token_ids, c.finish_reason) for c in one.outputs]) for one in outputs]


def generate(house: House) -> Any:
    llm, chosen = house.llm, StructuredOutputsParams(choice=("yes", "no"))
    how = [GREEDY, SEEDED, SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=chosen), GREEDY]
    with house.here():
        return told(llm.generate(["Once upon a time", "The little dog", "Is a dog an animal? ", LONG], how))


def chat(house: House) -> Any:
    with house.here():
        return told(house.llm.chat([TALK, [{"role": "user", "content": "Hello!"}]], GREEDY))


def stream(house: House) -> Any:
    """A long prompt's chunks bring nothing, nor do steps whose results are still on their way."""
    with house.here():
        whole = ["".join(house.llm.stream(prompt, GREEDY)) for prompt in ("Once upon a time", LONG)]
        left = house.llm.stream("The little dog", GREEDY)
        first = next(left)
        left.close()
    return whole, first


def stream_chat(house: House) -> Any:
    with house.here():
        return "".join(house.llm.stream_chat(TALK, GREEDY))


def embed(house: House) -> Any:
    with house.here():
        outputs = house.llm.embed(["a little dog", LONG], dimensions=8)
    return [round(number, 4) for one in outputs for number in one.outputs.embedding]


def reset_prefix_cache(house: House) -> Any:
    """How much of a prompt is found, before and after."""
    with house.here():
        house.llm.reset_prefix_cache()
        once = SamplingParams(temperature=0.0, max_tokens=2)
        found = [house.llm.generate(LONG, once)[0].num_cached_tokens for _ in range(2)]
        house.llm.reset_prefix_cache()
        found.append(house.llm.generate(LONG, once)[0].num_cached_tokens)
    assert found[0] == found[2] == 0 < found[1]
    return found


def close(house: House) -> Any:
    """Also when a stream is still being read, and twice."""
    house.rest()
    with house.here():
        llm = LLM(**house.options())
        first = next(llm.stream("Once upon a time", GREEDY))
        llm.close()
        with LLM(**house.options()) as another:
            return first, told(another.generate("Once upon a time", GREEDY))


METHODS = (
    Item("LLM.generate", generate, part="llm"),
    Item("LLM.chat", chat, part="llm"),
    Item("LLM.stream", stream, part="llm"),
    Item("LLM.stream_chat", stream_chat, part="llm"),
    Item("LLM.embed", embed, part="llm"),
    Item("LLM.reset_prefix_cache", reset_prefix_cache, part="llm"),
    Item("LLM.default_sampling_params", lambda house: house.llm.default_sampling_params(max_tokens=3), part="llm"),
    Item("LLM.get_tokenizer", lambda house: house.llm.get_tokenizer().encode("One day"), part="llm"),
    Item("LLM.close", close),
)
