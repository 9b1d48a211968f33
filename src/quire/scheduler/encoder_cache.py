"""The encoder's work and the embeddings that it leaves on the device, counted in image tokens.

As K/V does, embeddings belong to contents: images of the same digest are encoded once, and kept until their space is
needed. An image's layers may be spread over several steps, so that decoding never waits for more than a step's share.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.scheduler.plan import EncodeSpan
from quire.types import UNLIMITED, PromptImage, Request


@dataclass(eq=False, slots=True)
class EncodedImage:
    """An image that sequences with a row need, or whose embeddings the device has.

    image: where its pixels are. layers: of the encoder, done so far. is_resident: whether it takes space. num_users:
    sequences that have yet to feed it. used_at: the plan that last needed it.
    """

    image: PromptImage
    number: int
    layers: int = 0
    is_resident: bool = False
    num_users: int = 0
    used_at: int = -1


class PendingImage(NamedTuple):
    """An image that a sequence has yet to feed, up to `end`."""

    start: int
    end: int
    image: EncodedImage


class ImageUser(Protocol):
    """What is read of a `Sequence` here."""

    request: Request
    num_computed: int
    pending_images: list[PendingImage]


class EncoderCache:
    """capacity: image tokens whose embeddings the device has room for. max_tokens: image tokens that a step encodes, an
    image's share by layers. num_layers: of the encoder. whole_images: spans must not end inside an image, because its
    tokens attend to later ones of it.
    """

    def __init__(
        self,
        capacity: int = UNLIMITED,
        max_tokens: int = UNLIMITED,
        num_layers: int = 1,
        *,
        whole_images: bool = False,
    ) -> None:
        self.capacity, self.max_tokens, self.num_layers = capacity, max_tokens, num_layers
        self.whole_images = whole_images
        self.images: OrderedDict[bytes, EncodedImage] = OrderedDict()
        """By digest, those used least recently first."""
        self.users: dict[int, ImageUser] = {}
        """Sequences with pending images, by identity."""
        self.num_used = 0
        """Image tokens of all resident images."""
        self.num_numbers = 0
        self.num_queried = self.num_hits = self.num_encoded = 0
        """Images looked up, those of them that were there, and images whose encoding was completed."""
        self._plan = 0
        self._work_left = 0
        self._dropped: list[int] = []
        self._encode: list[EncodeSpan] = []

    def open(self, seq: ImageUser) -> None:
        """A sequence gets a row: note the images that it has yet to feed."""
        for each in seq.request.images:
            if each.end <= seq.num_computed:
                continue
            found = self.images.get(each.digest)
            if found is None:
                self.num_numbers += 1
                found = self.images[each.digest] = EncodedImage(each, self.num_numbers)
            found.num_users += 1
            self.num_queried += 1
            self.num_hits += found.is_resident
            seq.pending_images.append(PendingImage(each.start, each.end, found))
        if seq.pending_images:
            self.users[id(seq)] = seq

    def close(self, seq: ImageUser) -> None:
        """A sequence loses its row."""
        self._feed(seq, UNLIMITED)

    def begin_plan(self) -> None:
        """A plan begins."""
        self._plan += 1
        self._work_left = self.max_tokens * self.num_layers
        self._dropped, self._encode = [], []

    def work(self) -> tuple[tuple[int, ...], tuple[EncodeSpan, ...]]:
        """(dropped_images, encode) of the plan."""
        return tuple(self._dropped), tuple(self._encode)

    def limit(self, seq: ImageUser, begin: int, num_tokens: int) -> int:
        """How many of the `num_tokens` tokens from `begin` on can be fed: those before the first image that is not
        encoded by then. Plans the encoding of images in that range, as far as this step's share goes. What is before
        `begin` has been fed."""
        self._feed(seq, begin)
        end = begin + num_tokens
        for pending in seq.pending_images:
            if pending.start >= end:
                break
            if not self._encoded(pending.image):
                end = max(begin, pending.start)
            elif self.whole_images and end < pending.end:
                end = pending.start if pending.start > begin else pending.end
        return end - begin

    def _feed(self, seq: ImageUser, end: int) -> None:
        """A sequence has fed its tokens up to `end`."""
        pending = seq.pending_images
        while pending and pending[0].end <= end:
            image = pending.pop(0).image
            image.num_users -= 1
            if not image.num_users and not image.is_resident:
                del self.images[image.image.digest]
        if not pending:
            self.users.pop(id(seq), None)

    def _encoded(self, image: EncodedImage) -> bool:
        """Whether its embeddings are there in this step. Encodes more of it where they are not."""
        image.used_at = self._plan
        self.images.move_to_end(image.image.digest)
        left, length = self.num_layers - image.layers, image.image.length
        # A step's first image advances by a layer, however large it is.
        layers = min(left, max(self._work_left // length, 0 if self._encode else 1))
        if layers and (image.is_resident or self._make_room(length)):
            self.num_used += 0 if image.is_resident else length
            image.is_resident = True
            self._encode.append(EncodeSpan(image.number, image.layers, image.layers + layers))
            image.layers += layers
            self._work_left -= layers * length
            self.num_encoded += image.layers == self.num_layers
        return image.layers == self.num_layers

    def _make_room(self, length: int) -> bool:
        """Drop images until `length` tokens fit: the least recently used that no sequence feeds next."""
        if self.num_used + length <= self.capacity:
            return True
        kept = {id(seq.pending_images[0].image) for seq in self.users.values()}
        for image in list(self.images.values()):
            if image.is_resident and image.used_at != self._plan and id(image) not in kept:
                self._drop(image)
                if self.num_used + length <= self.capacity:
                    return True
        return False

    def _drop(self, image: EncodedImage) -> None:
        self._dropped.append(image.number)
        self.num_used -= image.image.length
        image.is_resident, image.layers = False, 0
        if not image.num_users:
            del self.images[image.image.digest]

    def pixels(self, number: int) -> PromptImage:
        """The image of a number that a plan encodes."""
        return next(each.image for each in reversed(self.images.values()) if each.number == number)

    def reset(self) -> None:
        """The device lost all embeddings. No sequence has a row."""
        self.images.clear()
        self.users.clear()
        self.num_used = 0
