"""Steps as the scheduler plans them and executors run them: plain ints, so that a plan can be sent, kept and replayed.

A plan fixes every shape; the device fixes every value. `Span(row, n, ...)` feeds a row its next n tokens: it names no
start, no tokens, no blocks. Token ids go to the device once, when a row is opened, and come back once, when they are
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.types import GREEDY, SamplingParams, TokenLogprobs

Mask = bytes | None
"""The tokens allowed at one row of logits: bit t of a little-endian bit string is token t. None allows all."""


NULL_BLOCK = 0
"""A block of no sequence: unused entries of block tables point to it, and stray writes go there."""

NO_TOKEN_ALLOWED = (
    "no token is allowed here: the grammar, allowed_token_ids, bad_words and min_tokens cannot be used together"
)
"""The error of a row in which every token is forbidden: the only row error that is the request's own fault."""


class ImageSpan(NamedTuple):
    """An image in a row: tokens[start : start + length] hold its place. number: of its embeddings on the device; 0:
    they are not needed, since K/V of its tokens is there. height, width: in pixels."""

    start: int
    length: int
    number: int
    height: int
    width: int


class EncodeSpan(NamedTuple):
    """Run layers first_layer to last_layer - 1 of the encoder for an image, which is loaded before its first ones."""

    number: int
    first_layer: int
    last_layer: int


class NewSequence(NamedTuple):
    """Opens a row. The first blocks already hold K/V of tokens[:num_computed]; tokens[:prompt_length] are the
    prompt. snapshot: the slot of the state after tokens[:num_computed], of a model with recurrent layers; its first
    span is in the same plan."""

    row: int
    tokens: tuple[int, ...]
    num_computed: int
    prompt_length: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    max_length: int = 0
    snapshot: int = 0
    images: tuple[ImageSpan, ...] = ()


class Span(NamedTuple):
    """Feed `row` its next `num_tokens` tokens, sample at the last `num_samples`, keep logits of the last `num_logits`.

    num_samples: 0 for a prompt chunk; 1 for the last chunk, or a decode; 1 + k to verify k drafts. num_logits:
    num_samples, or num_tokens where log-probabilities of the prompt are wanted.
    """

    row: int
    num_tokens: int
    num_samples: int
    num_logits: int


class Plan(NamedTuple):
    """One step. Only plans change an executor's rows: they open, extend and feed them.

    new_blocks: (row, blocks added) pairs, with the cached blocks of new rows. masked_spans: indices of spans that must
    not be sampled before their masks arrive. num_drafts: by span, how many tokens to draft once it has sampled; empty:
    none. `spans` is the same object as the previous step's if equal. snapshots: (index of a span, number of its tokens,
    slot from 1 on): the slot takes the state after so many of the span's tokens. No slot is written before every span
    has read the state that it goes on from. dropped_images: images whose embeddings are freed, before others are
    encoded. encode: work of the encoder, done before the spans are fed; with it there may be none.
    """

    new_sequences: tuple[NewSequence, ...]
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...]
    spans: tuple[Span, ...]
    masked_spans: tuple[int, ...] = ()
    num_drafts: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int, int], ...] = ()
    dropped_images: tuple[int, ...] = ()
    encode: tuple[EncodeSpan, ...] = ()


class Result(NamedTuple):
    """What one step computed.

    tokens: by span, the tokens sampled (accepted drafts, then one more). draft_tokens: by masked span, the drafts that
    its row feeds next. logprobs, prompt_logprobs: by span index, where asked for. pooled: by span index, vectors of
    prompts that are complete. errors: by span index, why the row cannot go on; its tokens are those before the error.
    """

    tokens: list[list[int]]
    draft_tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # noqa: RUF012 - never mutated: a shared empty default
    prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}  # noqa: RUF012
    errors: dict[int, str] = {}  # noqa: RUF012
    pooled: dict[int, bytes] = {}  # noqa: RUF012


class StepSamples(NamedTuple):
    """What stages of a pipeline before the last need of a step that the last has sampled.

    tokens: of all samples, of which those at `bad` have no answer. drafts: by span that samples, what its row feeds
    next; empty where nothing is drafted.
    """

    tokens: list[int]
    bad: list[int]
    drafts: list[list[int]]
