"""What a server or an LLM does with images, from settings. Needs no torch, and pillow only where images are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from quire.assembly import extra
from quire.assembly.place import place_of
from quire.config import Settings
from quire.config.multimodal import max_images, processor_changes
from quire.errors import InvalidModel
from quire.frontend.media import MediaFetcher
from quire.multimodal.inputs import Decoder, ImageInputs, ImageReader, MediaPolicy, NoImages
from quire.multimodal.processor import ImageProcessor, read_processor

NEEDS = ("PIL", "numpy")
"""Packages of the extra `vision`."""


def find_processor(settings: Settings) -> ImageProcessor | str:
    """The processor of the model's images, or why they are not read. Raises InvalidConfig."""
    kind = settings.executor.executor
    if settings.upstream.backend != "native":
        return "servers behind this one read them"
    if kind not in ("auto", "local"):
        return f"--executor {kind} reads text only: images are read with --executor local"
    try:
        folder = place_of(settings)
        processor = read_processor(folder, processor_changes(settings.multimodal.mm_processor_kwargs))
    except InvalidModel as error:
        return str(error)
    if not max_images(settings.multimodal.limit_mm_per_prompt):
        return "--limit-mm-per-prompt turns them off"
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        return f"this needs a package that is not installed ({', '.join(missing)}): pip install 'quire-llm[vision]'"
    return processor


def image_tokens(settings: Settings, processor: ImageProcessor | str) -> tuple[int, int]:
    """Tokens of the largest image, and of all whose embeddings are kept; 0 without images."""
    if isinstance(processor, str):
        return 0, 0
    return processor.most_tokens, settings.multimodal.encoder_cache_size or max(8192, processor.most_tokens)


def build_images(settings: Settings) -> ImageInputs:
    """How images of requests are read, or the refusal of them."""
    processor, media = find_processor(settings), settings.multimodal
    if isinstance(processor, str):
        return NoImages(processor)
    pixels = extra("quire.multimodal.pixels", "vision")
    folder = media.allowed_local_media_path
    policy = MediaPolicy(
        max_images=max_images(media.limit_mm_per_prompt),
        max_bytes=media.max_image_bytes,
        max_pixels=media.max_image_pixels,
        domains=media.allowed_media_domains,
        folder=None if folder is None else Path(folder).expanduser(),
    )
    return ImageReader(processor, Decoder(pixels.opened, pixels.resized), policy, settings.model.model)


def build_fetcher(settings: Settings) -> MediaFetcher:
    """What fetches images from other servers. Used from one event loop."""
    media = settings.multimodal
    return MediaFetcher(media.allowed_media_domains, media.max_image_bytes, media.image_fetch_timeout)


def fetch_now(settings: Settings) -> Callable[[Mapping[str, str]], Mapping[str, bytes]]:
    """As `MediaFetcher.fetch`, for threads: it returns when all files are there."""

    def fetch(urls: Mapping[str, str]) -> Mapping[str, bytes]:
        # In a thread of its own: the caller's may have an event loop that runs.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(_fetched(settings, urls))).result()

    return fetch


async def _fetched(settings: Settings, urls: Mapping[str, str]) -> Mapping[str, bytes]:
    return await build_fetcher(settings).fetch(urls)
