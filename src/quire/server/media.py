"""Offloads the reading of requests that may have images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from quire.frontend.offload import offload, offload_slow
from quire.multimodal.inputs import MediaNeeded
from quire.multimodal.refusals import refusal
from quire.server.limits import Limits

T = TypeVar("T")


async def offload_reading(size: int, limits: Limits, work: Callable[[Limits], T]) -> T:
    """The result of `work` with these limits, offloaded as work of `size` bytes.

    Where it has images, it is run again, with the files that other servers have. A small body may hold an image of many
    pixels, which takes seconds to decode: that is done in threads that requests without images do not wait for.
    """
    try:
        return await offload(size, partial(work, replace(limits, images=limits.images.begin(None))))
    except MediaNeeded as needed:
        urls = needed.urls
    if urls and limits.fetch_media is None:
        raise refusal(next(iter(urls.values())), "images are not fetched here")
    fetched = await limits.fetch_media(urls) if urls and limits.fetch_media is not None else {}
    return await offload_slow(partial(work, replace(limits, images=limits.images.begin(fetched))))
