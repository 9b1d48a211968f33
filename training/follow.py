"""Conversations in which a trained model followed the request, to learn from once more.

The text has few stories with any given two nouns, so a model trained on it alone forgets one of them more
often than not. This asks trained models for many pairs (never a reserved one), keeps the stories that have
every noun and come to their end, and writes them as chat turns: `train.py --synthetic` takes the file.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from training import data
from training.evaluate import ask
from training.model import Llama, load_model
from training.requests import PHRASINGS, Lexicon, Noun, build_lexicon, draw_pairs, join_phrases, mentions
from training.tokenizer import Codec, load_tokenizer


def keeps(story: str, nouns: list[Noun]) -> bool:
    """Whether a story has all nouns, and does not just repeat itself."""
    lines = [line for line in story.split("\n") if line.strip()]
    return all(mentions(story, noun.word) for noun in nouns) and len(set(lines)) == len(lines)


def followed(
    model: Llama,
    codec: Codec,
    lexicon: Lexicon,
    count: int,
    temperature: float,
    rng: random.Random,
    rows: int = 2048,
) -> list[list[data.Message]]:
    """The conversations worth keeping out of `count` requests for two nouns each."""
    kept: list[list[data.Message]] = []
    pairs = draw_pairs(lexicon, count, rng, reserved=False, min_documents=20)
    for at in range(0, len(pairs), rows):
        some = pairs[at : at + rows]
        requests = [
            rng.choice(PHRASINGS).format(join_phrases([noun.phrase for noun in pair])) for pair in some
        ]
        answers = ask(model, codec, requests, temperature, seed=rng.randrange(2**31))
        for request, pair, (story, ended) in zip(requests, some, answers, strict=True):
            if ended and keeps(story, list(pair)):
                kept.append(
                    [
                        data.Message(role="user", content=request),
                        data.Message(role="assistant", content=story.strip()),
                    ]
                )
    return kept


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, nargs="+", required=True, help="models to ask, each for its share"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file for the conversations")
    parser.add_argument("--count", type=int, default=16384, help="requests in all")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    data.add_arguments(parser)
    options = parser.parse_args(arguments)
    lexicon = build_lexicon(data.load_from(options)["train"].stories)
    rng = random.Random(options.seed)
    kept: list[list[data.Message]] = []
    for path in options.model:
        model, codec = load_model(path, options.device), load_tokenizer(path)
        if options.device != "cpu":
            model.to(torch.bfloat16)
        share = options.count // len(options.model)
        kept += followed(model, codec, lexicon, share, options.temperature, rng)
    options.out.write_text(
        "".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in kept), encoding="utf-8"
    )
    print(f"kept {len(kept)} of {options.count} conversations")


if __name__ == "__main__":
    main()
