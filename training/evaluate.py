"""Measure a model: bits a byte on held-out text, how it follows unseen requests, and unselected samples.

`python -m training.evaluate MODEL --stories ... ` prints the figures and, with --out, writes them as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import functional as F

from training import data
from training.batches import IGNORE, Row, pad
from training.model import Llama, load_model
from training.requests import Lexicon, Noun, build_lexicon, draw_pairs, mentions
from training.tokenizer import Codec, load_tokenizer

REQUEST = "Tell me a story about {} and {}."
NEW_TOKENS = 300
OPENINGS = ("Once upon a time", "One day,", "Tom and Sue", "The little rabbit", "There was once a king who")


def scored_rows(codec: Codec, texts: list[str], context: int) -> list[Row]:
    """Every token of every text, and its end, to be predicted; longer texts in pieces of the context."""
    end = codec.end_of_text
    rows = []
    for tokens in codec.encode_all(texts):
        whole = [end, *tokens, end]
        for at in range(0, len(whole) - 1, context - 1):
            piece = whole[at : at + context]
            rows.append(Row(piece, [1.0] * len(piece)))
    return rows


@torch.no_grad()
def bits_per_byte(model: Llama, codec: Codec, texts: list[str], batch_tokens: int = 32768) -> float:
    """Bits to predict the texts and their ends, over their bytes."""
    model.eval()
    device = model.cos.device
    rows = sorted(scored_rows(codec, texts, model.config.max_position_embeddings), key=lambda r: len(r.tokens))
    nats = torch.zeros((), dtype=torch.float64, device=device)
    while rows:
        count = max(1, batch_tokens // (len(rows[-1].tokens) + 32))
        batch = pad(rows[-count:], codec.end_of_text)
        del rows[-count:]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu"):
            logits = model(torch.from_numpy(batch.inputs).to(device)).float()
        targets = torch.from_numpy(batch.targets).to(device)
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum").double()
    return float(nats) / math.log(2) / max(1, sum(len(text.encode()) for text in texts))


@dataclass
class Following:
    """How many of the requests were followed."""

    requests: int = 0
    both: int = 0
    at_least_one: int = 0
    ended: int = 0
    stories: list[tuple[str, str]] = field(default_factory=list)


def ask(model: Llama, codec: Codec, requests: list[str], temperature: float, seed: int) -> list[tuple[str, bool]]:
    """The story for each request, and whether it came to its end within NEW_TOKENS."""
    prompts = [codec.prompt([data.Message(role="user", content=request)]) for request in requests]
    replies = model.sample(prompts, codec.end, NEW_TOKENS, temperature, seed)
    return [(codec.decode(t for t in reply if t != codec.end), reply[-1] == codec.end) for reply in replies]


def follow_requests(
    model: Llama,
    codec: Codec,
    pairs: list[tuple[Noun, Noun]],
    runs: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> list[Following]:
    """Ask for every pair of nouns and look for both in the story; each run samples anew."""
    requests = [REQUEST.format(first.phrase, second.phrase) for first, second in pairs]
    answers = ask(model, codec, requests * runs, temperature, seed)
    results: list[Following] = []
    for run in range(runs):
        result = Following(requests=len(pairs))
        of_run = answers[run * len(pairs) : (run + 1) * len(pairs)]
        for request, (first, second), (story, ended) in zip(requests, pairs, of_run, strict=True):
            found = mentions(story, first.word) + mentions(story, second.word)
            result.both += found == 2
            result.at_least_one += found >= 1
            result.ended += ended
            result.stories.append((request, story))
        results.append(result)
    return results


@torch.no_grad()
def acceptance(draft: Llama, target: Llama, codec: Codec, requests: list[str], temperature: float) -> float:
    """The share of the target's own tokens that speculation would accept from the draft.

    Greedy: both pick the same token. Otherwise the overlap of the two distributions, which is the chance
    that rejection sampling keeps a drafted token.
    """
    prompts = [codec.prompt([data.Message(role="user", content=request)]) for request in requests]
    kept = total = 0.0
    for prompt, reply in zip(prompts, target.sample(prompts, codec.end, NEW_TOKENS, temperature), strict=True):
        tokens = torch.tensor([[*prompt, *reply]], device=target.cos.device)
        p, q = (model(tokens)[0, len(prompt) - 1 : -1].float() for model in (target, draft))
        if temperature == 0:
            kept += float((p.argmax(-1) == q.argmax(-1)).sum())
        else:
            overlap = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1))
            kept += float(overlap.sum())
        total += len(reply)
    return kept / max(1.0, total)


def samples(model: Llama, codec: Codec, lexicon: Lexicon, seed: int) -> list[tuple[str, str]]:
    """Twenty prompts with what came of them: fifteen requests for unseen pairs, five plain openings."""
    pairs = draw_pairs(lexicon, 15, random.Random(seed), reserved=True)
    found = follow_requests(model, codec, pairs, 1, seed=seed)[0].stories
    prompts = [codec.encode(opening) for opening in OPENINGS]
    texts = model.sample(prompts, codec.end_of_text, NEW_TOKENS, 0.7, seed)
    plain = [codec.decode(t for t in text if t != codec.end_of_text) for text in texts]
    return [*found, *((opening, opening + text) for opening, text in zip(OPENINGS, plain, strict=True))]


@torch.no_grad()
def bits_by_position(model: Llama, codec: Codec, texts: list[str]) -> dict[str, float]:
    """Bits a token at near and far positions of long texts: whether the whole context is of use."""
    context = model.config.max_position_embeddings
    edges = [0, context // 4, context // 2, context]
    sums: list[list[float]] = [[] for _ in edges[1:]]
    for row in scored_rows(codec, texts, context):
        if len(row.tokens) == context:
            tokens = torch.tensor([row.tokens], device=model.cos.device)
            losses = F.cross_entropy(model(tokens)[0, :-1].float(), tokens[0, 1:], reduction="none")
            for place, (start, end) in enumerate(itertools.pairwise(edges)):
                sums[place].append(float(losses[start:end].mean()) / math.log(2))
    spans = [f"{start}-{end}" for start, end in itertools.pairwise(edges)]
    return {span: sum(found) / max(1, len(found)) for span, found in zip(spans, sums, strict=True)}


def report(
    model: Llama, codec: Codec, parts: dict[data.Part, data.Corpus], draft: Llama | None, seed: int
) -> dict[str, object]:
    """All figures of the model card."""
    held_out, lexicon = parts["held_out"], build_lexicon(parts["train"].stories)
    pairs = draw_pairs(lexicon, 100, random.Random(seed), reserved=True)
    runs = follow_requests(model, codec, pairs, runs=5, seed=seed)
    figures: dict[str, object] = {
        "parameters": model.parameter_count(),
        "held_out_stories": len(held_out.stories),
        "bits_per_byte_stories": bits_per_byte(model, codec, held_out.stories),
        "bits_per_byte_tales": bits_per_byte(model, codec, held_out.tales),
        "bits_per_token_of_tales_by_position": bits_by_position(model, codec, held_out.tales),
        "following": [{k: v for k, v in asdict(run).items() if k != "stories"} for run in runs],
        "samples": samples(model, codec, lexicon, seed),
    }
    if draft is not None:
        requests = [REQUEST.format(first.phrase, second.phrase) for first, second in pairs]
        figures["draft_parameters"] = draft.parameter_count()
        figures["draft_bits_per_byte_stories"] = bits_per_byte(draft, codec, held_out.stories)
        figures["acceptance"] = {str(t): acceptance(draft, model, codec, requests, t) for t in (0.0, 0.7, 1.0)}
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path, help="a draft model, measured against the model")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--seed", type=int, default=2, help="decides the requests and all sampling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    data.add_arguments(parser)
    options = parser.parse_args(arguments)
    parts = data.load_from(options)
    codec, model = load_tokenizer(options.model), load_model(options.model, options.device)
    draft = load_model(options.draft, options.device) if options.draft else None
    figures = report(model, codec, parts, draft, options.seed)
    print(json.dumps({name: value for name, value in figures.items() if name != "samples"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
