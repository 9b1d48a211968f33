"""A corpus small enough to train on within a test: stories of two nouns each, told in one way."""

from __future__ import annotations

import json
from pathlib import Path

from training.data import SEPARATOR

NOUNS = ("dog", "cat", "boat", "kite", "hat", "key", "drum", "frog", "cup", "bell", "ball", "nest")


def stories(count: int = 280) -> list[str]:
    """Stories that differ from each other, about pairs of nouns in turn."""
    told = []
    for number in range(count):
        first, second = NOUNS[number % 12], NOUNS[(number + 1 + number // 12 % 11) % 12]
        told.append(
            f"Once upon a time there was a {first}. The {first} had a {second}, and number {number} on the door.\n\n"
            f'One day it lost the {second}. "Where is the {second}?" said the {first}. They were sad.'
        )
    return told


def files(folder: Path) -> list[str]:
    """The files of such a corpus, as arguments of the scripts."""
    told = stories()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stories.txt").write_text(f"\n{SEPARATOR}\n".join(told), encoding="utf-8")
    tale = " ".join(told[:12])
    (folder / "tales.txt").write_text(f"\n{SEPARATOR}\n".join([tale, tale[100:]]), encoding="utf-8")
    chats = (
        {"messages": [{"role": "user", "content": "A story, please."}, {"role": "assistant", "content": story.upper()}]}
        for story in told
    )
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    names = {"--stories": "stories.txt", "--fairytales": "tales.txt", "--chat": "chat.jsonl"}
    return [word for option, name in names.items() for word in (option, str(folder / name))]
