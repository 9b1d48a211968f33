"""A model without its numbers: what its layers take, and how a pipeline's stages divide them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.layers.quantization.base import Plain
from quire.layers.stages import Pipeline, cut_layers
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.ops.reference import ReferenceOps
from quire.weights.entries import TensorEntry
from quire.weights.kv_scales import PATTERNS
from quire.weights.schemes import IGNORED_TENSORS, CheckpointFormat, choose_format, modules_of


class ModelOutline(NamedTuple):
    """What the sizes of a model follow from. config: config.json, of which `spec` was read. dtype: of plain weights.
    entries: the checkpoint's tensors, see `CheckpointFormat`."""

    config: Mapping[str, Any]
    spec: ModelSpec
    quantization: str
    dtype: torch.dtype
    entries: Mapping[str, TensorEntry]

    def build(self, parallel: ParallelGroup = ONE_RANK, *, expert_parallel: bool = False) -> ModelBuilder:
        """The builder of the model, or of a rank's part of it, that takes no memory."""
        format = choose_format(self.config, self.quantization, Plain, self.entries)
        how: dict[str, Any] = {"dtype": self.dtype, "device": torch.device("meta"), "format": format}
        build = ModelBuilder(ops=ReferenceOps(), parallel=parallel, expert_parallel=expert_parallel, **how)
        expect_tensors(build, self.entries)
        build_model(self.spec, build)
        return build

    def nbytes(self, parallel: ParallelGroup = ONE_RANK, *, expert_parallel: bool = False) -> int:
        """Bytes of the weights that `build` has."""
        return slot_bytes(self.build(parallel, expert_parallel=expert_parallel))

    def for_stage(self, pipeline: Pipeline) -> ModelSpec:
        """`spec` with the layers of a stage. Raises InvalidModel as `cut_stages` does."""
        if pipeline.stages == 1:
            return self.spec
        return replace(self.spec, stage=self.cut_stages(pipeline.stages)[pipeline.stage])

    def cut_stages(self, stages: int) -> list[range]:
        """The layers of each stage of a pipeline, by bytes of weights. Raises InvalidModel for too many stages, and for
        encoders of texts."""
        sizes, ends = self.layer_bytes()
        return cut_layers(sizes, ends, stages, self.spec.uncut)

    def layer_bytes(self) -> tuple[list[int], tuple[int, int]]:
        """Of each layer, and of what is before and behind them. Raises InvalidModel for encoders of texts."""
        if self.spec.bidirectional:
            raise InvalidModel(
                f"{self.spec.architecture} is an encoder, whose layers are not cut into stages: leave out "
                "--pipeline-parallel-size"
            )

        def size(stage: int, layers: range) -> int:
            alone = ParallelGroup()
            alone.pipeline = Pipeline(stage, 3)
            return self._replace(spec=replace(self.spec, stage=layers, ranks=1)).nbytes(alone)

        every = range(self.spec.layers)
        # What is on every stage does not matter.
        common = size(1, every[:0])
        sizes = [size(1, every[i : i + 1]) - common for i in every]
        return sizes, (size(0, every[:0]) - common, size(2, every[:0]) - common)


def slot_bytes(build: ModelBuilder) -> int:
    """Bytes of the weights that a builder has made slots for."""
    return sum(place.target.nbytes for places in build.slots.values() for place in places)


def expect_tensors(build: ModelBuilder, entries: Mapping[str, TensorEntry]) -> None:
    """Note what the checkpoint holds, and which of its tensors are not needed."""
    build.modules = modules_of(entries)
    build.ignore(*PATTERNS, *(IGNORED_TENSORS if isinstance(build.format, CheckpointFormat) else ()))
