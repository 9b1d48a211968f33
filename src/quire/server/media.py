"""Offloads the reading of requests that may have images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from quire.errors import InvalidRequest
from quire.frontend.offload import LARGE, offload
from quire.multimodal.inputs import MediaNeeded
from quire.server.limits import Limits

T = TypeVar("T")


async def offload_reading(size: int, limits: Limits, work: Callable[[Limits], T]) -> T:
    """The result of `work` with these limits, offloaded as work of `size` bytes.

    Where it asks for files of other servers, it is run again with them. A small body may hold an image of many pixels,
    so where images are read, all work is done in threads.
    """
    size = max(size, LARGE) if limits.images.reads else size
    try:
        return await offload(size, partial(work, replace(limits, images=limits.images.begin())))
    except MediaNeeded as needed:
        if limits.fetch_media is None:
            raise InvalidRequest("image_url: images are not fetched here", param="messages") from needed
        fetched = await limits.fetch_media(needed.urls)
    return await offload(size, partial(work, replace(limits, images=limits.images.begin(fetched))))
