"""How a checkpoint's images become pixels and placeholders: its processor's files, read without pillow or torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidConfig, InvalidModel, nearest
from quire.multimodal.refusals import invalid_image
from quire.types import UNLIMITED

NAMES = ("preprocessor_config.json", "processor_config.json")
"""Files of processors. The newer one has the images' in a section."""

BILINEAR, BICUBIC = 2, 3
"""Pillow's numbers of filters."""

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """What is done with the images of a family of models.

    factor: pixels along a side of a token: both sides become multiples. min_pixels, max_pixels: bounds of what an
    image is resized to. fills: every image becomes as large as max_pixels allows. changes: fields of
    `mm_processor_kwargs` that apply. side: every image becomes a square of so many pixels; 0: it keeps its proportions.
    tokens: of every image, 0 for one for each `factor` * `factor` pixels. resample: pillow's filter. mean, std, scale:
    the encoder reads (x * scale - mean) / std of each channel of a pixel. image_token: the id of a placeholder. marker,
    expansion: what the chat template writes for an image, and the text that it becomes, with one placeholder.
    """

    factor: int
    min_pixels: int = 0
    max_pixels: int = UNLIMITED
    fills: bool = False
    changes: tuple[str, ...] = ()
    side: int = 0
    tokens: int = 0
    resample: int = BICUBIC
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF
    scale: float = 1 / 255
    image_token: int
    marker: str = ""
    expansion: str = ""

    def size(self, height: int, width: int, where: str = "an image") -> tuple[int, int]:
        """The height and width that an image is resized to. Raises InvalidRequest for one that is far too narrow.

        where: it stands in the request.
        """
        if self.side:
            return self.side, self.side
        if self.fills:
            return fill_resize(height, width, self.factor, self.max_pixels)
        if max(height, width) > MOST_NARROW * min(height, width):
            raise invalid_image(
                where,
                f"{width} x {height} pixels are too narrow: an image's sides may differ by a factor of {MOST_NARROW}",
            )
        return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)

    def num_tokens(self, height: int, width: int) -> int:
        """How many tokens an image that was resized to this becomes."""
        return self.tokens or (height // self.factor) * (width // self.factor)

    @property
    def most_tokens(self) -> int:
        """The most tokens of an image."""
        return self.tokens or max(1, self.max_pixels // self.factor**2)


MOST_NARROW = 200
"""How many times as long one side of an image may be."""


def smart_resize(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Sides that are multiples of `factor`, with `low` to `high` pixels in all, nearly in proportion (Qwen2-VL)."""
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > high:
        shrink = math.sqrt(height * width / high)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < low:
        grow = math.sqrt(low / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def fill_resize(height: int, width: int, factor: int, high: int) -> tuple[int, int]:
    """The largest sides that are multiples of `factor`, with at most `high` pixels in all, nearly in proportion; of a
    narrow image one is `factor`, and the other no longer than in proportion to it (Gemma 4)."""
    grow = math.sqrt(high / (height * width))
    rows, columns = (math.floor(grow * side / factor) for side in (height, width))
    if not rows:
        rows, columns = 1, min(width // height, high // factor**2)
    elif not columns:
        rows, columns = min(height // width, high // factor**2), 1
    return rows * factor, columns * factor


def read_processor(folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> ImageProcessor:
    """The processor of a checkpoint's images. changes: `mm_processor_kwargs`.

    Raises InvalidModel where the model does not read images, or its files do not say how, InvalidConfig for a change
    that is not known.
    """
    config = _read(folder / "config.json")
    names = config.get("architectures") or [""]
    name = str(names[0]) if isinstance(names, list) else ""
    if name not in FAMILIES:
        raise InvalidModel(f"{name or 'the model'} has no encoder of images here")
    found = [_read(folder / file) for file in NAMES if (folder / file).is_file()]
    if not found:
        raise InvalidModel(f"{folder.name} has no {NAMES[0]}, which says how images are read")
    fields = found[0].get("image_processor", found[0])
    if not isinstance(fields, dict):
        raise InvalidModel(f"{folder.name}: image_processor must be an object")
    try:
        return _changed(FAMILIES[name](config, fields), changes)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidModel(f"{folder.name}: the image processor's fields are damaged: {error!r}") from error


def _changed(processor: ImageProcessor, changes: Mapping[str, Any]) -> ImageProcessor:
    known, unit, pixels = processor.changes, processor.factor**2, dict[str, Any]()
    for name, value in changes.items():
        if name not in known:
            which = ", ".join(known) or "none for this model"
            raise _refused(f"{name!r} is not supported (known: {which}).{nearest(name, known)}")
        if name == "max_soft_tokens":
            if value not in SOFT_TOKENS:
                raise _refused(f"{name} must be one of {', '.join(map(str, SOFT_TOKENS))}")
            pixels["max_pixels"] = value * unit
        elif type(value) is not int or not unit <= value < UNLIMITED:
            raise _refused(f"{name} must be a number of pixels of at least {unit}")
        else:
            pixels[name] = value
    made = replace(processor, **pixels)
    if made.min_pixels > made.max_pixels:
        raise _refused("min_pixels is above max_pixels")
    return made


def _refused(what: str) -> InvalidConfig:
    return InvalidConfig(f"mm_processor_kwargs: {what}", param="mm_processor_kwargs")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path.name}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidModel(f"{path.name} must be an object")
    return found


def _three(value: Any, default: tuple[float, float, float]) -> tuple[float, float, float]:
    """A number for each channel."""
    if value is None:
        return default
    one, two, three = map(float, value)
    return one, two, three


def _whole(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < UNLIMITED:
        raise ValueError(f"{name} must be a number above 0")
    return value


def _same(fields: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError where a step that is always done is turned off."""
    for name in names:
        if fields.get(name, True) is not True:
            raise ValueError(f"{name} must be true")


STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def _qwen(config: Mapping[str, Any], fields: Mapping[str, Any]) -> ImageProcessor:
    """Qwen2.5-VL, Qwen3-VL and Qwen3.5."""
    _same(fields, STEPS[:3])
    vision, size = config.get("vision_config") or {}, fields.get("size") or {}
    patch, merge = (_whole(fields, name, _whole(vision, own, 2)) for name, own in _SIZES)
    low = _whole(fields, "min_pixels", _whole(size, "shortest_edge", 56 * 56))
    high = _whole(fields, "max_pixels", _whole(size, "longest_edge", 28 * 28 * 1280))
    return ImageProcessor(
        factor=patch * merge,
        min_pixels=low,
        max_pixels=max(low, high),
        changes=("min_pixels", "max_pixels"),
        resample=_whole(fields, "resample", BICUBIC),
        mean=_three(fields.get("image_mean"), CLIP_MEAN),
        std=_three(fields.get("image_std"), CLIP_STD),
        scale=float(fields.get("rescale_factor", 1 / 255)),
        image_token=_whole(config, "image_token_id", 151_655),
    )


_SIZES = (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"))


def _gemma3(config: Mapping[str, Any], fields: Mapping[str, Any]) -> ImageProcessor:
    """Gemma 3: every image is a square. Without crops of it (pan and scan), as by default."""
    _same(fields, STEPS[:3])
    if fields.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan is not supported")
    size = fields.get("size") or {}
    height, width = _whole(size, "height", 224), _whole(size, "width", 224)
    if height != width:
        raise ValueError("images must be squares")
    tokens = _whole(config, "mm_tokens_per_image", 256)
    return ImageProcessor(
        factor=1,
        side=height,
        tokens=tokens,
        resample=_whole(fields, "resample", BILINEAR),
        mean=_three(fields.get("image_mean"), HALF),
        std=_three(fields.get("image_std"), HALF),
        scale=float(fields.get("rescale_factor", 1 / 255)),
        image_token=_whole(config, "image_token_index", _whole(config, "image_token_id", 262_144)),
        marker="<start_of_image>",
        expansion="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    )


SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Most tokens of an image that Gemma 4 was trained with."""


def _gemma4(config: Mapping[str, Any], fields: Mapping[str, Any]) -> ImageProcessor:
    """Gemma 4."""
    _same(fields, STEPS[:2])
    vision = config.get("vision_config") or {}
    patch = _whole(fields, "patch_size", _whole(vision, "patch_size", 16))
    merge = _whole(fields, "pooling_kernel_size", _whole(vision, "pooling_kernel_size", 3))
    most = _whole(fields, "max_soft_tokens", 280)
    # The encoder scales what the processor leaves from -1 to 1.
    normed = fields.get("do_normalize") is True
    mean, std = (_three(fields.get(name), same) if normed else same for name, same in _IDENTITY)
    return ImageProcessor(
        factor=patch * merge,
        max_pixels=most * (patch * merge) ** 2,
        fills=True,
        changes=("max_soft_tokens",),
        resample=_whole(fields, "resample", BICUBIC),
        mean=_three([low + high / 2 for low, high in zip(mean, std, strict=True)], HALF),
        std=_three([each / 2 for each in std], HALF),
        scale=float(fields.get("rescale_factor", 1 / 255)),
        image_token=_whole(config, "image_token_id", 258_880),
        marker="<|image|>",
        expansion="<|image><|image|><image|>",
    )


_IDENTITY = (("image_mean", (0.0, 0.0, 0.0)), ("image_std", (1.0, 1.0, 1.0)))

FAMILIES: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageProcessor]] = MappingProxyType(
    {
        "Qwen2_5_VLForConditionalGeneration": _qwen,
        "Qwen3VLForConditionalGeneration": _qwen,
        "Qwen3VLMoeForConditionalGeneration": _qwen,
        "Qwen3_5ForConditionalGeneration": _qwen,
        "Qwen3_5MoeForConditionalGeneration": _qwen,
        "Gemma3ForConditionalGeneration": _gemma3,
        "Gemma4ForConditionalGeneration": _gemma4,
    }
)
"""By architecture."""
