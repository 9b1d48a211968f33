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
from training.requests import Lexicon, StoryFacts, draw_request, facts_of
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
    """Tokens, and for each whether it is to be predicted."""

    tokens: list[int]
    learned: list[bool]

    def extend(self, tokens: list[int], learned: bool) -> None:
        self.tokens += tokens
        self.learned += [learned] * len(tokens)


@dataclass
class Batch:
    """Equally long rows: inputs, and targets with IGNORE where nothing is to be predicted."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


@dataclass
class Reply:
    """A story as the answer of a chat turn."""

    tokens: list[int]
    facts: StoryFacts
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
    plain_share: float = 1.0
    """The part of the stories that each epoch also shows as plain text."""
    synthetic: list[list[Message]] = field(default_factory=list)
    """Further conversations, learned as they are; see follow.py."""

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
        encoded = self.codec.encode_all(list(texts.values()))
        self.replies = [
            Reply(tokens, facts_of(text, self.lexicon, len(texts)), requests[key])
            for (key, text), tokens in zip(texts.items(), encoded, strict=True)
            if len(tokens) <= self.reply_tokens
        ]

    def turn(self, request: list[int], reply: list[int]) -> Row:
        """One request and its answer; only the answer is to be predicted."""
        row = Row([], [])
        row.extend([self.codec.id_of(USER), *request, self.codec.end, self.codec.id_of(ASSISTANT)], False)
        row.extend([*reply, self.codec.end], True)
        return row

    def chat_rows(self, rng: random.Random) -> list[Row]:
        """Every reply under a request drawn afresh, or one time in ten under the chat file's own."""
        asked: list[tuple[str, list[int]]] = []
        for reply in self.replies:
            fresh = draw_request(reply.facts, rng)
            keep = reply.request is not None and (fresh is None or rng.random() < 0.1)
            request = reply.request if keep else fresh
            if request is not None:
                asked.append((request, reply.tokens))
        requests = self.codec.encode_all([request for request, _ in asked])
        turns = [self.turn(r, tokens) for r, (_, tokens) in zip(requests, asked, strict=True)]
        return self.join_turns(turns, rng)

    def join_turns(self, turns: list[Row], rng: random.Random) -> list[Row]:
        """Some turns follow each other in one conversation, and some have a system message before them."""
        rng.shuffle(turns)
        rows: list[Row] = []
        for turn in turns:
            if rows and rng.random() < 0.15 and len(rows[-1].tokens) + len(turn.tokens) < self.context:
                rows[-1].tokens += turn.tokens
                rows[-1].learned += turn.learned
                continue
            row = Row([], [])
            if rng.random() < 0.1:
                words = self.codec.encode(rng.choice(SYSTEM_MESSAGES))
                row.extend([self.codec.id_of(SYSTEM), *words, self.codec.end], False)
            rows.append(Row(row.tokens + turn.tokens, row.learned + turn.learned))
        return rows

    def conversation_rows(self) -> list[Row]:
        """Conversations as they are, with every answer to be predicted."""
        contents = self.codec.encode_all([m["content"] for chat in self.conversations for m in chat])
        rows, at = [], 0
        for chat in self.conversations:
            row = Row([], [])
            for message in chat:
                row.extend([self.codec.id_of(ROLE_TOKENS[message["role"]])], False)
                row.extend([*contents[at], self.codec.end], message["role"] == "assistant")
                at += 1
            rows.append(Row(row.tokens[: self.context], row.learned[: self.context]))
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
                rows[-1].extend(tokens, True)
                continue
            lead = [end] if rng.random() < 0.5 else []
            first = self.context - 1 if len(tokens) <= self.context else rng.randrange(64, self.context)
            for piece in (tokens[:first], *cut(tokens[first:], self.context)):
                tokens_of_row = [*lead, *piece][: self.context]
                if len(tokens_of_row) > 1:
                    rows.append(Row(tokens_of_row, [True] * len(tokens_of_row)))
                lead = []
        return rows

    def epoch(self, rng: random.Random) -> list[Row]:
        """All rows of one epoch."""
        stories = rng.sample(self.stories, round(self.plain_share * len(self.stories)))
        return [
            *self.plain_rows(stories, rng),
            *self.plain_rows(self.tales, rng),
            *self.chat_rows(rng),
            *self.conversation_rows(),
        ]


def cut(tokens: list[int], length: int) -> list[list[int]]:
    """Consecutive pieces of at most `length` tokens."""
    return [tokens[at : at + length] for at in range(0, len(tokens), length)]


def pad(rows: list[Row], filler: int) -> Batch:
    """One batch of rows, padded on the right, where causal attention makes padding harmless."""
    width = max(len(row.tokens) for row in rows) - 1
    width += -width % 32
    inputs = np.full((len(rows), width), filler, dtype=np.int64)
    targets = np.full((len(rows), width), IGNORE, dtype=np.int64)
    for index, row in enumerate(rows):
        tokens = np.array(row.tokens, dtype=np.int64)
        inputs[index, : len(tokens) - 1] = tokens[:-1]
        targets[index, : len(tokens) - 1] = np.where(row.learned[1:], tokens[1:], IGNORE)
    return Batch(inputs, targets)


def batched(rows: list[Row], batch_tokens: int, filler: int, rng: random.Random) -> Iterator[Batch]:
    """Rows of like length together, at most `batch_tokens` a batch, the batches in random order."""
    order = sorted(rows, key=lambda row: len(row.tokens) + rng.random() * 24)
    groups: list[list[Row]] = [[]]
    for row in order:
        width = max([len(row.tokens), *(len(other.tokens) for other in groups[-1][-1:])]) + 32
        if groups[-1] and width * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    return (pad(group, filler) for group in groups if group)
