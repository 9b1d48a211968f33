"""An executor without weights: deterministic tokens, and time by a cost model. For scheduling and paging in
isolation."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.executor import Description
from quire.engine.timing import Clock, WallClock
from quire.scheduler.plan import Mask, Plan, Result, Span
from quire.scheduler.step_time import StepCost

FREE = StepCost()


class SyntheticHandle:
    """A step that is done at `done`, on the executor's clock."""

    __slots__ = ("clock", "done", "tokens")

    def __init__(self, clock: Clock, done: float, tokens: list[list[int]]) -> None:
        self.clock, self.done, self.tokens = clock, done, tokens

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """Not called: `describe` says that masks are not supported."""

    def is_done(self) -> bool:
        """Whether that time has come."""
        return self.clock.now() >= self.done

    def result(self) -> Result:
        """Wait for that time."""
        if self.done:
            self.clock.sleep_until(self.done)
        return Result(self.tokens, [])


class SyntheticExecutor:
    """A row's next token is a function of its prompt, seed and position, whatever the batch.

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
        tokens: list[list[int]] = []
        for row, n, rows, _ in plan.spans:
            lengths[row] = length = lengths[row] + n
            tokens.append([((state[row] + length * 2654435761) >> 7) % vocab] if rows else [])
        return SyntheticHandle(self.clock, self._finish(plan.spans), tokens)

    def _finish(self, spans: tuple[Span, ...]) -> float:
        if self.cost is FREE:
            return 0.0
        fed, kv = sum(s.num_tokens for s in spans), sum(self.lengths[s.row] for s in spans)
        self.busy_until = max(self.busy_until, self.clock.now()) + self.cost.seconds(fed, kv)
        return self.busy_until

    def reset(self) -> None:
        """Forget all rows."""
        self.state, self.lengths, self.busy_until = {}, {}, 0.0

    def close(self) -> None:
        """Forget all rows."""
        self.reset()
