"""Images in requests: found in messages, decoded within limits, and given their places among a prompt's tokens.

Blocking: run off the event loop. What has to be fetched first is asked for by an exception, so that no thread waits for
another server.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from quire.errors import InvalidRequest
from quire.multimodal.processor import ImageProcessor
from quire.multimodal.refusals import invalid_image, refusal, too_many_bytes
from quire.types import PromptImage

Messages = Sequence[Mapping[str, Any]]

IMAGE_PARTS = ("image_url", "image", "image_pil", "input_image")
"""Types of parts of messages that hold images."""

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<parameters>(?:;[^,;]*)*),", re.ASCII | re.IGNORECASE)

_DETAILS = ("auto", "high", "original")
"""Values of `detail` that ask for what is done anyway: images are read at the size that the checkpoint says."""


class ImagePart(dict[str, Any]):
    """A part of a chat message that another API's request became. where: the image stands in that request."""

    def __init__(self, url: Any, where: str, **fields: Any) -> None:
        super().__init__(type="image_url", image_url=url, **fields)
        self.where = where


class MediaNeeded(Exception):
    """These addresses must be fetched before the request can go on, none where its images have only to be decoded.

    urls: each with where it stands. Nothing has been changed.
    """

    def __init__(self, urls: Mapping[str, str]) -> None:
        super().__init__(", ".join(urls))
        self.urls = urls


class MediaPolicy(NamedTuple):
    """What images may be, and where they may come from.

    max_images: of a prompt. max_bytes: of a file. max_pixels: of an image before it is resized. domains: hosts that
    images are fetched from. folder: whose files may be named, if any.
    """

    max_images: int = 16
    max_bytes: int = 20 << 20
    max_pixels: int = 1 << 25
    domains: tuple[str, ...] = ()
    folder: Path | None = None


class ImageInputs(Protocol):
    """How one request's images are read."""

    @property
    def reads(self) -> bool:
        """Whether there can be any."""

    def begin(self, fetched: Mapping[str, bytes] | None = MappingProxyType({})) -> ImageInputs:
        """For one request. fetched: files by their addresses; None where images are not to be decoded yet."""

    def read(self, messages: Messages) -> tuple[Messages, tuple[PromptImage, ...]]:
        """The messages with parts of type "image" alone in place of images, and the images, in order.

        Raises InvalidRequest, and MediaNeeded.
        """

    def check_context(self, tokens: Sequence[int]) -> None:
        """Raises InvalidRequest for tokens of an earlier answer that hold the places of images."""

    def load(self, images: Sequence[Any], where: str) -> tuple[PromptImage, ...]:
        """Images of pillow, for a prompt of text. Raises InvalidRequest."""

    def marked(self, text: str, images: Sequence[PromptImage]) -> str:
        """A rendered prompt with placeholders in place of the template's marks."""

    def place(
        self, tokens: tuple[int, ...], images: Sequence[PromptImage]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """The prompt with as many placeholders as each image has tokens, and where they are. Raises InvalidRequest
        where there are not as many places as images."""


class NoImages:
    """Images are refused. why: what is missing, or who does not read them."""

    reads = False

    def __init__(self, why: str = "this server reads text only") -> None:
        self.why = why

    def begin(self, fetched: Mapping[str, bytes] | None = MappingProxyType({})) -> ImageInputs:
        """See `ImageInputs`."""
        return self

    def read(self, messages: Messages) -> tuple[Messages, tuple[PromptImage, ...]]:
        """See `ImageInputs`. Raises InvalidRequest for the first image."""
        for where, part in _parts(messages):
            if part.get("type") in IMAGE_PARTS:
                raise self._refusal(where)
        return messages, ()

    def check_context(self, tokens: Sequence[int]) -> None:
        """See `ImageInputs`."""

    def load(self, images: Sequence[Any], where: str) -> tuple[PromptImage, ...]:
        """See `ImageInputs`. Raises InvalidRequest."""
        if images:
            raise self._refusal(where)
        return ()

    def marked(self, text: str, images: Sequence[PromptImage]) -> str:
        """See `ImageInputs`."""
        return text

    def place(
        self, tokens: tuple[int, ...], images: Sequence[PromptImage]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """See `ImageInputs`."""
        return tokens, ()

    def _refusal(self, where: str) -> InvalidRequest:
        return refusal(where, f"images are not read here: {self.why}", "no_images")


class Decoder(NamedTuple):
    """`pixels.opened` and `pixels.resized`."""

    opened: Callable[[bytes, str, int], Any]
    resized: Callable[[Any, ImageProcessor, str, int], PromptImage]


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the images of a model that has an encoder. See `ImageInputs`.

    decoder: what needs pillow. model: its name, for messages. decoded: images of this request, by where they came from:
    a prompt may be rendered more than once.
    """

    processor: ImageProcessor
    decoder: Decoder
    policy: MediaPolicy
    model: str = "this model"
    fetched: Mapping[str, bytes] = field(default_factory=dict)
    decoded: dict[str, PromptImage] = field(default_factory=dict)
    decodes: bool = True

    @property
    def reads(self) -> bool:
        """See `ImageInputs`."""
        return self.policy.max_images > 0

    def begin(self, fetched: Mapping[str, bytes] | None = MappingProxyType({})) -> ImageInputs:
        """See `ImageInputs`."""
        return replace(self, fetched=fetched or {}, decoded={}, decodes=fetched is not None)

    def read(self, messages: Messages) -> tuple[Messages, tuple[PromptImage, ...]]:
        """See `ImageInputs`."""
        found = [(where, part) for where, part in _parts(messages) if part.get("type") in IMAGE_PARTS]
        if not found:
            return messages, ()
        self._check_count(len(found), found[-1][0])
        sources = [(where, source_of(part, where)) for where, part in found]
        needed = dict[str, str]()
        for where, source in sources:
            if isinstance(source, str) and self._remote(source, where) and source not in self.fetched:
                needed.setdefault(source, where)
        if needed or not self.decodes:
            raise MediaNeeded(needed)
        images = tuple(self._image(source, where) for where, source in sources)
        return [_without_sources(message) for message in messages], images

    def check_context(self, tokens: Sequence[int]) -> None:
        """See `ImageInputs`."""
        if self.processor.image_token in tokens:
            raise InvalidRequest(
                "context: it holds the places of images, and not the images: send the whole conversation to /api/chat",
                param="context",
            )

    def load(self, images: Sequence[Any], where: str) -> tuple[PromptImage, ...]:
        """See `ImageInputs`."""
        self._check_count(len(images), where)
        return tuple(self._resized(image, where) for image in images)

    def marked(self, text: str, images: Sequence[PromptImage]) -> str:
        """See `ImageInputs`."""
        own = self.processor
        return text.replace(own.marker, own.expansion) if images and own.marker else text

    def place(
        self, tokens: tuple[int, ...], images: Sequence[PromptImage]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """See `ImageInputs`."""
        if not images:
            return tokens, ()
        own = self.processor.image_token
        places = [at for at, token in enumerate(tokens) if token == own]
        if len(places) != len(images):
            raise InvalidRequest(
                f"the prompt has {len(places)} places for {len(images)} images: write one for each, as the chat "
                "template does (some show none in results of tools), and no other special tokens of images",
                param="prompt",
            )
        whole, placed, done = list[int](), list[PromptImage](), 0
        for at, image in zip(places, images, strict=True):
            whole += tokens[done:at]
            placed.append(image._replace(start=len(whole)))
            whole += [own] * image.length
            done = at + 1
        return (*whole, *tokens[done:]), tuple(placed)

    def _check_count(self, count: int, where: str) -> None:
        if count > self.policy.max_images:
            most = self.policy.max_images
            raise refusal(where, f"{count} images, and at most {most} are read in a prompt (--limit-mm-per-prompt)")

    def _remote(self, source: str, where: str) -> bool:
        """Whether a source has to be fetched. Raises InvalidRequest for one that may not be."""
        scheme = source[:8].partition(":")[0].lower()
        if scheme in ("data", "file"):
            return False
        if scheme not in ("http", "https"):
            raise refusal(where, f"the image's url must begin with data:, http: or https:, not {source[:20]!r}")
        check_domain(source, self.policy.domains, where)
        return True

    def _image(self, source: Any, where: str) -> PromptImage:
        if not isinstance(source, str):
            return self._resized(source, where)
        if source not in self.decoded:
            opened = self.decoder.opened(self._bytes(source, where), where, self.policy.max_pixels)
            self.decoded[source] = self._resized(opened, where)
        return self.decoded[source]

    def _resized(self, image: Any, where: str) -> PromptImage:
        return self.decoder.resized(image, self.processor, where, self.policy.max_pixels)

    def _bytes(self, source: str, where: str) -> bytes:
        """A file's bytes. Raises InvalidRequest and TooLarge."""
        if source in self.fetched:
            data = self.fetched[source]
        elif source[:5].lower() == "data:":
            data = read_data_url(source, where)
        else:
            data = self._local(source, where)
        if len(data) > self.policy.max_bytes:
            raise too_many_bytes(where, self.policy.max_bytes)
        return data

    def _local(self, url: str, where: str) -> bytes:
        """A file of the folder that may be named. Links are followed before it is checked."""
        folder = self.policy.folder
        if folder is None:
            raise refusal(where, "files are not read: start the server with --allowed-local-media-path")
        parts = urlsplit(url)
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder.resolve()) or not path.is_file():
                raise OSError
            with path.open("rb") as file:
                return file.read(self.policy.max_bytes + 1)
        except (OSError, ValueError) as error:
            raise refusal(where, "there is no such file in the folder that may be read") from error


def _parts(messages: Messages) -> list[tuple[str, Mapping[str, Any]]]:
    """The parts of messages that are lists, each with where it stands."""
    return [
        (getattr(part, "where", f"messages[{i}].content[{j}]"), part)
        for i, message in enumerate(messages)
        if isinstance(content := message.get("content"), list | tuple)
        for j, part in enumerate(content)
        if isinstance(part, Mapping)
    ]


def _without_sources(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    kept = [
        {"type": "image"} if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS else part for part in content
    ]
    return {**message, "content": kept}


def source_of(part: Mapping[str, Any], where: str) -> Any:
    """Where an image comes from: an address, or an image of pillow. Raises InvalidRequest naming the field."""
    kind = part["type"]
    if kind in ("image", "image_pil"):
        if part.get(kind) is None:
            raise refusal(f"{where}.{kind}", "it is required")
        return part[kind]
    given: Any = part.get("image_url")
    detail = part.get("detail")
    if isinstance(given, Mapping):
        if unknown := given.keys() - {"url", "detail"}:
            raise refusal(f"{where}.image_url", f"unknown fields: {', '.join(sorted(unknown))}")
        given, detail = given.get("url"), given.get("detail", detail)
    if detail is not None and detail not in _DETAILS:
        raise refusal(
            where,
            f"detail must be one of {', '.join(_DETAILS)}: how many pixels are read is for the server to say "
            "(--mm-processor-kwargs)",
        )
    if not isinstance(given, str) or not given:
        raise refusal(f"{where}.image_url", "a url is needed, as text")
    return given


def read_data_url(url: str, where: str) -> bytes:
    """The bytes of a data URL (RFC 2397). Raises InvalidRequest."""
    head = _DATA_URL.match(url)
    if head is None:
        raise invalid_image(where, "the data URL must look like data:image/png;base64,...")
    body = url[head.end() :]
    if ";base64" not in head["parameters"].lower():
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body.translate(SPACES), validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_image(where, f"the image is not base64: {error}") from error


SPACES: Mapping[int, None] = MappingProxyType(dict.fromkeys(map(ord, " \t\r\n")))


def check_domain(url: str, domains: Sequence[str], where: str) -> str:
    """The host of an address. Raises InvalidRequest unless it is one of `domains` or, for *.example.com, below it."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip(".").lower(), parts.port
    except ValueError as error:
        raise refusal(where, f"the image's url is damaged: {error}") from error
    allowed = any(
        host == domain or (domain.startswith("*.") and host.endswith(domain[1:])) for domain in map(str.lower, domains)
    )
    if not host or parts.username is not None or port == 0 or not allowed:
        why = "it names a user" if parts.username is not None else "--allowed-media-domains names the hosts that may be"
        raise refusal(where, f"images are not fetched from {host[:80] or 'nowhere'!r}: {why}", "media_not_allowed")
    return host
