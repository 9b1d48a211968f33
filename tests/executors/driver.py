"""Requests with known answers, and what drives an executor through them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from quire.engine.engine import Engine
from quire.executors.local import LocalExecutor
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.constraint import FREE
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.scheduler.policy import Batching, SchedulingPolicy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import GREEDY, UNLIMITED, Request, RequestStepOutput, SamplingParams
from tests.model_runner.oracle import naive
from tests.model_runner.scripted import ScriptedDrafter
from tests.model_runner.tiny import VOCAB, Tiny

MODEL = Tiny()
STOP = frozenset(range(0, VOCAB, 17))
EVEN, ODD = (sum(1 << t for t in range(parity, VOCAB, 2)).to_bytes(8, "little") for parity in (0, 1))


def alternate(output: Sequence[int]) -> bytes:
    """A grammar: odd and even tokens take turns, so a late or stale mask shows."""
    return ODD if not output or output[-1] % 2 == 0 else EVEN


class Alternate:
    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes | None]:
        said = [*output, *drafts]
        return [alternate(said[: len(output) + i]) for i in range(len(drafts) + 1)]

    def why(self) -> str:
        return ""

    def beginning(self) -> Sequence[int]:
        return ()


SAMPLING = (
    GREEDY,
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.8, top_k=5, logprobs=2),
    SamplingParams(temperature=1.5, top_p=0.7, min_tokens=6),
    SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.7),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.7, prompt_logprobs=1),
    SamplingParams(temperature=0.0, bad_words_token_ids=((3,), (7, 9)), logit_bias={4: 3.0, 11: -5.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(5, 50)), top_k=20, top_p=0.9),
)


def workload() -> list[Request]:
    """Shared prefixes and duplicates, so that pages are shared; every sampling setting, stop tokens in most."""
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(VOCAB - 1) for _ in range(n))  # noqa: E731
    shared = draw(19)
    prompts = [(shared if i % 2 else ()) + draw(rng.randrange(1, 14)) for i in range(12)] + [shared, shared]
    return [
        Request(
            id=str(i),
            prompt=prompt,
            max_new_tokens=rng.randrange(4, 16),
            stop=frozenset() if i % 3 == 0 else STOP,
            sampling=SAMPLING[i % len(SAMPLING)],
            seed=rng.randrange(-(1 << 40), 1 << 40),
            choice=i % 3,
        )
        for i, prompt in enumerate(prompts)
    ]


REQUESTS = workload()
RULED = {"1", "4", "10"}
WANT = {r.id: naive(MODEL, r, alternate if r.id in RULED else None) for r in REQUESTS}
LONGEST = max(len(r.prompt) + r.max_new_tokens for r in REQUESTS)


def scripted_drafter(depth: int) -> ScriptedDrafter | None:
    """Drafts the answers, one token in five wrong; None for no drafts."""
    texts = [[*r.prompt, *WANT[r.id]] for r in REQUESTS]
    return ScriptedDrafter(depth, texts, share=0.2, wrong=lambda _: 1) if depth else None


class Fragile(Tiny):
    """Fails when it is fed token 13."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> torch.Tensor:
        if 13 in batch.tokens.tolist():
            raise RuntimeError("a kernel failed\nwith details")
        return super().forward(batch, kv)


OPENING = Plan((NewSequence(0, (1, 2, 3), 0, 3),), ((0, (5,)),), (Span(0, 3, 1, 1),))


class Driver:
    """Scheduler and engine around an executor.

    feed: tokens of a step, and of a chunk. lookahead -1: drawn anew for each step.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        *,
        max_num_seqs: int = UNLIMITED,
        feed: tuple[int, int] = (UNLIMITED, UNLIMITED),
        lookahead: int = 0,
        reuse: bool = True,
        admit: Batching = "continuous",
        policy: type[FixedDrafts] = FixedDrafts,
    ) -> None:
        self.executor, about = executor, executor.describe()
        self.scheduler = Scheduler(
            KVCacheManager(about.num_blocks, about.block_size, make_prefix_cache(about.block_size, reuse)),
            rows=about.num_rows,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=feed[0],
            max_chunk_tokens=feed[1],
            policy=SchedulingPolicy(batching=admit),
            speculation=policy(about.num_drafts),
        )
        self.engine = Engine(self.scheduler, executor, lookahead=max(lookahead, 0))
        self.random = random.Random(7) if lookahead < 0 else None
        self.events: dict[str, list[RequestStepOutput]] = {}

    def answer(self, requests: Sequence[Request], late: Callable[[], int] = lambda: UNLIMITED) -> dict[str, list[int]]:
        """Tokens by request. late: how many requests are added before each step."""
        todo = list(requests)
        while todo or self.engine.has_pending_work:
            for request in todo[: late()]:
                self.engine.add(request, Alternate() if request.id in RULED else FREE)
                todo.remove(request)
            if self.random is not None:
                self.engine.lookahead = self.random.randrange(3)
            for event in self.engine.step():
                self.events.setdefault(event.id, []).append(event)
        return {id: [t for e in events for t in e.tokens] for id, events in self.events.items()}
