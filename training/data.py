"""Reading text, and the one split that everything else depends on.

The chat file repeats the stories of the story file word for word. A split made per file would therefore
train on its own held-out text, so the split here looks at nothing but a hash of the normalised story: the
same story lands in the same part whichever file, order, case or spacing it comes with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

SEPARATOR = "<|endoftext|>"
HELD_OUT_FRACTION = 0.03
VALIDATION_FRACTION = 0.02

Part = Literal["train", "validation", "held_out"]


class Message(TypedDict):
    """One turn of a conversation, in the shape of the OpenAI API."""

    role: str
    content: str


@dataclass
class Corpus:
    """The text of one part of the split."""

    stories: list[str] = field(default_factory=list)
    """Short documents; each may also become the reply of a chat turn."""
    tales: list[str] = field(default_factory=list)
    """Long documents, learned as plain text only; they are what teaches long contexts."""
    chats: list[list[Message]] = field(default_factory=list)

    def texts(self) -> list[str]:
        """Every distinct text, for the tokenizer: a story counts once though a chat repeats it."""
        replies = [m["content"] for chat in self.chats for m in chat]
        return list(dict.fromkeys([*self.stories, *self.tales, *replies]))


def normalise(text: str) -> str:
    """The text without case, spacing and punctuation, so that copies that differ only there meet."""
    return " ".join(re.findall(r"\w+", text.lower()))


def part_of(text: str) -> Part:
    """The part of the split that a text belongs to, from its normalised words alone."""
    digest = hashlib.blake2b(normalise(text).encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    if place < HELD_OUT_FRACTION:
        return "held_out"
    return "validation" if place < HELD_OUT_FRACTION + VALIDATION_FRACTION else "train"


def part_of_chat(chat: list[Message]) -> Part:
    """The part of a conversation: the strictest of its replies, so that none of them leaks."""
    parts = {part_of(m["content"]) for m in chat if m["role"] == "assistant"}
    if "held_out" in parts:
        return "held_out"
    return "validation" if "validation" in parts else "train"


def read_text(path: Path) -> str:
    """A UTF-8 file, plain or xz-compressed."""
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as packed:
            return packed.read()
    return path.read_text(encoding="utf-8")


def read_documents(path: Path, separator: str = SEPARATOR) -> list[str]:
    """The distinct documents of a text file whose documents are divided by `separator`."""
    documents = (part.strip() for part in read_text(path).split(separator))
    return list({normalise(document): document for document in documents if document}.values())


def read_chats(path: Path) -> list[list[Message]]:
    """The conversations of a JSON-lines file of {"messages": [...]} records."""
    chats: list[list[Message]] = []
    roles = {"system", "user", "assistant"}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            chat = [Message(role=str(m["role"]), content=str(m["content"]).strip()) for m in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a record with messages ({error!r})") from error
        if not roles.issuperset(m["role"] for m in chat):
            raise ValueError(f"{path}, line {number}: a role is none of {', '.join(sorted(roles))}")
        if any(m["role"] == "assistant" for m in chat):
            chats.append(chat)
    return chats


def load(stories: list[Path], tales: list[Path], chats: list[Path], separator: str = SEPARATOR) -> dict[Part, Corpus]:
    """All files, split into the three parts."""
    corpora: dict[Part, Corpus] = {"train": Corpus(), "validation": Corpus(), "held_out": Corpus()}
    for path in stories:
        for document in read_documents(path, separator):
            corpora[part_of(document)].stories.append(document)
    for path in tales:
        for document in read_documents(path, separator):
            corpora[part_of(document)].tales.append(document)
    for path in chats:
        for chat in read_chats(path):
            corpora[part_of_chat(chat)].chats.append(chat)
    if not any((corpora["train"].stories, corpora["train"].tales, corpora["train"].chats)):
        raise ValueError("no training text: give at least one file with more than a handful of documents")
    return corpora


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name the text; every script that needs the split has them."""
    group = parser.add_argument_group("text (plain or .xz; at least one file)")
    group.add_argument("--stories", type=Path, nargs="+", default=[], help="short documents, also used as replies")
    group.add_argument("--fairytales", type=Path, nargs="+", default=[], help="long documents, plain text only")
    group.add_argument("--chat", type=Path, nargs="+", default=[], help='JSON lines of {"messages": [...]}')
    group.add_argument("--separator", default=SEPARATOR, help="what divides the documents of a text file")


def load_from(options: argparse.Namespace) -> dict[Part, Corpus]:
    """The corpus that the command line named, split."""
    return load(options.stories, options.fairytales, options.chat, options.separator)
