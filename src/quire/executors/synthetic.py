"""An executor without weights: deterministic tokens, and time by a cost model. For scheduling and paging in
isolation."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.executor import Description
from quire.engine.timing import Clock, WallClock
from quire.scheduler.plan import Mask, Plan, Result, Span
from quire.scheduler.step_time import StepCost
from quire.types import TokenLogprobs

FREE = StepCost()


class SyntheticHandle:
    """A step that is done at `done`, on the executor's clock."""

    __slots__ = ("clock", "done", "logprobs", "tokens")

    def __init__(
        self, clock: Clock, done: float, tokens: list[list[int]], logprobs: dict[int, list[TokenLogprobs]]
    ) -> None:
        self.clock, self.done, self.tokens, self.logprobs = clock, done, tokens, logprobs

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """Not called: `describe` says that masks are not supported."""

    def is_done(self) -> bool:
        """Whether that time has come."""
        return self.clock.now() >= self.done

    def result(self) -> Result:
        """Wait for that time."""
        if self.done:
            self.clock.sleep_until(self.done)
        return Result(self.tokens, [], self.logprobs)


class SyntheticExecutor:
    """A row's next token is a function of its prompt, seed and position, whatever the batch. Log-probabilities are made
    up: the token's own, and those of the tokens after it.

    Steps run one after another, as on a device. cost: seconds of a step; by default none, which leaves the engine's own
    time.
    """

    def __init__(
        self,
        *,
        pages: int = 4096,
        page_size: int = 16,
        rows: int = 64,
        max_model_len: int = 1 << 20,
        vocab_size: int = 32000,
        depth: int = 0,
        cost: StepCost = FREE,
        clock: Clock | None = None,
    ) -> None:
        self.description = Description(
            num_blocks=pages,
            block_size=page_size,
            num_rows=rows,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            lookahead=depth,
            supports_masks=False,
            device="synthetic",
        )
        self.cost = cost
        self.clock: Clock = WallClock() if clock is None else clock
        self.state: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.num_logprobs: dict[int, int | None] = {}
        self.busy_until = 0.0

    def describe(self) -> Description:
        """Its sizes."""
        return self.description

    def launch(self, plan: Plan) -> SyntheticHandle:
        """Compute the tokens, and when the step is done."""
        state, lengths, vocab = self.state, self.lengths, self.description.vocab_size
        for opened in plan.new_sequences:
            prompt = opened.tokens[: opened.prompt_length]
            state[opened.row] = hash((opened.seed, opened.choice, prompt)) & 0x7FFFFFFF
            lengths[opened.row] = opened.num_computed
            self.num_logprobs[opened.row] = opened.sampling.logprobs
        tokens: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for j, (row, n, rows, _) in enumerate(plan.spans):
            lengths[row] = length = lengths[row] + n
            token = ((state[row] + length * 2654435761) >> 7) % vocab
            tokens.append([token] if rows else [])
            if rows and (wanted := self.num_logprobs[row]) is not None:
                top = tuple(((token + i) % vocab, -1.0 - i) for i in range(wanted))
                logprobs[j] = [TokenLogprobs(token, -1.0, 1, top)]
        return SyntheticHandle(self.clock, self._finish(plan.spans), tokens, logprobs)

    def _finish(self, spans: tuple[Span, ...]) -> float:
        if self.cost is FREE:
            return 0.0
        fed, kv = sum(s.num_tokens for s in spans), sum(self.lengths[s.row] for s in spans)
        pairs = sum(s.num_tokens * (self.lengths[s.row] - (s.num_tokens - 1) / 2) for s in spans if s.num_tokens > 1)
        self.busy_until = max(self.busy_until, self.clock.now()) + self.cost.seconds(fed, kv, pairs=pairs)
        return self.busy_until

    def reset(self) -> None:
        """Forget all rows."""
        self.state, self.lengths, self.num_logprobs, self.busy_until = {}, {}, {}, 0.0

    def close(self) -> None:
        """Forget all rows."""
        self.reset()
