"""Encoded images and those of pillow to the pixels that an encoder reads. Needs the extra `vision`: pillow, numpy."""

from __future__ import annotations

import io
import warnings
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from quire.errors import InvalidRequest, TooLarge
from quire.multimodal.processor import ImageProcessor
from quire.multimodal.refusals import invalid_image, refusal, too_large
from quire.types import PromptImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def opened(data: bytes, where: str, max_pixels: int) -> Image.Image:
    """The image in a file's bytes, the first one of an animation, turned as its camera was held.

    where: it stands in the request. Raises TooLarge for more pixels, before any is decoded, and InvalidRequest for what
    is not an image of a known format, or is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_pixels(image, where, max_pixels)
        image.load()
        return ImageOps.exif_transpose(image)
    except InvalidRequest:
        raise
    except Image.DecompressionBombError as error:
        raise _too_many(where, max_pixels) from error
    except UnidentifiedImageError as error:
        raise invalid_image(where, f"this is no image of a known format ({', '.join(FORMATS)})") from error
    # Of whatever class: pillow's decoders raise many for damaged files.
    except Exception as error:
        why = str(error).split("\n")[0][:120] or type(error).__name__
        raise invalid_image(where, f"the image is damaged: {why}") from error


def _check_pixels(image: Image.Image, where: str, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise _too_many(where, max_pixels, f"{image.width} x {image.height} pixels are ")
    if not image.width * image.height:
        raise invalid_image(where, "the image has no pixels")


def _too_many(where: str, max_pixels: int, what: str = "") -> TooLarge:
    return too_large(where, f"{what}more than the {max_pixels:,} that are read of an image: send a smaller one")


def _rgb(image: Image.Image) -> Image.Image:
    """Over white where it is transparent, as vLLM and Qwen do: what colour is hidden there is not the image's. 16 bits
    of grey become the upper 8 of them: pillow would make white of all but the darkest."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGB", image.size, "white")
    shown = image if image.mode == "RGBA" else image.convert("RGBA")
    white.paste(shown, mask=shown)
    return white


def resized(image: Any, processor: ImageProcessor, where: str, max_pixels: int) -> PromptImage:
    """An image as the encoder reads it, without its place in the prompt. Raises InvalidRequest and TooLarge."""
    if not isinstance(image, Image.Image):
        raise refusal(where, f"it must be an image of pillow, not {type(image).__name__}")
    _check_pixels(image, where, max_pixels)
    rgb = _rgb(image)
    height, width = processor.size(rgb.height, rgb.width, where)
    pixels = np.asarray(rgb.resize((width, height), resample=Image.Resampling(processor.resample))).tobytes()
    digest = blake2b(b"%d %d " % (height, width) + pixels, digest_size=16).digest()
    return PromptImage(0, processor.num_tokens(height, width), height, width, pixels, digest)
