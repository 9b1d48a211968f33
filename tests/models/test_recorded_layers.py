"""What every architecture is built of: its layers with their numbers, and where each checkpoint tensor goes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.linear import ParallelGroup
from quire.layers.quantization.base import WeightSlot
from quire.models.registry import ARCHITECTURES, build_model, parameters, read_spec
from quire.ops.reference import ReferenceOps
from tests.expected import check
from tests.models.test_recorded_reads import EXPERTS, FIELDS, NAMES, OWN, brief

HERE = Path(__file__).parent / "expected"
PASSED = (ReferenceOps, ParallelGroup, torch.device, torch.dtype)
"""What layers share, and is not described with each."""

PLAIN = (bool, int, float, str, frozenset, slice, Tensor, type(None))
"""What is described with what has it."""


class Second(ParallelGroup):
    """The second of two ranks."""

    rank, size = 1, 2


def described(name: str, value: object) -> Iterator[str]:
    """Lines of `value` and what it is made of, each with the path to it."""
    if isinstance(value, PASSED) or name.endswith((".spec", ".matrix", ".parallel", ".ops", ".rope")):
        return
    if isinstance(value, Tensor):
        numbers = f" {value.flatten()[:3].tolist()}" if value.device.type != "meta" and value.numel() else ""
        yield f"{name}: {str(value.dtype)[6:]}{list(value.shape)}{numbers}"
    elif isinstance(value, PLAIN):
        yield f"{name}: {value!r}"
    elif isinstance(value, Mapping):
        for i, (key, one) in enumerate(value.items()):
            yield f"{name}.{i}: {brief(key)}"
            yield from described(f"{name}.{i}", one)
    elif isinstance(value, Sequence) and not hasattr(value, "_fields"):
        for i, one in enumerate(value):
            yield from described(f"{name}.{i}", one)
    elif isinstance(value, partial):
        yield f"{name}: {getattr(value.func, '__name__', '')} {value.args} {value.keywords}"
    elif callable(value) and hasattr(value, "__qualname__"):
        yield f"{name}: {value.__qualname__}"
    else:
        parts = {each.name: getattr(value, each.name) for each in fields(value)} if is_dataclass(value) else {}
        parts = {name: one for name, one in parts.items() if isinstance(one, Tensor) or one != default_of(value, name)}
        parts |= getattr(value, "_asdict", dict)() or vars(value) if not parts else {}
        inner = {part: [*described(f"{name}.{part}", one)] for part, one in parts.items()}
        plain = {part for part, one in parts.items() if isinstance(one, PLAIN)}
        short = [inner[part][0].removeprefix(f"{name}.") for part in parts if part in plain]
        yield f"{name}: {type(value).__name__} " + ", ".join(short)
        yield from (line for part, one in inner.items() if part not in plain for line in one)


def default_of(value: object, name: str) -> object:
    """The default of a dataclass's field."""
    return next(each.default for each in fields(value) if each.name == name)  # type: ignore[arg-type]


def placed(place: WeightSlot) -> str:
    cuts = ",".join(f"{cut.start}:{cut.stop}" for cut in place.shard)
    more = {"transposed": place.transposed, "any units": place.ignore_unit_dims, "buffer": place.buffer is not None}
    numbers = f"{place.mean:g} {place.std:.4f} {place.shift:g}"
    said = " ".join(word for word, there in more.items() if there)
    return f"{list(place.shape)}[{cuts}] -> {str(place.target.dtype)[6:]}{list(place.target.shape)} {numbers} {said}"


def folded(lines: Iterator[str]) -> list[str]:
    """Each line once: layers and experts that are alike are named by their numbers, in one line."""
    found: dict[str, list[str]] = {}
    for line in lines:
        pattern = re.compile(r"(blocks|layers|gate_up|down)\.(\d+)")
        found.setdefault(pattern.sub(r"\1.#", line), []).append("/".join(n for _, n in pattern.findall(line)))
    return [f"{line}  ({' '.join(each)})" if any(each) else line for line, each in found.items()]


def built(name: str) -> list[str]:
    """Lines of an architecture, on one rank and on the second of two."""
    config = {"architectures": [name], **FIELDS, **(EXPERTS if "moe" in name.lower() else {}), **OWN.get(name, {})}
    spec = read_spec(config | {"num_hidden_layers": 3} if name not in OWN else config)
    text = [f"{parameters(spec)} parameters"]
    for parallel in (ParallelGroup(), Second()):
        build = ModelBuilder(ops=ReferenceOps(), parallel=parallel, dtype=torch.bfloat16, device=torch.device("meta"))
        try:
            model = build_model(spec, build)
        except InvalidModel as error:
            text.append(f"refused on {parallel.size} ranks: {error}")
            continue
        text += [f"ignored {each}" for each in build.ignored] + [f"renamed {k} {v}" for k, v in build.renames.items()]
        text += [f"stack {each}" for each in build.stacks]
        text += folded(f"{each}: {placed(place)}" for each, places in build.slots.items() for place in places)
        parts = {key: value for key, value in vars(model).items() if key != "spec"}
        lines = folded(line for key, value in parts.items() for line in described(key, value))
        text += lines if parallel.size == 1 else [line for line in lines if "head" in line]
    return text


def test_llama_is_built_as_recorded() -> None:
    check(HERE / "built-llama.txt", "\n".join(built("LlamaForCausalLM")))


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_built_as_recorded(name: str) -> None:
    """What is different from Llama."""
    own, llama = built(name), built("LlamaForCausalLM")
    ours, theirs = {*own}, {*llama}
    text = [f"+ {line}" for line in own if line not in theirs] + [
        f"- {line[:60]}" for line in llama if line not in ours
    ]
    check(HERE / f"built-{ARCHITECTURES[name].__name__.lower()}.txt", "\n".join(text))
