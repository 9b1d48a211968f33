"""Errors for images, which name the place of the image in the request that the client sent."""

from __future__ import annotations

import re

from quire.errors import InvalidRequest, TooLarge

_END = re.compile(r"[.\[:]")


def refusal(where: str, why: str, code: str | None = None) -> InvalidRequest:
    """The error for an image that is not read. where: it stands in the request, such as input[0].content[1]."""
    return InvalidRequest(f"{where}: {why}", param=_END.split(where)[0], code=code)


def invalid_image(where: str, why: str) -> InvalidRequest:
    """The error for what is no image, or a damaged one."""
    return refusal(where, why, "invalid_image")


def too_large(where: str, why: str) -> TooLarge:
    """The error for an image of too many pixels or bytes."""
    return TooLarge(f"{where}: {why}", param=_END.split(where)[0], code="image_too_large")


def too_many_bytes(where: str, most: int) -> TooLarge:
    """The error for a file of too many bytes."""
    return too_large(where, f"the image's file has more than {most:,} bytes")
