"""THE LOWER DOOR: what can run steps. Local torch, tensor-parallel, gRPC, ONNX Runtime, synthetic: all are this.

An executor folds plans, in the order launched. `launch` returns at once where it can; `Handle.result` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.scheduler.plan import Mask, Plan, Result
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True)
class Description:
    """What an executor can do. Read once, by the composition root.

    pages: pages it has, page 0 (which is nobody's) not counted. page_size: tokens a page. rows: sequences at once.
    max_model_len: longest sequence, in tokens. depth: steps to launch ahead of results (0 on a CPU, 1 on a GPU).
    tokens: the most a step may feed. drafts: tokens drafted a step. pools: whether prompts become vectors. masks:
    whether spans may be masked. kv_bytes: of one page, all layers.
    paces: seconds of a decode step by (rows, drafts), as measured at the start with no context; empty: not measured.
    catch_up: seconds a token that a draft model has not been fed takes it. draft_kv: its K/V bytes, as a share of the
    model's.
    facts: gauges that stay as they are, by the names they have in /metrics.
    """

    num_blocks: int
    block_size: int
    num_rows: int
    max_model_len: int
    vocab_size: int
    lookahead: int = 0
    max_step_tokens: int = UNLIMITED
    num_drafts: int = 0
    supports_masks: bool = True
    supports_pooling: bool = False
    block_bytes: int = 0
    device: str = "cpu"
    dtype: str = ""
    step_times: dict[tuple[int, int], float] = field(default_factory=dict)
    draft_catch_up_seconds: float = 0.0
    draft_kv_share: float = 0.0
    static_gauges: dict[str, float] = field(default_factory=dict)


class StepHandle(Protocol):
    """One launched step."""

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """Hand in the masks of `plan.masked`, in order: one mask per sampled row. Called once, before `result`."""

    def is_done(self) -> bool:
        """Whether the device is through with the step, or it failed: `result` has nothing to wait for."""

    def result(self) -> Result:
        """Wait for the step. Raises StepFailed if it could not be run; then only `Executor.reset` helps."""


class Executor(Protocol):
    """Runs plans. Results are read in the order launched."""

    def describe(self) -> Description: ...

    def launch(self, plan: Plan) -> StepHandle:
        """Start one step. Its forward may run before its masks are there, its sampling may not."""

    def reset(self) -> None:
        """Forget every row and every step in flight; K/V contents are lost."""

    def close(self) -> None:
        """Give everything back. Called once."""
