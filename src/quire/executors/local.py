"""Executors that run a model in this process: on a CPU, and with look-ahead on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from quire.engine.executor import Description
from quire.layers.quantization.mapped import Packing
from quire.layers.stages import ONE_STAGE, Pipeline
from quire.model_runner.device_steps import DeviceSteps
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.model_runner.images import ImageRunner
from quire.model_runner.lookahead_runner import NONE_LARGER, LookaheadRunner
from quire.model_runner.memory import LayerShape, allocate, block_bytes, layer_shapes, state_bytes
from quire.model_runner.pooling import PoolingHeads
from quire.model_runner.row_state import RowState
from quire.model_runner.runner import LaunchedStep, Runner
from quire.model_runner.sampling.sampler import Sampler
from quire.model_runner.speculative import Drafter, Proposer
from quire.models.registry import Model
from quire.ops.operands import VocabularyPart
from quire.scheduler.plan import Plan
from quire.types import PromptImage


class LocalExecutor:
    """A model on one device and the KV pool that is allocated for it.

    pages: blocks of the pool, not counting the null block. page_size: tokens per block. rows: sequences at once.
    max_model_len: the longest sequence, in tokens. dtype: of K/V, unless `layers` gives one per layer. depth: steps
    worth launching ahead of results; 0 where launch runs the forward at once, as on a CPU. pools: as in `Description`.
    snapshots: states of recurrent layers that are kept for the prefix cache, beside those of the rows.
    heads: what follows pooling.
    images: the encoder; None: there is none.
    pipeline: the model's stage. num_drafts: most tokens that the last stage drafts for a sequence, if this is another.
    """

    runner: Runner | LookaheadRunner
    packing: Packing | None = None
    """What packs weights behind the first answers."""

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
        snapshots: int = 0,
        heads: PoolingHeads | None = None,
        images: ImageRunner | None = None,
        pipeline: Pipeline = ONE_STAGE,
        num_drafts: int = 0,
    ) -> None:
        layers = layer_shapes(model.spec.kv_shapes, dtype, model.spec.state_shapes) if layers is None else layers
        num_drafts = num_drafts if drafter is None else drafter.num_drafts
        elsewhere = pipeline.stages > 1 and bool(model.spec.recurrent)
        recurrent = any(each.state for each in layers)
        held = RowState(rows, max_model_len, page_size, num_drafts, recurrent=recurrent)
        self.runner = Runner(
            model,
            allocate(
                layers, pages=pages, page_size=page_size, device=device, states=held.num_states + snapshots * recurrent
            ),
            held,
            Sampler(model.spec.vocab),
            drafter,
            torch.device(device),
            heads,
            images,
            pipeline,
        )
        self.images = images
        self._description = Description(
            num_blocks=pages,
            block_size=page_size,
            num_rows=rows,
            max_model_len=max_model_len,
            lookahead=depth,
            num_drafts=num_drafts,
            supports_pooling=pools,
            **facts_of(model, layers, images, page_size, snapshots, device, dtype, elsewhere),
        )

    def describe(self) -> Description:
        """What the engine needs to know of this executor."""
        return self._description

    def exit_fds(self) -> list[int]:
        """Descriptors that become readable where the model is lost, for callers that wait."""
        return [] if self.packing is None else [self.packing.exit_fd()]

    def load_image(self, number: int, image: PromptImage) -> None:
        """See `engine.executor.ImageExecutor`."""
        assert self.images is not None
        self.images.load(number, image)

    def launch(self, plan: Plan) -> LaunchedStep:
        """Start one step."""
        with nullcontext() if self.packing is None else self.packing.beside_step():
            return self.runner.launch(plan)

    def reset(self) -> None:
        """Forget every row and every step in flight."""
        self.runner.reset()

    def close(self) -> None:
        """Release the KV pool and captured graphs; the model's memory is free once nothing else refers to it."""
        if self.packing is not None:
            self.packing.stop()
        self.runner.close()


def facts_of(
    model: Model,
    layers: Sequence[LayerShape],
    images: ImageRunner | None,
    page_size: int,
    snapshots: int,
    device: torch.device | str,
    dtype: torch.dtype,
    recurrent: bool = False,
) -> dict[str, Any]:
    """What either executor's description says of its model and of what it keeps. recurrent: some layers of another
    stage are."""
    recurrent = recurrent or any(each.state for each in layers)
    encoder = images and {"encoder_layers": images.config.layers, "whole_images": images.config.whole_images}
    return {
        "vocab_size": model.spec.vocab * model.spec.token_types,
        "block_bytes": block_bytes(layers, page_size),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "recurrent": recurrent,
        "num_snapshots": snapshots * recurrent,
        "state_bytes": state_bytes(layers),
        "bidirectional": model.spec.bidirectional,
        **(encoder or {}),
    }


class CudaExecutor(LocalExecutor):
    """A model on a GPU, whose steps are launched ahead of results; tokens stay there until they are read.

    pages to dtype, layers, heads, snapshots: as `LocalExecutor`. tokens: the most that a step feeds. depth: steps
    launched ahead of results at most. steps: the kernels around the forward. queue: the order of device work, and
    whether it is captured. proposer: where drafts come from. warm: the kinds of step that are captured at the start,
    and larger, those of them that are captured later, see `WorkQueue.postpone`. paces: (rows, drafts) of the decode
    steps that are timed at the start; catch_up: a draft model's forward that is timed too. part: of the vocabulary,
    where ranks share it out.
    """

    runner: LookaheadRunner

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
        queue: WorkQueue,
        proposer: Proposer | None = None,
        depth: int = 1,
        warm: Iterable[GraphKey] = (),
        larger: Mapping[GraphKey, GraphKey] = NONE_LARGER,
        paces: Iterable[tuple[int, int]] = (),
        catch_up: GraphKey | None = None,
        heads: PoolingHeads | None = None,
        images: ImageRunner | None = None,
        snapshots: int = 0,
        layers: Sequence[LayerShape] | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        layers = layer_shapes(model.spec.kv_shapes, dtype, model.spec.state_shapes) if layers is None else layers
        num_drafts, recurrent = proposer.num_drafts if proposer else 0, any(each.state for each in layers)
        held = RowState(rows, max_model_len, page_size, num_drafts, recurrent=recurrent)
        states, bytes_per_block = held.num_states + snapshots * recurrent, block_bytes(layers, page_size)
        self.runner = LookaheadRunner(
            model,
            allocate(layers, pages=pages, page_size=page_size, device=device, states=states),
            held,
            Sampler(model.spec.vocab),
            steps,
            queue,
            proposer,
            max_tokens=tokens,
            num_slots=depth + 2,
            device=device,
            heads=heads,
            images=images,
            generates=model.spec.generates,
            near=model.spec.near,
            part=part,
        )
        self.images = images
        self.runner.precompile([*warm], larger)
        self._description = Description(
            num_blocks=pages,
            block_size=page_size,
            num_rows=rows,
            max_model_len=max_model_len,
            lookahead=depth,
            max_step_tokens=tokens,
            num_drafts=num_drafts,
            supports_pooling=True,
            **facts_of(model, layers, images, page_size, snapshots, device, dtype),
            step_times={pace: self.runner.step_seconds(*pace) for pace in paces},
            draft_kv_share=0.0 if proposer is None else proposer.block_bytes() / max(1, bytes_per_block),
            draft_catch_up_seconds=self.runner.time_keys([catch_up]) / catch_up.tokens if catch_up else 0.0,
        )

    def prepare_next(self) -> bool:
        """See `LookaheadRunner.prepare_next`."""
        return self.runner.prepare_next()
