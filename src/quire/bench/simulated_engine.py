"""The engine of a simulated replica: the same scheduler, cache manager, step budget and delay of plans."""

from __future__ import annotations

from dataclasses import dataclass

from quire.assembly.engine import build_policy, build_scheduler
from quire.assembly.limits import Limits
from quire.config import Settings
from quire.config.speculative import parse
from quire.engine.engine import Engine
from quire.engine.executor import Description
from quire.engine.timing import LatencyController, PlanDelay, VirtualClock
from quire.scheduler.step_time import StepCost
from quire.sim.executor import SimulatedExecutor
from quire.types import UNLIMITED

_NOT_DRAFTED = 0.7
"""The probability that a draft is right where settings do not say: what the policy assumes before it has measured."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """Builds engines of these settings. num_blocks: of K/V. cost: of steps. noise: factors of their times.

    prefixes: whether the load says which prompts begin alike; if not, nothing can be cached.
    """

    settings: Settings
    limits: Limits
    num_blocks: int
    cost: StepCost
    noise: tuple[float, ...] = ()
    prefixes: bool = True
    recurrent: bool = False

    def __call__(self, clock: VirtualClock, seed: int) -> tuple[Engine, SimulatedExecutor]:
        """An engine on this clock, and its executor. seed: of noise and of drafts."""
        settings, limits = self.settings, self.limits
        speculative = parse(settings.scheduler.speculative_config)
        description = Description(
            num_blocks=self.num_blocks,
            block_size=limits.block_size,
            num_rows=limits.num_rows,
            max_model_len=limits.max_model_len,
            vocab_size=(1 << 31) - 1,
            lookahead=limits.lookahead,
            num_drafts=0 if speculative is None else speculative.num_speculative_tokens,
            supports_masks=False,
            device="simulated",
            recurrent=self.recurrent,
        )
        accepted = None if speculative is None else speculative.draft_acceptance()
        executor = SimulatedExecutor(
            description,
            self.cost,
            clock,
            acceptance=_NOT_DRAFTED if accepted is None else accepted,
            noise=self.noise,
            seed=settings.model.seed * 1_000_003 + seed,
        )
        changed = settings if self.prefixes else settings.changed(enable_prefix_caching=False)
        target = settings.scheduler.latency_target_ms
        engine = Engine(
            build_scheduler(changed, description, limits, build_policy(settings)),
            executor,
            lookahead=limits.lookahead,
            clock=clock,
            step_budget=LatencyController(target / 1e3) if target else None,
            plan_delay=PlanDelay(clock),
            keep=UNLIMITED,
        )
        return engine, executor
