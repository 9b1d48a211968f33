"""Feeds a model through pages as an executor would: ragged steps, chunks of prompts beside decodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.model_runner.memory import LayerShape, allocate, layer_shapes
from quire.models.registry import Model
from tests.ops.batches import Pages, poisoned

POOL = 400

MOST = 32
"""Sequences of one feeder, of which each may have a state."""

LENGTHS = (70, 41, 3, 1, 58)
"""Of prompts: some above the original context of the scaled ropes, and above every window."""


def prompts(vocab: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(vocab) for _ in range(n)] for n in LENGTHS]


class Feeder:
    """Sequences of one model in one pool, whose unwritten slots are NaN."""

    def __init__(self, model: Model, *, page_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.model = model
        self.pages = Pages(POOL, page_size, seed)
        states = layer_shapes(model.spec.kv_shapes, dtype, model.spec.state_shapes)
        self.kv = [
            replace(poisoned(POOL, heads, page_size, key, dtype, value_dim=value, index_dim=index), state=held.state)
            for (heads, key, value, index), held in zip(
                model.spec.kv_shapes, allocate(states, pages=0, page_size=1, states=MOST), strict=True
            )
        ]
        self.fed: dict[int, int] = {}

    def keep(self, layers: Sequence[LayerShape]) -> None:
        """Keep K/V as `layers` says instead."""
        self.kv = allocate(layers, pages=POOL - 1, page_size=self.pages.size)

    def step(self, spans: list[tuple[int, list[int]]]) -> list[Tensor]:
        """(sequence, its next tokens) -> logits of each token, [n, V] a span."""
        batch = self.pages.batch([(s, self.fed.get(s, 0), tokens) for s, tokens in spans], spare=1)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.kv)).float()
        self.fed |= {s: self.fed.get(s, 0) + len(tokens) for s, tokens in spans}
        return list(logits.split([len(tokens) for _, tokens in spans]))

    def prompts(self, prompts: list[list[int]], chunks: random.Random) -> list[Tensor]:
        """Feed all prompts in ragged chunks of random lengths, a random part of them a step -> [n, V] each."""
        outputs: list[list[Tensor]] = [[] for _ in prompts]
        left = {i: list(prompt) for i, prompt in enumerate(prompts)}
        while left:
            chosen = chunks.sample(sorted(left), chunks.randint(1, len(left)))
            spans = [(i, left[i][: chunks.choice((1, 7, 40))]) for i in chosen]
            for (i, tokens), logits in zip(spans, self.step(spans), strict=True):
                outputs[i].append(logits)
                left[i] = left[i][len(tokens) :]
            left = {i: tokens for i, tokens in left.items() if tokens}
        return [torch.cat(parts) for parts in outputs]

    def greedy(self, prompts: list[list[int]], count: int, *, chunked: bool = True) -> list[list[int]]:
        """The next `count` tokens of every prompt: fed raggedly in chunks, or all in one step, then decoded."""
        if chunked:
            fed = self.prompts(prompts, random.Random(count))
        else:
            fed = self.step(list(enumerate(prompts)))
        answers = [[int(rows[-1].argmax())] for rows in fed]
        for _ in range(count - 1):
            logits = self.step([(i, answer[-1:]) for i, answer in enumerate(answers)])
            for answer, rows in zip(answers, logits, strict=True):
                answer.append(int(rows[-1].argmax()))
        return answers
