"""Reading requests with images is kept away from the threads that other requests are read in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from quire.multimodal.inputs import Decoder, ImageReader, MediaPolicy
from quire.multimodal.pixels import resized
from quire.multimodal.processor import ImageProcessor
from quire.server.limits import Limits
from quire.server.media import offload_reading
from tests.vision import picture

pytestmark = pytest.mark.anyio

PROCESSOR = ImageProcessor(factor=8, max_pixels=64 * 12, image_token=7)
TALK = [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,image"}]}]


def limits_of(opened: Callable[[bytes, str, int], Any]) -> Limits:
    return Limits(images=ImageReader(PROCESSOR, Decoder(opened, resized), MediaPolicy()))


def images_of(limits: Limits) -> int:
    return len(limits.images.read(TALK)[1])


async def test_requests_without_images_do_not_wait_for_those_that_are_decoded() -> None:
    may_go = threading.Event()

    def slowly(data: bytes, where: str, most: int) -> Image.Image:
        may_go.wait()
        return picture(30, 20)

    limits = limits_of(slowly)
    with_images = [asyncio.create_task(offload_reading(size, limits, images_of)) for size in (1, 1 << 20) * 16]
    try:
        for size in (1, 1 << 20):
            # The limit is there for a test that fails, or else it would never end.
            answer = await asyncio.wait_for(offload_reading(size, limits, lambda limits: "text"), 300)
            assert answer == "text" and not any(task.done() for task in with_images)
    finally:
        may_go.set()
    assert await asyncio.gather(*with_images) == [1] * 32


async def test_images_are_decoded_once_and_never_on_the_event_loop() -> None:
    threads = list[int]()

    def noted(data: bytes, where: str, most: int) -> Image.Image:
        threads.append(threading.get_ident())
        return picture(30, 20)

    assert await offload_reading(1, limits_of(noted), images_of) == 1
    assert len(threads) == 1 and threads[0] != threading.get_ident()
