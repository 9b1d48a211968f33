"""The encoder's part of a step: images are encoded as plans say, and their embeddings put where their tokens are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import StepFailed
from quire.layers.vision import ImageState, VisionConfig, VisionTower
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.transfers import to_device
from quire.ops.ragged import ImageTokens, RaggedBatch
from quire.scheduler.plan import EncodeSpan, ImageSpan, Plan
from quire.types import PromptImage


class Normalization(NamedTuple):
    """What encoders read of a pixel x, from 0 to 255: (x * scale - mean) / std, of each channel."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """pixels [H, W, 3] -> [3, H, W]. Scaled in float64, as transformers does."""
        scaled = (pixels.astype(np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(each, dtype=np.float32) for each in (self.mean, self.std))
        return np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1))


class ImageRunner:
    """Embeddings of images on the device, by their numbers in plans.

    tower: the encoder. normalization: of pixels. Pixels are loaded before the plan that begins to encode them. embeds:
    whether this stage of a pipeline needs embeddings: others have no weights of the encoder, and only place images.
    """

    def __init__(
        self, tower: VisionTower, normalization: Normalization, device: torch.device, *, embeds: bool = True
    ) -> None:
        self.tower, self.normalization, self.device, self.embeds = tower, normalization, device, embeds
        self.loaded: dict[int, PromptImage] = {}
        self.begun: dict[int, ImageState] = {}
        self.encoded: dict[int, Sequence[Tensor]] = {}

    @property
    def config(self) -> VisionConfig:
        """The encoder's shape."""
        return self.tower.config

    def load(self, number: int, image: PromptImage) -> None:
        """The pixels of an image that the next plan begins to encode."""
        if self.embeds:
            self.loaded[number] = image

    def apply_plan(self, plan: Plan, rows: RowState) -> None:
        """Drop and encode what a plan says, and note in `rows`, to which it has been applied, how far positions behind
        images differ from those of tokens."""
        for one in plan.new_sequences:
            if one.images and self.config.multi_axis:
                rows.rope_shift[one.row] = sum(self._shift(each) for each in one.images)
        for number in plan.dropped_images:
            self.begun.pop(number, None)
            self.encoded.pop(number, None)
        for span in plan.encode if self.embeds else ():
            self._encode(span)

    def _encode(self, span: EncodeSpan) -> None:
        if not span.first_layer:
            image = self.loaded.pop(span.number)
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
            self.begun[span.number] = self.tower.begin(to_device(self.normalization(pixels), self.device))
        state = self.begun[span.number]
        self.tower.run(state, span.first_layer, span.last_layer)
        if span.last_layer == self.config.layers:
            self.encoded[span.number] = self.tower.finish(state)
            del self.begun[span.number]

    def place(self, batch: RaggedBatch, rows: RowState, shape: StepShape, begins: Mapping[int, int]) -> RaggedBatch:
        """The batch of a step with the images of its rows: embeddings, positions, and what their tokens see.

        begins: where spans begin that may feed tokens of images, or that have positions which the batch does not have
        yet, by span. Raises StepFailed where an image's embeddings are missing.
        """
        if not begins:
            return batch
        tokens, parts = list[npt.NDArray[np.int64]](), list[list[Tensor]]()
        last = np.zeros(len(batch.tokens), np.int64)
        for s, begin in begins.items():
            row, start = shape.spans[s].row, int(shape.query_start[s])
            end = begin + shape.spans[s].num_tokens
            for image in rows.images[row]:
                low, high = max(begin, image.start), min(end, image.start + image.length)
                if low >= high:
                    continue
                at = np.arange(start + low - begin, start + high - begin)
                tokens.append(at)
                parts.append(self._features(image, low - image.start, high - image.start))
                last[at] = image.start + image.length - 1
        placed = replace(batch, rope_positions=self._positions(batch, rows, shape, begins))
        if not tokens:
            return placed
        whole = [torch.cat(each) for each in zip(*parts, strict=True)]
        return replace(
            placed,
            images=ImageTokens(to_device(np.concatenate(tokens), self.device), whole[0], whole[1:]),
            last_visible=to_device(last, self.device) if self.config.whole_images else None,
        )

    def encode_padding(self) -> None:
        """Encode an image of zeros, so that what that launches is compiled."""
        if not self.embeds:
            return
        side = self.config.patch * (round(self.config.positions**0.5) if self.config.pooled else self.config.merge * 8)
        state = self.tower.begin(torch.zeros(3, side, side, device=self.device))
        self.tower.run(state, 0, self.config.layers)
        self.tower.finish(state)

    def place_padding(self, batch: RaggedBatch) -> RaggedBatch:
        """A batch whose first token holds the place of an image of zeros, as `encode_padding`."""
        zeros = torch.zeros(1, self.config.out, device=self.device)
        first, text = torch.zeros(1, dtype=torch.int64, device=self.device), batch.rope_positions
        return replace(
            batch,
            images=ImageTokens(first, zeros, [zeros] * len(self.config.feature_layers)),
            rope_positions=None if text is None else text.repeat(3, 1),
            last_visible=torch.zeros_like(batch.positions) if self.config.whole_images else None,
        )

    def _features(self, image: ImageSpan, low: int, high: int) -> list[Tensor]:
        if not self.embeds:
            return [torch.empty(high - low, 0, device=self.device)]
        found = self.encoded.get(image.number)
        if found is None:
            raise StepFailed(f"the embeddings of image {image.number} are not there")
        return [each[low:high] for each in found]

    def _positions(
        self, batch: RaggedBatch, rows: RowState, shape: StepShape, begins: Mapping[int, int]
    ) -> Tensor | None:
        """[3, T] positions of a step, for text models that have several."""
        if not self.config.multi_axis:
            return batch.rope_positions
        at, places = list[npt.NDArray[np.int64]](), list[npt.NDArray[np.int64]]()
        for s, begin in begins.items():
            start, n = int(shape.query_start[s]), shape.spans[s].num_tokens
            at.append(np.arange(start, start + n))
            images = rows.images[shape.spans[s].row]
            places.append(axis_positions(images, np.arange(begin, begin + n), self.config))
        text = batch.positions[None] if batch.rope_positions is None else batch.rope_positions
        own = to_device(np.concatenate(places, 1), self.device)
        return text.repeat(3, 1).index_copy_(1, to_device(np.concatenate(at), self.device), own)

    def _shift(self, image: ImageSpan) -> int:
        """How far positions behind an image differ from those of tokens, for it alone."""
        return max(self.config.grid(image.height, image.width)) - image.length

    def reset(self) -> None:
        """Forget every image."""
        self.loaded.clear()
        self.begun.clear()
        self.encoded.clear()


def axis_positions(images: Sequence[ImageSpan], at: Ints, config: VisionConfig) -> npt.NDArray[np.int64]:
    """Positions [3, n], in time, height and width, of the tokens at positions `at` [n] of a prompt with images.

    An image takes as many positions as its longer side has tokens (Wang et al. 2024, Qwen2-VL): its tokens have its
    first one in time, and their row and column on from there. What follows goes on behind it, so that after the prompt
    a row's positions differ from its tokens' by one number.
    """
    positions = np.repeat(at.astype(np.int64)[None], 3, 0)
    shift = 0
    for image in images:
        rows, columns = config.grid(image.height, image.width)
        inside = (at >= image.start) & (at < image.start + image.length)
        offset = at[inside] - image.start
        first = image.start + shift
        positions[:, inside] = first + np.stack((np.zeros_like(offset), offset // columns, offset % columns))
        shift += max(rows, columns) - image.length
        after = at >= image.start + image.length
        positions[:, after] = at[after] + shift
    return positions
