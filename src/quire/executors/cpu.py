"""The local executor: plans run in this process, by the one runner, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.engine.executor import Description
from quire.model_runner.memory import LayerShape, allocate, block_bytes, layer_shapes
from quire.model_runner.row_state import RowState
from quire.model_runner.runner import Runner, RunnerStep
from quire.model_runner.sampling.sampler import Sampler
from quire.model_runner.speculative.drafters import Drafter, NoDrafts
from quire.models.base import Model
from quire.scheduler.plan import Plan


class LocalExecutor:
    """The lower door around a model and the KV pool it allocates.

    pages: of the pool, the spare one not counted. page_size: tokens a page. rows: sequences at once. max_model_len:
    longest sequence, in tokens. dtype: of K/V, unless `layers` says it for each. depth: steps worth launching ahead of
    results; 0 where launch runs the forward at once, as on a CPU. pools: as `Description`.
    """

    def __init__(
        self,
        model: Model,
        *,
        pages: int,
        page_size: int,
        rows: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        drafter: Drafter | None = None,
        depth: int = 0,
        layers: Sequence[LayerShape] | None = None,
        pools: bool = True,
    ) -> None:
        drafter = NoDrafts() if drafter is None else drafter
        layers = layer_shapes(model.spec.kv_shapes, dtype) if layers is None else layers
        vocab_size = model.spec.vocab
        self.runner = Runner(
            model,
            allocate(layers, pages=pages, page_size=page_size, device=device),
            RowState(rows, max_model_len, page_size, drafter.num_drafts),
            Sampler(vocab_size),
            drafter,
            torch.device(device),
        )
        self._description = Description(
            num_blocks=pages,
            block_size=page_size,
            num_rows=rows,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            lookahead=depth,
            num_drafts=drafter.num_drafts,
            supports_pooling=pools,
            block_bytes=block_bytes(layers, page_size),
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
        )

    def describe(self) -> Description:
        return self._description

    def launch(self, plan: Plan) -> RunnerStep:
        return self.runner.launch(plan)

    def reset(self) -> None:
        self.runner.reset()

    def close(self) -> None:
        """Let go of the K/V pool."""
        self.runner.close()
