"""What crosses the lower door: plain ints, so that a plan can be sent, kept, compared and replayed.

A plan fixes every shape; the device fixes every value. `Span(row, n, ...)` says "feed this row its next n tokens":
no start, no tokens, no pages. Token ids travel down once, when a row opens, and up once, when they are sampled.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.types import GREEDY, SamplingParams, TokenLogprobs

Mask = bytes | None
"""Tokens allowed at one logits row: bit t of the little-endian bit string is token t. None allows all."""

NULL_BLOCK = 0
"""The page nobody owns: an empty place in a page table points here, and it takes stray writes."""

NO_TOKEN_ALLOWED = (
    "no token is allowed here: the grammar, allowed_token_ids, bad_words and min_tokens exclude each other"
)
"""The error of a row in which every token is forbidden: the one error of a row that is its request's fault."""


class NewSequence(NamedTuple):
    """A row begins. `tokens[:start]` already have K/V in the first pages; `tokens[:prompt]` are the prompt."""

    row: int
    tokens: tuple[int, ...]
    num_computed: int
    prompt_length: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    max_length: int = 0


class Span(NamedTuple):
    """Feed `row` its next `n` tokens; sample at the last `rows` of them; keep logits of the last `logits`.

    rows = 0: a prompt chunk. rows = 1: the last chunk, or a decode. rows = 1 + k: verify k drafts.
    `logits` is `rows` unless prompt log-probabilities are wanted, then n.
    """

    row: int
    num_tokens: int
    num_samples: int
    num_logits: int


class Plan(NamedTuple):
    """One step. An executor is a fold over plans: rows are opened, extended and fed by nothing else.

    grown: (row, new pages) pairs, opened rows' prefix hits included. masked: indices of spans that must not be
    sampled before their masks arrive. drafts: by span, how many tokens to draft once it has sampled; empty: none.
    `spans` is the *same object* as the step before's when equal.
    """

    new_sequences: tuple[NewSequence, ...]
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...]
    spans: tuple[Span, ...]
    masked_spans: tuple[int, ...] = ()
    num_drafts: tuple[int, ...] = ()


class Result(NamedTuple):
    """One step's answer. tokens: per span, what was sampled (drafts accepted, then one more).

    drafts: per masked span, the drafts its row will feed next. logprobs and prompt_logprobs: by span index, only
    where asked for. pooled: by span index, vectors of prompts that end. errors: by span
    index, why that row has no further answer; its tokens are those before it had none.
    """

    tokens: list[list[int]]
    draft_tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # noqa: RUF012 - never mutated: a shared empty default
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # noqa: RUF012
    errors: dict[int, str] = {}  # noqa: RUF012
    pooled: dict[int, bytes] = {}  # noqa: RUF012
