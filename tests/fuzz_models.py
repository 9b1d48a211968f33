"""`python -m tests.fuzz_models --seed 1 --count 100`: random configurations of every architecture against transformers.

Each is drawn by `tests.drawn_configs`, written by transformers with random parameters, written in one of the ways in
which config.json files are published, and answered by Quire's engine with the CPU executor: prompts whole and in
chunks, a batch of two, and tokens after a prefix that is cached. What is compared are the log-probabilities of the
whole vocabulary at every position. A line for each configuration that is not equal says what to run to see it again.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from quire.errors import InvalidModel
from quire.models.registry import Model
from quire.types import GREEDY, Request
from quire.weights.load import load_model
from tests.answers import engine_of
from tests.checkpoints import VOCAB, draw
from tests.drawn_configs import FAMILIES, draw_config
from tests.written_configs import as_published

EQUAL, REFUSED, DIFFERENT, CRASH, INVALID = "equal", "refused", "different", "crash", "invalid"
"""Verdicts. refused: by an error of Quire's. invalid: transformers cannot run the configuration."""

NEW = 6
"""Tokens of an answer."""

ERROR = 2e-4
"""Largest error of a log-probability, as long as transformers' own is smaller."""


class Result(NamedTuple):
    """What became of a configuration, and why, or the largest error."""

    family: str
    seed: int
    verdict: str
    said: str


def examine(family: str, seed: int, fields: dict[str, Any] | None = None) -> Result:
    """Compare one configuration."""
    try:
        fields = draw_config(family, seed) if fields is None else fields
        with TemporaryDirectory() as place:
            return _examine(family, seed, fields, Path(place))
    except Exception as error:
        return Result(family, seed, CRASH, "".join(traceback.format_exception(error)[-6:]))


def _examine(family: str, seed: int, fields: dict[str, Any], folder: Path) -> Result:
    try:
        reference = write(folder, fields, seed)
        asked = prompts(seed)
        for prompt in asked:
            theirs(reference, prompt)
    except Exception as error:
        return Result(family, seed, INVALID, f"{type(error).__name__}: {error}"[:300])
    try:
        model = load_model(folder, dtype="float32")
    except InvalidModel as error:
        return Result(family, seed, REFUSED, str(error))
    found, noise = largest_error(model, reference, asked)
    verdict = EQUAL if found < max(ERROR, 30 * noise) else DIFFERENT
    return Result(family, seed, verdict, f"{found:.1e} (of transformers itself {noise:.1e})")


def write(folder: Path, fields: dict[str, Any], seed: int) -> PreTrainedModel:
    """Write a checkpoint of a configuration to `folder`, and return transformers' model of it."""
    config = AutoConfig.for_model(**copy.deepcopy(fields))
    written = as_published(json.loads(config.to_json_string(use_diff=True)), random.Random(seed))
    path = folder / "config.json"
    path.write_text(json.dumps(written))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="eager", experts_implementation="eager", dtype="float32"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    corrections = [(name, each) for name, each in model.named_buffers() if "correction" in name or "scalar" in name]
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *corrections):
            parameter.copy_(draw(name, parameter, generator, fields["model_type"]))
    model.save_pretrained(folder)
    path.write_text(json.dumps({"architectures": [type(model).__name__], **written}))
    return model


def prompts(seed: int) -> list[list[int]]:
    """Three, of which the last begins as the first does."""
    chance = random.Random(seed)
    first, second, more = ([chance.randrange(3, VOCAB) for _ in range(n)] for n in (61, 13, 20))
    return [first, second, first[:45] + more]


@torch.no_grad()
def theirs(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """transformers' log-probabilities [T, V]."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.double().log_softmax(-1)


def largest_error(model: Model, reference: PreTrainedModel, asked: Sequence[list[int]]) -> tuple[float, float]:
    """The largest error of a log-probability, and transformers' own against float64."""
    engine = engine_of(model, page_size=8, max_num_batched_tokens=50, max_chunk_tokens=23)
    said: dict[int, Tensor] = {}
    for together in ([0, 1], [2]):
        for i in together:
            sampling = replace(GREEDY, logprobs=-1, prompt_logprobs=-1 if i < 2 else None)
            engine.add(Request(id=str(i), prompt=tuple(asked[i]), max_new_tokens=NEW, sampling=sampling))
        parts: dict[str, list[Tensor]] = {str(i): [] for i in together}
        while engine.has_pending_work:
            for output in engine.step():
                parts[output.id] += [vector(each.top) for each in (*output.prompt_logprobs, *output.logprobs)]
        said |= {int(name): torch.stack(rows) for name, rows in parts.items()}
    tokens = {int(done.id): [*asked[int(done.id)], *done.tokens] for done in engine.completed_requests}
    wanted = {i: theirs(reference, each[:-1])[-len(said[i]) :] for i, each in tokens.items()}
    error = max(float((said[i] - each).abs().max()) for i, each in wanted.items())
    if error < ERROR:
        return error, 0.0
    exact = copy.deepcopy(reference).double()
    return error, max(
        float((theirs(exact, tokens[i][:-1])[-len(said[i]) :] - each).abs().max()) for i, each in wanted.items()
    )


def vector(top: Sequence[tuple[int, float]]) -> Tensor:
    """Log-probabilities [V] in the order of tokens."""
    return torch.tensor([value for _, value in sorted(top)], dtype=torch.float64)


def smallest(family: str, seed: int, verdict: str) -> dict[str, Any]:
    """The fields that are needed for `verdict`, without those whose default gives the same."""
    fields = draw_config(family, seed)
    for name in sorted(fields.keys() - {"model_type"}):
        less = {other: value for other, value in fields.items() if other != name}
        if "size" not in name and "layers" not in name and examine(family, seed, less).verdict == verdict:
            fields = less
    return fields


def main(arguments: list[str] | None = None) -> int:
    """Examine configurations; 1 where one differs or crashes."""
    options = _parser().parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        for family in options.families or FAMILIES:
            result = examine(family, seed)
            counts[result.verdict] += 1
            if result.verdict != EQUAL or options.verbose:
                print(f"{result.verdict}: --families {family} --seed {seed} --count 1: {result.said}", flush=True)
            if options.fields:
                print(json.dumps(smallest(family, seed, result.verdict), default=str))
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts[DIFFERENT] + counts[CRASH] > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_models", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first configuration of each family")
    parser.add_argument("--count", type=int, default=10, help="configurations of each family")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, help="by model_type; all by default")
    parser.add_argument("--verbose", action="store_true", help="print those that are equal, too")
    parser.add_argument("--fields", action="store_true", help="print the fields of each that its verdict needs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
