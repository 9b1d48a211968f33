"""Pixels are those of transformers' processors, and sizes those of the text model's placeholders."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from quire.errors import InvalidConfig, InvalidModel, InvalidRequest
from quire.layers.vision import VisionConfig
from quire.model_runner.images import Normalization
from quire.multimodal.pixels import opened, resized
from quire.multimodal.processor import SOFT_TOKENS, ImageProcessor, read_processor
from tests.vision import FAMILIES, make, picture, png, processor_of

MOST = 1 << 24

MODES = ("RGB", "RGBA", "L", "LA", "P", "CMYK", "1")
SIZES = ((40, 30), (9, 150), (300, 8), (8, 8), (129, 257))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ImageProcessor]:
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param)
    return request.param, read_processor(folder)


def ours(image: Image.Image, processor: ImageProcessor) -> torch.Tensor:
    """[3, H, W] as the encoder reads it."""
    made = resized(image, processor, "images[0]", MOST)
    pixels = np.frombuffer(made.pixels, np.uint8).reshape(made.height, made.width, 3)
    return torch.from_numpy(Normalization(processor.mean, processor.std, processor.scale)(pixels))


def patches(pixels: torch.Tensor, patch: int, merge: int, frames: int) -> torch.Tensor:
    """As transformers lays them out."""
    _, height, width = pixels.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = pixels.reshape(3, rows, merge, patch, columns, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
    return cut[..., None, :, :].expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(rows * columns * merge**2, -1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_pixels_are_those_of_transformers(pair: tuple[str, ImageProcessor], mode: str, size: tuple[int, int]) -> None:
    family, processor = pair
    image = picture(*size, seed=3).convert(mode)
    mine = ours(image, processor)
    read = processor_of(family)([image], return_tensors="pt")
    if family == "gemma3":
        assert (mine - read["pixel_values"][0]).abs().max() < 1e-5
        return
    if family.startswith("gemma4"):
        [count] = read["num_soft_tokens_per_image"]
        assert processor.num_tokens(*mine.shape[1:]) == int(count)
        config = VisionConfig(hidden=8, layers=1, heads=1, mlp=1, patch=4, merge=2, out=1, image_token=1)
        assert config.num_tokens(*mine.shape[1:]) == int(count)
        rows = mine.reshape(3, mine.shape[1] // 4, 4, -1, 4).permute(1, 3, 2, 4, 0).reshape(-1, 48)
        theirs = read["pixel_values"][0, : len(rows)]
        assert (rows - (2 * theirs - 1)).abs().max() < 1e-5  # the encoder does that
        return
    assert (patches(mine, 4, 2, 2) - read["pixel_values"]).abs().max() < 1e-5
    rows, columns = (read["image_grid_thw"][0, 1:] // 2).tolist()
    assert processor.num_tokens(*mine.shape[1:]) == rows * columns
    config = VisionConfig(hidden=8, layers=1, heads=1, mlp=1, patch=4, merge=2, out=1, image_token=1)
    assert config.grid(*mine.shape[1:]) == (rows, columns)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_of_each_format_are_read_and_of_an_animation_the_first_image(format: str) -> None:
    first, second = picture(20, 12, 1), picture(20, 12, 2)
    if format in ("GIF", "WEBP"):
        buffer = io.BytesIO()
        first.save(buffer, format, save_all=True, append_images=[second])
        data = buffer.getvalue()
    else:
        data = png(first, format)
    found = opened(data, "here", MOST).convert("RGB")
    difference = np.abs(np.asarray(found).astype(int) - np.asarray(first)).mean()
    assert (
        found.size == first.size and difference < np.abs(np.asarray(second).astype(int) - np.asarray(first)).mean() / 3
    )


def test_images_are_turned_as_the_camera_was_held() -> None:
    image, buffer = picture(20, 12), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(buffer, "PNG", exif=exif)
    assert opened(buffer.getvalue(), "here", MOST).size == (12, 20)


def test_the_same_pixels_have_the_same_digest_and_others_another(pair: tuple[str, ImageProcessor]) -> None:
    _, processor = pair
    one = resized(picture(20, 12), processor, "", MOST)
    assert one == resized(picture(20, 12), processor, "", MOST)
    assert one.digest != resized(picture(20, 12, 1), processor, "", MOST).digest


def saved(image: Image.Image, format: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **how)
    return buffer.getvalue()


def test_the_same_pixels_have_the_same_digest_however_they_are_encoded(pair: tuple[str, ImageProcessor]) -> None:
    _, processor = pair
    image = picture(20, 12).convert("P").convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [
        saved(image, "PNG"),
        saved(image, "PNG", compress_level=0),
        saved(image, "WEBP", lossless=True),
        saved(image.convert("RGBA"), "PNG"),
        saved(image.quantize(256), "PNG"),
        saved(image.quantize(256), "GIF"),
        saved(image.rotate(90, expand=True), "PNG", exif=exif),
    ]
    assert len({resized(opened(file, "", MOST), processor, "", MOST).digest for file in files}) == 1


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_what_is_transparent_is_white(mode: str, pair: tuple[str, ImageProcessor]) -> None:
    _, processor = pair
    whole = Image.new("RGBA", (16, 12), (0, 0, 0, 0))
    whole.paste((0, 0, 0, 255), (4, 4, 12, 8))
    shown = Image.new("RGB", whole.size, "white")
    shown.paste("black", (4, 4, 12, 8))
    if mode in ("RGBA", "LA"):
        data = saved(whole.convert(mode), "PNG")
    elif mode == "P":
        pixels = Image.fromarray(np.asarray(whole)[..., 3] // 255, "P")
        pixels.putpalette([0, 0, 0, 0, 0, 0])
        data = saved(pixels, "GIF", transparency=0)
    else:
        hidden = Image.new(mode, whole.size, 7 if mode == "L" else (7, 7, 7))
        hidden.paste(0 if mode == "L" else (0, 0, 0), (4, 4, 12, 8))
        data = saved(hidden, "PNG", transparency=7 if mode == "L" else (7, 7, 7))
    made = resized(opened(data, "", MOST), processor, "", MOST)
    assert made == resized(shown, processor, "", MOST)
    half = resized(Image.new("RGBA", (16, 12), (0, 0, 0, 128)), processor, "", MOST)
    assert set(half.pixels) == {127}


def test_sixteen_bits_of_grey_are_the_upper_eight(pair: tuple[str, ImageProcessor]) -> None:
    _, processor = pair
    grey = picture(40, 30).convert("L")
    for kind in ("<u2", ">u2"):
        deep = Image.fromarray((np.asarray(grey).astype(np.uint16) * 257).astype(kind))
        assert resized(deep, processor, "", MOST) == resized(grey, processor, "", MOST)
    read = opened(saved(deep, "PNG"), "", MOST)
    assert read.mode.startswith("I;16")
    assert resized(read, processor, "", MOST) == resized(grey, processor, "", MOST)


def qwen(folder: Path, config: dict[str, Any] | None = None, fields: dict[str, Any] | None = None) -> Path:
    whole = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"patch_size": 14}}
    (folder / "config.json").write_text(json.dumps(whole | (config or {})))
    if fields is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return folder


def test_fields_of_both_generations_of_files_are_read(tmp_path: Path) -> None:
    old = read_processor(qwen(tmp_path, fields={"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}))
    assert (old.factor, old.min_pixels, old.max_pixels, old.most_tokens) == (28, 3136, 12845056, 16384)
    (tmp_path / "preprocessor_config.json").unlink()
    section = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "image_mean": [0.5] * 3}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": section}))
    new = read_processor(tmp_path)
    assert (new.factor, new.min_pixels, new.max_pixels, new.mean) == (32, 65536, 16777216, (0.5, 0.5, 0.5))


def test_changes_are_checked(tmp_path: Path) -> None:
    folder = qwen(tmp_path, fields={})
    assert read_processor(folder, {"max_pixels": 784 * 5}).most_tokens == 5
    for changes, error in (
        ({"pixels": 5}, r"'pixels' is not supported \(known: min_pixels, max_pixels\)"),
        ({"max_pixels": 0}, "at least 784"),
        ({"max_pixels": 1.5e6}, "at least 784"),
        ({"min_pixels": 784 * 9, "max_pixels": 784}, "min_pixels is above max_pixels"),
    ):
        with pytest.raises(InvalidConfig, match=error):
            read_processor(folder, changes)


@pytest.mark.parametrize(
    ("config", "fields", "error"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "LlamaForCausalLM has no encoder of images here"),
        ({"architectures": None}, {}, "the model has no encoder"),
        (None, None, "has no preprocessor_config.json"),
        (None, {"image_processor": 5}, "image_processor must be an object"),
        (None, {"do_resize": False}, "do_resize must be true"),
        (None, {"patch_size": -3}, "patch_size must be a number above 0"),
        (None, {"image_mean": [1, 2]}, "damaged"),
        (None, {"size": 5}, "damaged"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            {"do_pan_and_scan": True},
            "do_pan_and_scan is not supported",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, {"size": {"height": 2, "width": 3}}, "squares"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(tmp_path: Path, config: Any, fields: Any, error: str) -> None:
    with pytest.raises(InvalidModel, match=error):
        read_processor(qwen(tmp_path, config, fields))


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1), (4000, 3000), (700, 13), (48, 48)])
@pytest.mark.parametrize("most", SOFT_TOKENS)
def test_sizes_of_gemma_4_are_those_of_transformers(tmp_path: Path, size: tuple[int, int], most: int) -> None:
    gemma = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}}
    processor = read_processor(qwen(tmp_path, gemma, {}), {"max_soft_tokens": most})
    assert processor.most_tokens == most
    assert processor.size(*size) == get_aspect_ratio_preserving_size(*size, 16, most * 9, 3)
    with pytest.raises(InvalidConfig, match="max_soft_tokens must be one of 70, 140, 280, 560, 1120"):
        read_processor(tmp_path, {"max_soft_tokens": most + 1})


def test_an_image_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    processor = read_processor(qwen(tmp_path, fields={}))
    with pytest.raises(InvalidRequest, match="too narrow"):
        resized(Image.new("RGB", (1000, 4)), processor, "here", MOST)
