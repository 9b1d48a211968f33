"""Conversations written by a trained model, for a draft model to learn from: `--synthetic` of train.py.

A draft is only ever asked to guess what its target would say next, and the target's own replies are where
that question comes up. Half of them are sampled and half greedy, since both are served. Noun pairs that are
reserved for evaluation are not asked for here either.
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
from training.requests import PHRASINGS, Lexicon, build_lexicon, draw_pairs, join_phrases
from training.tokenizer import Codec, load_tokenizer


def conversations(
    model: Llama,
    codec: Codec,
    lexicon: Lexicon,
    count: int,
    temperatures: list[float],
    seed: int,
    rows: int = 2048,
) -> list[list[data.Message]]:
    """About `count` requests for two nouns with the model's replies, those that came to their end."""
    rng = random.Random(seed)
    pairs = draw_pairs(lexicon, count, rng, reserved=False, min_documents=20)
    requests = [rng.choice(PHRASINGS).format(join_phrases([n.phrase for n in pair])) for pair in pairs]
    found: list[list[data.Message]] = []
    for at in range(0, len(requests), rows):
        some = requests[at : at + rows]
        temperature = temperatures[at // rows % len(temperatures)]
        answers = ask(model, codec, some, temperature, seed=rng.randrange(2**31))
        for request, (story, ended) in zip(some, answers, strict=True):
            if ended:
                user = data.Message(role="user", content=request)
                found.append([user, data.Message(role="assistant", content=story)])
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the model to ask")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file for the conversations")
    parser.add_argument("--count", type=int, default=8192, help="requests in all")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 0.0], help="taken in turn")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    data.add_arguments(parser)
    options = parser.parse_args(arguments)
    lexicon = build_lexicon(data.load_from(options)["train"].stories)
    model, codec = load_model(options.model, options.device), load_tokenizer(options.model)
    if options.device != "cpu":
        model.to(torch.bfloat16)
    found = conversations(model, codec, lexicon, options.count, options.temperature, options.seed)
    lines = (json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in found)
    options.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(found)} conversations out of {options.count} requests")


if __name__ == "__main__":
    main()
