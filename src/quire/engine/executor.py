"""The interface of what runs steps: local torch, gRPC, ONNX Runtime, transformers, or a synthetic executor.

Plans take effect in the order launched. `launch` returns at once where it can; `StepHandle.result` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.scheduler.plan import Mask, Plan, Result
from quire.types import UNLIMITED, PromptImage


@dataclass(frozen=True, slots=True)
class Description:
    """What an executor can do. Read once, when an engine is built.

    num_blocks: KV blocks without NULL_BLOCK. block_size: tokens of a block. num_rows: sequences at once. max_model_len:
    longest sequence, in tokens. lookahead: steps to launch before earlier results (0 on a CPU, 1 on a GPU).
    max_step_tokens: most tokens of a step. num_drafts: most tokens drafted for a sequence. supports_masks: whether
    spans may be masked. supports_pooling: whether prompts become vectors. encoder_layers: of the encoder of images, 0
    where there is none; whole_images: spans must not end inside an image. block_bytes: of one block, on all
    ranks. recurrent: some layers keep states in place of K/V. bidirectional: tokens see later ones, and no prefix is
    shared.

    step_times: seconds of a decode step by (rows, drafts), measured at the start without context; empty: not measured.
    draft_catch_up_seconds: for each token that a draft model has not been fed. draft_kv_share: the draft model's K/V
    bytes, as a share of the model's. recurrent: whether layers keep states, of which `num_snapshots` can be kept for
    the prefix cache, of `state_bytes` each. static_gauges: gauges that never change, by their names in /metrics.
    start_seconds: of the stages of each rank's start, see `ops.stages`; empty without ranks.
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
    encoder_layers: int = 0
    whole_images: bool = False
    block_bytes: int = 0
    device: str = "cpu"
    dtype: str = ""
    step_times: dict[tuple[int, int], float] = field(default_factory=dict)
    draft_catch_up_seconds: float = 0.0
    draft_kv_share: float = 0.0
    recurrent: bool = False
    num_snapshots: int = 0
    state_bytes: int = 0
    bidirectional: bool = False
    static_gauges: dict[str, float] = field(default_factory=dict)
    start_seconds: list[dict[str, float]] = field(default_factory=list)


class StepHandle(Protocol):
    """One launched step."""

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """Hand in the masks of `plan.masked_spans`, in order: one for each sampled row. Called once, before
        `result`."""

    def is_done(self) -> bool:
        """Whether the device has finished the step, or it failed: `result` does not wait."""

    def result(self) -> Result:
        """Wait for the step. Raises StepFailed if it could not run; then only `Executor.reset` helps."""


class Executor(Protocol):
    """Runs plans. Results are read in the order launched."""

    def describe(self) -> Description:
        """What it can do."""

    def launch(self, plan: Plan) -> StepHandle:
        """Start one step. Its forward pass may run before its masks arrive, its sampling may not."""

    def reset(self) -> None:
        """Forget every row and every step in flight; K/V contents are lost."""

    def close(self) -> None:
        """Free everything. Called once."""


class ImageExecutor(Executor, Protocol):
    """An executor that has an encoder of images."""

    def load_image(self, number: int, image: PromptImage) -> None:
        """The pixels of an image that the next plan begins to encode. Plans name it by `number`."""
