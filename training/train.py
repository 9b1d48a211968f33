"""Train a model on stories, long tales and chat turns: `python -m training.train --help`."""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from training import data
from training.batches import IGNORE, Batch, RowMaker, batched
from training.evaluate import bits_per_byte
from training.model import Llama, ModelConfig, load_model, save_model
from training.optim import Optimiser
from training.requests import build_lexicon
from training.tokenizer import Codec, load_tokenizer, save_tokenizer, train_tokenizer


@dataclass
class Settings:
    """Everything that decides a training run, apart from the text."""

    model: ModelConfig = field(default_factory=ModelConfig)
    epochs: float = 16.0
    batch_tokens: int = 32768
    lr: float = 8e-3
    weight_decay: float = 0.5
    dropout: float = 0.2
    distill: float = 0.5
    """The weight of the teachers' distribution against the text itself, where there are teachers."""
    plain_share: float = 0.35
    noun_weight: float = 10.0
    evaluate_every: int = 200
    max_steps: int = 0
    seed: int = 1
    device: str = "cpu"


@dataclass
class Curve:
    """What the loss plot shows."""

    steps: list[int] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    validation_bits: list[float] = field(default_factory=list)


def moved(array: NDArray[Any], device: str) -> Tensor:
    """An array on the device; from pinned memory, so that the copy does not wait for the GPU."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def loss_of(model: Llama, batch: Batch, teachers: list[Llama], settings: Settings) -> Tensor:
    """Cross entropy on the tokens to be predicted, mixed with that to the teachers' mean distribution."""
    device = settings.device
    wanted = (batch.targets.reshape(-1) != IGNORE).nonzero()[0]
    index, targets = moved(wanted, device), moved(batch.targets.reshape(-1)[wanted], device)
    inputs, weights = moved(batch.inputs, device), moved(batch.weights.reshape(-1)[wanted], device)
    weights = weights / weights.sum()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
        hidden = model.hidden(inputs)
        logits = model.logits(hidden.flatten(0, 1).index_select(0, index)).float()
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
        if not teachers:
            return loss
        with torch.no_grad():
            taught = torch.zeros_like(logits)
            for teacher in teachers:
                states = teacher.hidden(inputs).flatten(0, 1).index_select(0, index)
                taught += teacher.logits(states).float().softmax(dim=-1) / len(teachers)
        soft = (F.cross_entropy(logits, taught, reduction="none") * weights).sum()
    return settings.distill * soft + (1 - settings.distill) * loss


def count_steps(rows: RowMaker, settings: Settings) -> int:
    """Steps of the whole run, from the batches of one epoch."""
    rng = random.Random(0)
    first = sum(1 for _ in batched(rows.epoch(rng), settings.batch_tokens, 0, rng))
    steps = max(1, round(first * settings.epochs))
    return min(steps, settings.max_steps) if settings.max_steps else steps


def fit(
    model: Llama,
    rows: RowMaker,
    validation: list[str],
    settings: Settings,
    teachers: list[Llama] | None = None,
) -> Curve:
    """Train `model` and leave in it the averaged weights with the best loss on the validation stories."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    steps = count_steps(rows, settings)
    optimiser = Optimiser(model, settings.lr, settings.weight_decay, steps)
    curve, began = Curve(), time.monotonic()
    best = (float("inf"), [w.detach().clone() for w in model.parameters()])
    recent: list[Tensor] = []
    tokens = 0
    while optimiser.done < steps:
        for batch in batched(rows.epoch(rng), settings.batch_tokens, rows.codec.end_of_text, rng):
            model.train()
            loss = loss_of(model, batch, teachers or [], settings)
            torch.autograd.backward(loss)
            optimiser.step()
            recent.append(loss.detach())
            tokens += batch.inputs.size
            if optimiser.done % settings.evaluate_every and optimiser.done < steps:
                continue
            optimiser.swap_average()
            bits = bits_per_byte(model, rows.codec, validation)
            if bits < best[0]:
                best = (bits, [w.detach().clone() for w in model.parameters()])
            optimiser.swap_average()
            curve.steps.append(optimiser.done)
            curve.train_loss.append(float(torch.stack(recent).mean()))
            curve.validation_steps.append(optimiser.done)
            curve.validation_bits.append(bits)
            recent.clear()
            spent = time.monotonic() - began
            print(
                f"step {optimiser.done}/{steps}  loss {curve.train_loss[-1]:.4f}  validation {bits:.4f} bits"
                f" a byte  {spent:.1f} s  {tokens / spent / 1e6:.3f} M tokens/s",
                flush=True,
            )
            if optimiser.done >= steps:
                break
    with torch.no_grad():
        for weight, kept in zip(model.parameters(), best[1], strict=True):
            weight.copy_(kept)
    model.eval()
    return curve


def build_rows(codec: Codec, train: data.Corpus, settings: Settings, synthetic: list[Path]) -> RowMaker:
    """The row maker for the training part of a corpus, with generated conversations if there are any."""
    lexicon = build_lexicon(train.stories or [m["content"] for chat in train.chats for m in chat[1:]])
    further = [chat for path in synthetic for chat in data.read_chats(path)]
    context = settings.model.max_position_embeddings
    return RowMaker(
        codec,
        train,
        lexicon,
        context,
        plain_share=settings.plain_share,
        noun_weight=settings.noun_weight,
        synthetic=further,
    )


def validation_texts(part: data.Corpus) -> list[str]:
    """What chooses the checkpoint: stories, or else answers, or else tales."""
    replies = [m["content"] for chat in part.chats for m in chat if m["role"] == "assistant"]
    texts = part.stories or replies or part.tales
    if not texts:
        raise SystemExit("too few documents to keep any for validation: give more text, or the right --separator")
    return texts


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    data.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use instead of a new one")
    parser.add_argument("--start", type=Path, help="folder of a model to go on from; brings its tokenizer")
    parser.add_argument("--teacher", type=Path, nargs="+", default=[], help="models to distil from")
    parser.add_argument("--synthetic", type=Path, nargs="+", default=[], help="files that generate.py wrote")
    defaults, model = Settings(), ModelConfig()
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(model, name))
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(model, name))
    for name in ("epochs", "lr", "weight_decay", "dropout", "distill", "plain_share", "noun_weight"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    for name in ("batch_tokens", "evaluate_every", "max_steps", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the command line asked for."""
    sizes = {name: getattr(options, name) for name in asdict(ModelConfig()) if hasattr(options, name)}
    others = {name: getattr(options, name) for name in asdict(Settings()) if name != "model"}
    return Settings(model=ModelConfig(**sizes), **others)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    settings = settings_of(options)
    torch.set_float32_matmul_precision("high")
    parts = data.load_from(options)
    folder = options.tokenizer or options.start
    codec = load_tokenizer(folder) if folder else train_tokenizer(parts["train"].texts(), settings.model.vocab_size)
    if codec.vocab_size != settings.model.vocab_size:
        raise SystemExit(f"the tokenizer has {codec.vocab_size} tokens, not {settings.model.vocab_size}")
    torch.manual_seed(settings.seed)
    model = Llama(settings.model, settings.dropout)
    if options.start:
        model.load_state_dict(load_model(options.start).state_dict())
    model.to(settings.device)
    print(f"{model.parameter_count() / 1e6:.2f} M parameters, {len(parts['train'].stories)} stories", flush=True)
    rows = build_rows(codec, parts["train"], settings, options.synthetic)
    validation = validation_texts(parts["validation"])
    teachers = [load_model(path, settings.device) for path in options.teacher]
    curve = fit(model, rows, validation, settings, teachers)
    save_tokenizer(codec, options.out, settings.model.max_position_embeddings)
    save_model(model, options.out, codec.end_of_text, codec.end)
    record = {"settings": asdict(settings), "curve": asdict(curve)}
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
