"""The local executor: plans run in this process, by the one runner, on one device.

The executor of a device that is run ahead of: whole steps as graphs, tokens stay there, results come home later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from quire.engine.executor import Description
from quire.model_runner.device_steps import DeviceSteps
from quire.model_runner.graphs import GraphKey, Queue
from quire.model_runner.lookahead_runner import LookaheadRunner, LookaheadStep
from quire.model_runner.memory import LayerShape, allocate, block_bytes, layer_shapes
from quire.model_runner.row_state import RowState
from quire.model_runner.runner import Runner, RunnerStep
from quire.model_runner.sampling.sampler import Sampler
from quire.model_runner.speculative import Drafter, NoDrafts, NoProposer, Proposer
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


class CudaExecutor:
    """The lower door around a model on a GPU and the KV pool it allocates there.

    pages, page_size, rows, max_model_len, dtype: as `LocalExecutor`. tokens: the most a step feeds. depth: steps
    launched ahead of results at most. steps: the kernels around the forward. queue: the order of device work, and
    whether it is captured. proposer: where drafts come from. warm: the kinds of step to be ready for at once.
    paces: (rows, drafts) of the decode steps whose time is taken at the start; catch_up: what a draft model
    does to catch up, likewise.
    """

    def __init__(
        self,
        model: Model,
        *,
        pages: int,
        page_size: int,
        rows: int,
        max_model_len: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        steps: DeviceSteps,
        queue: Queue,
        proposer: Proposer | None = None,
        depth: int = 1,
        warm: Iterable[GraphKey] = (),
        paces: Iterable[tuple[int, int]] = (),
        catch_up: GraphKey | None = None,
    ) -> None:
        proposer = NoProposer() if proposer is None else proposer
        layers = layer_shapes(model.spec.kv_shapes, dtype)
        vocab_size = model.spec.vocab
        self.runner = LookaheadRunner(
            model,
            allocate(layers, pages=pages, page_size=page_size, device=device),
            RowState(rows, max_model_len, page_size, proposer.num_drafts),
            Sampler(vocab_size),
            steps,
            queue,
            proposer,
            max_tokens=tokens,
            num_slots=depth + 2,
            device=device,
        )
        self.runner.precompile(list(warm))
        self._description = Description(
            num_blocks=pages,
            block_size=page_size,
            num_rows=rows,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            lookahead=depth,
            max_step_tokens=tokens,
            num_drafts=proposer.num_drafts,
            supports_pooling=True,
            block_bytes=block_bytes(layers, page_size),
            step_times={(rows, drafts): self.runner.step_seconds(rows, drafts) for rows, drafts in paces},
            draft_kv_share=proposer.block_bytes() / max(1, block_bytes(layers, page_size)),
            draft_catch_up_seconds=self.runner.time_keys([catch_up]) / catch_up.tokens if catch_up else 0.0,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
        )

    def describe(self) -> Description:
        return self._description

    def launch(self, plan: Plan) -> LookaheadStep:
        return self.runner.launch(plan)

    def reset(self) -> None:
        self.runner.reset()

    def close(self) -> None:
        """Let go of the model and the pool: their memory is free once nobody else holds them."""
        self.runner.close()
