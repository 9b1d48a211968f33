"""A checkpoint through the whole engine and the CPU executor, and transformers' greedy answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from quire.engine.engine import Engine
from quire.executors.local import LocalExecutor
from quire.model_runner.speculative import NgramDrafter
from quire.models.registry import Model
from quire.scheduler.block_pool import EVICTION_POLICIES
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import GREEDY, Request
from tests.checkpoints import greedy
from tests.models.feeding import Feeder


def engine_of(model: Model, *, pages: int = 400, page_size: int = 16, drafts: int = 0, **settings: Any) -> Engine:
    """An engine around the CPU executor; `settings` are the scheduler's, and those of the lines below."""
    lookahead, caching = settings.pop("lookahead", 0), settings.pop("prefix_caching", True)
    eviction_policy = EVICTION_POLICIES[settings.pop("eviction_policy", "lru")]()
    executor = LocalExecutor(
        model,
        pages=pages,
        page_size=page_size,
        rows=64,
        max_model_len=512,
        dtype=torch.float32,
        drafter=NgramDrafter(drafts, shortest=1) if drafts else None,
        snapshots=24,
    )
    slots = executor.describe().num_snapshots if executor.describe().recurrent else None
    prefixes = make_prefix_cache(page_size, caching, slots)
    kv = KVCacheManager(pages, page_size, prefixes, eviction_policy, snapshot_interval=48)
    settings.setdefault("speculation", FixedDrafts(drafts))
    return Engine(Scheduler(kv, rows=64, **settings), executor, lookahead=lookahead)


class Subject:
    """One checkpoint: ours, sixteen prompts, and what answers of `new` tokens must be."""

    def __init__(self, ours: Model, theirs: PreTrainedModel, new: int = 64) -> None:
        self.ours, self.new = ours, new
        vocab, rng = ours.spec.vocab, random.Random(5)
        draw = lambda n: tuple(rng.randrange(vocab) for _ in range(n))  # noqa: E731
        shared = draw(40)
        self.prompts = [(shared if i % 3 == 0 else ()) + draw(rng.randrange(2, 60)) for i in range(15)]
        self.prompts.append(self.prompts[0])
        guesses = Feeder(ours, page_size=16).greedy([list(prompt) for prompt in self.prompts], new, chunked=False)
        asked = zip(self.prompts, guesses, strict=True)
        self.want = [tuple(greedy(theirs, prompt, new, guess)) for prompt, guess in asked]

    def engine(self, **settings: Any) -> Engine:
        """See `engine_of`."""
        return engine_of(self.ours, **settings)

    def ask(self, engine: Engine, which: Sequence[int], new: int | None = None) -> dict[int, tuple[int, ...]]:
        for i in which:
            engine.add(Request(id=str(i), prompt=self.prompts[i], max_new_tokens=new or self.new, sampling=GREEDY))
        while engine.has_pending_work:
            engine.step()
        assert engine.gauges().used_blocks == 0
        return {int(c.id): c.tokens for c in engine.completed_requests}


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: Sequence[int], new: int) -> tuple[int, ...]:
    """transformers' greedy answer, `new` tokens whatever they are."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())
