"""Prompts of `LLM` and `AsyncLLM` that are pooled: read, checked and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.assembly.prompts import Prompt, PromptReader, ReadPrompt, listed
from quire.assembly.text import Text
from quire.errors import InvalidRequest
from quire.frontend.pooling import (
    check_dimensions,
    check_task,
    encode_pairs,
    encode_texts,
    kept_tokens,
    matched,
    pooling_params,
    with_prompt,
)
from quire.types import Pooling, SamplingParams

"""Text and token ids of each prompt."""

HOW: Mapping[str, Pooling] = MappingProxyType({"token_embed": "all", "classify": "classify"})
"""How what is asked for is pooled; an embedding as the model does."""


class PooledPrompts(NamedTuple):
    """Prompts as the engine takes them. pairs: how many scores they come to."""

    prompts: list[ReadPrompt]
    params: SamplingParams
    pairs: int = 0


class PoolingReader:
    """Reads prompts for one model. limit: the most tokens of one. vocab: token ids. pools: whether the executor has
    hidden states. Methods raise InvalidRequest naming the argument."""

    def __init__(self, text: Text, prompts: PromptReader, *, limit: int, vocab: int, pools: bool) -> None:
        self._text, self._prompts, self._limit, self._vocab, self._pools = text, prompts, limit, vocab, pools
        self._pooler = text.pooler

    def task(self, name: str | None) -> str:
        """The task of this name, or the model's first. Raises InvalidRequest for one that it has not."""
        task = self._pooler.tasks[0] if name is None else name
        if task not in ("embed", "token_embed", "classify", "score"):
            raise InvalidRequest(
                f"pooling_task must be one of embed, token_embed, classify, not {task!r}", param="pooling_task"
            )
        check_task(self._pooler, task, pools=self._pools)
        return task

    def texts(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: str,
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        truncate: int | None = None,
        prompt_name: str | None = None,
    ) -> PooledPrompts:
        """Prompts for a task. truncate: `truncate_prompt_tokens`."""
        check_dimensions(dimensions, self._pooler)
        how = HOW.get(task) or pooling or self._pooler.pooling
        most = kept_tokens(truncate, self._limit)
        several = listed(prompts)
        read = [self._own(one, prompt_name, most) for one in several]
        return PooledPrompts(read, pooling_params(how))

    def _own(self, prompt: Prompt, name: str | None, most: int | None) -> ReadPrompt:
        text = prompt.get("prompt") if isinstance(prompt, dict) and set(prompt) == {"prompt"} else prompt
        if isinstance(text, str):
            whole = with_prompt(text, name, self._pooler)
            [made] = encode_texts([whole], self._text.tokenizer.encode_inputs, self._pooler, self._vocab, most=most)
            return ReadPrompt(text, made.ids)
        read = self._prompts.encoded(prompt)
        if read.images:
            raise InvalidRequest("prompts with images are not pooled: send text or token ids", param="prompts")
        return ReadPrompt(read.text, read.ids[:most])

    def pairs(
        self, first: Any, second: Any, *, truncate: int | None = None, instruction: str | None = None
    ) -> PooledPrompts:
        """Pairs of texts for scores."""
        check_task(self._pooler, "score", pools=self._pools)
        one, other = ([given] if isinstance(given, str) else list(given) for given in (first, second))
        for name, texts in (("data_1", one), ("data_2", other)):
            if not all(isinstance(text, str) and text for text in texts):
                raise InvalidRequest(f"{name} must be text, or a list of texts, none of them empty", param=name)
        pairs = matched(one, other, ("data_1", "data_2"))
        encode, most = self._text.tokenizer.encode_inputs, kept_tokens(truncate, self._limit)
        if self._pooler.classes:
            render = self._render if self._pooler.by_chat else None
            made = encode_pairs(
                pairs, encode, self._pooler, self._vocab, most=most, instruction=instruction, render=render
            )
            return PooledPrompts([ReadPrompt(None, each.ids) for each in made], pooling_params("classify"), len(pairs))
        if instruction is not None:
            raise InvalidRequest("instruction is for rerankers that read one", param="instruction")
        texts = [with_prompt(text, None, self._pooler) for text in (*one, *(pair[1] for pair in pairs))]
        made = encode_texts(texts, encode, self._pooler, self._vocab, most=most)
        return PooledPrompts(
            [ReadPrompt(None, each.ids) for each in made], pooling_params(self._pooler.pooling), len(pairs)
        )

    def _render(self, query: str, document: str) -> str:
        roles = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self._prompts.rendered(roles, add_generation_prompt=False).text or ""
