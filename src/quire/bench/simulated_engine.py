"""The engine of a simulated replica: the same scheduler, cache manager, step budget and delay of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.assembly.engine import build_policy, build_scheduler
from quire.assembly.limits import Limits
from quire.config import Settings
from quire.config.speculative import parse
from quire.engine.engine import Engine
from quire.engine.executor import Description
from quire.engine.timing import LatencyController, PlanDelay, VirtualClock
from quire.errors import InvalidConfig
from quire.model_runner.memory import GIB
from quire.scheduler.kv_offload import KVOffload, Offload
from quire.scheduler.kv_transfer import PrefillOffload
from quire.scheduler.step_time import StepCost
from quire.sim.copies import Role, SimulatedStore, Split
from quire.sim.executor import SimulatedExecutor
from quire.sim.shared_reads import NO_SHARING, Sharing
from quire.types import UNLIMITED

_NOT_DRAFTED = 0.7
"""The probability that a draft is right where settings do not say: what the policy assumes before it has measured."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """Builds engines of these settings. num_blocks: of K/V. cost: of steps. noise: factors of their times.

    prefixes: whether the load says which prompts begin alike; if not, nothing can be cached. stages: the cost of
    each stage of a pipeline; `cost` is their mean. hop: seconds from one to the next. block_bytes: of a K/V block.
    copies: what copies of blocks take, see `Calibration`. sharing: of reads of prefixes.
    """

    settings: Settings
    limits: Limits
    num_blocks: int
    cost: StepCost
    noise: tuple[float, ...] = ()
    prefixes: bool = True
    recurrent: bool = False
    stages: tuple[StepCost, ...] = ()
    hop: float = 0.0
    block_bytes: int = 1
    copies: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sharing: Sharing = NO_SHARING

    def __call__(
        self, clock: VirtualClock, seed: int, split: Split | None = None, role: Role = "decode"
    ) -> tuple[Engine, SimulatedExecutor]:
        """An engine on this clock, and its executor. seed: of noise and of drafts. split: that it is one side of."""
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
            seed=settings.model.fixed_seed * 1_000_003 + seed,
            stages=self.stages,
            hop=self.hop,
            sharing=self.sharing,
        )
        cached = self.prefixes or split is not None
        changed = settings if cached else settings.changed(enable_prefix_caching=False)
        target = settings.scheduler.latency_target_ms
        engine = Engine(
            build_scheduler(changed, description, limits, build_policy(settings), self._offload(clock, split, role)),
            executor,
            lookahead=limits.lookahead,
            clock=clock,
            step_budget=LatencyController(target / 1e3) if target else None,
            # An executor of several ranks is elsewhere: planning hides the way there.
            plan_delay=PlanDelay(clock) if settings.execution.num_ranks == 1 else None,
            keep=0 if role == "prefill" else UNLIMITED,
        )
        return engine, executor

    def _offload(self, clock: VirtualClock, split: Split | None, role: Role) -> Offload | None:
        """K/V tiers, if there are any. Raises InvalidConfig for a model that they do not go with."""
        cache, limits, size = self.settings.cache, self.limits, self.block_bytes
        if not (cache.kv_offloading_size and self.prefixes) and split is None:
            return None
        if self.recurrent or not cache.enable_prefix_caching:
            raise InvalidConfig(
                "K/V tiers and a split need the prefix cache, of a model without recurrent layers: leave "
                "--kv-offloading-size and --prefill-replicas out",
                param="kv_offloading_size",
            )
        longest = min(-(-limits.max_model_len // limits.block_size), self.num_blocks)
        slots = max(1, int(cache.kv_offloading_size * GIB) // size) if cache.kv_offloading_size else 2 * longest
        files = int(cache.kv_offloading_dir_size * GIB) // size if cache.kv_offloading_dir else 0
        store = SimulatedStore(clock, slots, files, size, self.copies)
        if split is None:
            return KVOffload(store, limits.block_size)
        if role == "prefill":
            return PrefillOffload(store, limits.block_size, split.server(store))
        return KVOffload(store, limits.block_size, split.client(store), split.max_slowdown)
