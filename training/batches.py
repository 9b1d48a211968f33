"""From text to the rows of one epoch, and from rows to batches.

A row is what the engine will see at serving time: one document or one conversation that starts at position
0. Rows of like length share a batch, so there is next to no padding and no document attends to another,
except in the rows that join several stories on purpose: text that runs on past the end of one is served too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from training.data import Corpus, Message, normalise
from training.requests import Lexicon, Noun, Request, StoryFacts, draw_request, facts_of, first_mention
from training.tokenizer import ASSISTANT, ROLE_TOKENS, SYSTEM, USER, Codec

IGNORE = -100
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a storyteller for small children.",
    "You tell short stories in simple words.",
    "Answer the user's request with a story.",
)


@dataclass
class Row:
    """Tokens, and for each how much its prediction weighs in the loss."""

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def extend(self, tokens: list[int], weight: float) -> None:
        self.tokens += tokens
        self.weights += [weight] * len(tokens)


@dataclass
class Batch:
    """Equally long rows: inputs, targets with IGNORE where nothing is to be predicted, and weights."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]


@dataclass
class Reply:
    """A story as the answer of a chat turn."""

    tokens: list[int]
    facts: StoryFacts
    mentions: dict[str, list[int]]
    """For each noun the tokens that mention it first."""
    request: str | None
    """The request that the chat file itself had for this story."""


@dataclass
class RowMaker:
    """Encodes a corpus once, then draws the rows of an epoch from it as often as wanted."""

    codec: Codec
    corpus: Corpus
    lexicon: Lexicon
    context: int = 2048
    reply_tokens: int = 260
    """Longer stories are no replies: an answer should end within 300 tokens."""
    plain_share: float = 0.35
    """The part of the replies that each epoch also shows as plain text."""
    chat_rounds: int = 2
    """How often an epoch shows each reply, every time under another request."""
    noun_weight: float = 10.0
    """The weight in the loss of the tokens by which a story brings in a noun it was asked for.

    A story mentions a requested noun for the first time once in its two hundred tokens, so plain likelihood
    hardly pays for it and the model forgets the second noun; this is what makes it follow requests.
    """
    synthetic: list[list[Message]] = field(default_factory=list)
    """Further conversations, learned as they are; see generate.py."""

    def __post_init__(self) -> None:
        self.stories = self.codec.encode_all(self.corpus.stories)
        self.tales = self.codec.encode_all(self.corpus.tales)
        texts = {normalise(story): story for story in self.corpus.stories}
        requests: dict[str, str | None] = dict.fromkeys(texts)
        self.conversations = [*self.synthetic]
        for chat in self.corpus.chats:
            if [m["role"] for m in chat] == ["user", "assistant"]:
                key = normalise(chat[1]["content"])
                texts.setdefault(key, chat[1]["content"])
                requests[key] = chat[0]["content"]
            else:
                self.conversations.append(chat)
        encoded = self.codec.tokenizer.encode_batch(list(texts.values()))
        self.replies: list[Reply] = []
        for (key, text), encoding in zip(texts.items(), encoded, strict=True):
            if len(encoding.ids) <= self.reply_tokens:
                facts = facts_of(text, self.lexicon, len(texts))
                found = {n.word: tokens_of(first_mention(text, n.word), encoding.offsets) for n in facts.nouns}
                self.replies.append(Reply(list(encoding.ids), facts, found, requests[key]))

    def turn(self, request: list[int], reply: Reply, nouns: list[Noun]) -> Row:
        """One request and its answer; only the answer is to be predicted."""
        row = Row()
        row.extend([self.codec.id_of(USER), *request, self.codec.end, self.codec.id_of(ASSISTANT)], 0.0)
        start = len(row.tokens)
        row.extend([*reply.tokens, self.codec.end], 1.0)
        for noun in nouns:
            for index in reply.mentions[noun.word]:
                row.weights[start + index] = self.noun_weight
        return row

    def chat_rows(self, rng: random.Random) -> list[Row]:
        """Every reply under a request drawn afresh, or one time in ten under the chat file's own."""
        asked: list[tuple[Request, Reply]] = []
        for reply in self.replies:
            request = draw_request(reply.facts, rng)
            if reply.request is not None and (request is None or rng.random() < 0.1):
                request = Request(reply.request, [])
            if request is not None:
                asked.append((request, reply))
        texts = self.codec.encode_all([request.text for request, _ in asked])
        turns = [self.turn(t, reply, r.nouns) for t, (r, reply) in zip(texts, asked, strict=True)]
        return self.join_turns(turns, rng)

    def join_turns(self, turns: list[Row], rng: random.Random) -> list[Row]:
        """Some turns follow each other in one conversation, and some have a system message before them."""
        rng.shuffle(turns)
        rows: list[Row] = []
        for turn in turns:
            if rows and rng.random() < 0.15 and len(rows[-1].tokens) + len(turn.tokens) < self.context:
                rows[-1].tokens += turn.tokens
                rows[-1].weights += turn.weights
                continue
            row = Row()
            if rng.random() < 0.1:
                words = self.codec.encode(rng.choice(SYSTEM_MESSAGES))
                row.extend([self.codec.id_of(SYSTEM), *words, self.codec.end], 0.0)
            rows.append(Row(row.tokens + turn.tokens, row.weights + turn.weights))
        return rows

    def conversation_rows(self) -> list[Row]:
        """Conversations as they are, with every answer to be predicted."""
        contents = self.codec.encode_all([m["content"] for chat in self.conversations for m in chat])
        rows, at = [], 0
        for chat in self.conversations:
            row = Row()
            for message in chat:
                row.extend([self.codec.id_of(ROLE_TOKENS[message["role"]])], 0.0)
                row.extend([*contents[at], self.codec.end], float(message["role"] == "assistant"))
                at += 1
            rows.append(Row(row.tokens[: self.context], row.weights[: self.context]))
        return rows

    def plain_rows(self, documents: list[list[int]], rng: random.Random) -> list[Row]:
        """Documents as text, cut to the context at random places, a quarter of them joined to the one before.

        Half the rows start with the end-of-text token: a text must be continued well with and without it.
        """
        end = self.codec.end_of_text
        rows: list[Row] = []
        for document in rng.sample(documents, len(documents)):
            tokens = [*document, end]
            if rows and rng.random() < 0.25 and len(rows[-1].tokens) + len(tokens) <= self.context:
                rows[-1].extend(tokens, 1.0)
                continue
            lead = [end] if rng.random() < 0.5 else []
            first = self.context - 1 if len(tokens) <= self.context else rng.randrange(64, self.context)
            for piece in (tokens[:first], *cut(tokens[first:], self.context)):
                tokens_of_row = [*lead, *piece][: self.context]
                if len(tokens_of_row) > 1:
                    rows.append(Row(tokens_of_row, [1.0] * len(tokens_of_row)))
                lead = []
        return rows

    def epoch(self, rng: random.Random) -> list[Row]:
        """All rows of one epoch."""
        stories = [s for s in self.stories if len(s) > self.reply_tokens or rng.random() < self.plain_share]
        chats = [row for _ in range(self.chat_rounds) for row in self.chat_rows(rng)]
        plain = [*self.plain_rows(stories, rng), *self.plain_rows(self.tales, rng)]
        return [*plain, *chats, *self.conversation_rows()]


def tokens_of(span: tuple[int, int] | None, offsets: list[tuple[int, int]]) -> list[int]:
    """The tokens that hold the characters of a span."""
    if span is None:
        return []
    return [index for index, (start, end) in enumerate(offsets) if start < span[1] and end > span[0]]


def cut(tokens: list[int], length: int) -> list[list[int]]:
    """Consecutive pieces of at most `length` tokens."""
    return [tokens[at : at + length] for at in range(0, len(tokens), length)]


def padded_width(row: Row) -> int:
    """The inputs that a row has, rounded up so that there are few different shapes."""
    return -(-(len(row.tokens) - 1) // 32) * 32


def pad(rows: list[Row], filler: int) -> Batch:
    """One batch of rows, padded on the right, where causal attention makes padding harmless."""
    width = max(map(padded_width, rows))
    inputs = np.full((len(rows), width), filler, dtype=np.int64)
    targets = np.full((len(rows), width), IGNORE, dtype=np.int64)
    weights = np.zeros((len(rows), width), dtype=np.float32)
    for index, row in enumerate(rows):
        tokens = np.array(row.tokens, dtype=np.int64)
        inputs[index, : len(tokens) - 1] = tokens[:-1]
        weights[index, : len(tokens) - 1] = row.weights[1:]
        targets[index, : len(tokens) - 1] = np.where(weights[index, : len(tokens) - 1] > 0, tokens[1:], IGNORE)
    return Batch(inputs, targets, weights)


def batched(rows: list[Row], batch_tokens: int, filler: int, rng: random.Random) -> Iterator[Batch]:
    """Rows of like length together, at most `batch_tokens` a batch, the batches in random order."""
    order = sorted(rows, key=lambda row: len(row.tokens) + rng.random() * 24)
    groups: list[list[Row]] = []
    widest = 0
    for row in order:
        widest = max(widest, padded_width(row))
        if not groups or widest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
            widest = padded_width(row)
        groups[-1].append(row)
    rng.shuffle(groups)
    return (pad(group, filler) for group in groups)
