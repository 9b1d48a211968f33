"""How far logits are from transformers' in float32, by architecture and dtype: writes the table of docs/models.md.

Each number is the largest over all tiny checkpoints of an architecture and all tokens of five prompts, fed raggedly in
chunks. `python -m tests.models.errors` takes about a minute.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.weights.load import DType, load_model
from tests.checkpoints import SHAPES, make
from tests.models.feeding import Feeder, prompts

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- errors -->\n", "<!-- /errors -->\n"
DTYPES: Mapping[DType, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def theirs(model: PreTrainedModel, asked: Iterable[list[int]]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([tokens])).logits[0].float() for tokens in asked])


def ours(folder: Path, dtype: DType, asked: list[list[int]]) -> Tensor:
    feeder = Feeder(load_model(folder, dtype=dtype), page_size=16, dtype=DTYPES[dtype])
    return torch.cat(feeder.prompts(asked, random.Random(0)))


def errors(shape: str, folder: Path) -> tuple[float, list[float], list[float]]:
    """(deviation of the logits, our largest error a dtype, transformers' own)."""
    model = make(folder, shape)
    asked = prompts(model.config.vocab_size)
    wanted = theirs(model, asked)
    own = [float((ours(folder, dtype, asked) - wanted).abs().max()) for dtype in DTYPES]
    other = [float((theirs(deepcopy(model).to(dtype), asked) - wanted).abs().max()) for dtype in DTYPES.values()]
    return float(wanted.std()), own, other


def table(shapes: Iterable[str]) -> str:
    """A line an architecture: the worst of its shapes."""
    found: dict[str, list[tuple[float, list[float], list[float]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for shape in shapes:
            found.setdefault(shape.split("-")[0], []).append(errors(shape, Path(place) / shape))
    lines = ["| `model_type` | shapes | deviation | " + " | ".join(DTYPES) + " |", "|---" * (3 + len(DTYPES)) + "|"]
    for family, rows in found.items():
        spread = max(row[0] for row in rows)
        pairs = [(max(row[1][i] for row in rows), max(row[2][i] for row in rows)) for i in range(len(DTYPES))]
        cells = [f"{mine:.1e}" if i == 0 else f"{mine:.2g} ({their:.2g})" for i, (mine, their) in enumerate(pairs)]
        lines.append(f"| {family} | {len(rows)} | {spread:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text("utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + BEGIN + table(SHAPES) + END + after, "utf-8")


if __name__ == "__main__":
    main()
