"""How far logits are from transformers' in float32, by architecture and dtype, and what quantising does to a trained
model: writes the tables of docs/guides/models.md and quantization.md.

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
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.assembly.engine import build_canary
from quire.assembly.tokenizer import build_tokenizer
from quire.config import Settings
from quire.llm import LLM
from quire.models.registry import ARCHITECTURES, CLASSIFIER, DERIVED
from quire.ops.quantized import FLOAT8
from quire.weights.canary import PROBE, answers, compare, float8_layers, probe
from quire.weights.file_types import FILE_TYPES
from quire.weights.gguf_names import FAMILIES, VARIANTS
from quire.weights.load import DType, load_model, no_progress
from quire.weights.locate import embedded
from quire.weights.pooling import pools_alone
from quire.weights.quantize import quantize
from quire.weights.schemes import ONLINE
from tests import encoders
from tests.checkpoints import SHAPES, make
from tests.gguf_files import write
from tests.models.feeding import Feeder, prompts
from tests.models.test_published import PUBLISHED
from tests.models.test_published import spec as published
from tests.mtp import SHAPES as MTP_SHAPES
from tests.quantised import FORMATS
from tests.weights.test_quantised_families import FAMILIES as QUANTISED

GUIDES = Path(__file__).parents[2] / "docs/guides"
PAGES = {
    "errors": GUIDES / "models.md",
    "canaries": GUIDES / "quantization.md",
    "pooling": GUIDES / "models.md",
}
"""The page of each table."""
CPU = torch.device("cpu")
DTYPES: Mapping[DType, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


TEXTS = MappingProxyType(
    {"mistral3": "ministral3", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
)
"""Text models that are not named after the multimodal one."""

IMAGES, RECURRENT = "images", "float8 K/V"
LACKING: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v2": "`attention_bias` without `q_lora_rank`",
        "deepseek_v3": "`attention_bias` without `q_lora_rank`",
        "gemma3": "crops of images",
        "gemma4": "video, audio",
        "gpt2": "quantised checkpoints: matrices are stored transposed",
        "gpt_oss": "other clamps of the gate",
        "bamba": RECURRENT,
        "granitemoehybrid": f"with Mamba layers: {RECURRENT}",
        "nemotron_h": RECURRENT,
        "qwen3_5": f"video; {RECURRENT}",
        "qwen3_5_moe": f"video; {RECURRENT}",
        "qwen3_5_moe_text": RECURRENT,
        "qwen3_5_text": RECURRENT,
        "internlm3": "sequences longer than its context",
        "llama4": IMAGES,
        "mistral3": IMAGES,
        "qwen2_5_vl": "video",
        "qwen3_vl": "video",
        "qwen3_vl_moe": "video",
        "qwen3_next": RECURRENT,
        "olmoe": "`clip_qkv`",
    }
)
"""What is refused by name, or not loaded."""


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


def families(page: str) -> str:
    """A line for each `model_type` of the registry: its architectures, what is compared, the largest error in the
    table of errors of `page`, its name in GGUF files, if they are read, and what is not supported."""
    rows = [[cell.strip() for cell in line.split("|")] for line in part(page, "errors").splitlines()]
    errors = {row[1]: row[4] for row in rows if len(row) > 4}
    own = {model_type: names for model_type, names in names_by_type().items() if not pools(names)}
    compared = [shape.split("-")[0] for shape in SHAPES]
    quantised = {shape.split("-")[0] for shape in QUANTISED}
    drafting = {shape.split("-")[0] for shape in MTP_SHAPES}
    longest: dict[str, int] = {}
    for spec in map(published, PUBLISHED):
        longest[spec.architecture] = max(spec.context, longest.get(spec.architecture, 0))
    titles = "`model_type`", "`architectures`", "checkpoints compared", "largest float32 error", "context", "drafts"
    lines = [f"| {' | '.join((*titles, 'formats', 'GGUF', 'not supported'))} |", "|---" * 9 + "|"]
    for model_type in sorted(own):
        names = own[model_type]
        files = ", ".join(
            f"`{known}`"
            for known, family in FAMILIES.items()
            if {family.architecture, *(each.architecture for each in VARIANTS.get(known, {}).values())} & {*names}
        )
        count = str(compared.count(model_type) or "as the text model")
        context = max((longest.get(name, 0) for name in names), default=0)
        # A multimodal model is its text model, which is named as it is.
        text = next((t for t in (model_type, f"{model_type}_text", TEXTS.get(model_type, "")) if t in compared), "")
        formats = f"plain, {len(FORMATS)} quantised" if text in quantised else "plain"
        cells = (
            ", ".join(f"`{name}`" for name in names),
            count,
            errors.get(model_type, ""),
            f"{context:,}" if context else "",
            ("n-gram, model, MTP" if text in drafting else "n-gram, model") if text else "",
            formats,
            files,
            LACKING.get(model_type, ""),
        )
        lines.append(f"| {model_type} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def names_by_type() -> dict[str, list[str]]:
    """Architectures of the registry by `model_type`. One that none stands for belongs to the one of its class whose
    name it shares."""
    found: dict[str, list[str]] = {}
    for kind in {id(each): each for each in ARCHITECTURES.values()}.values():
        known = {name: model_type for name, model_type in kind.architectures.items() if model_type}
        for name, model_type in kind.architectures.items():
            stem = name.removesuffix("ForMaskedLM").removesuffix(CLASSIFIER)
            names = found.setdefault(model_type or known[f"{stem}Model"], [])
            if name not in names:
                names.append(name)
    return found


def pools(names: Iterable[str]) -> bool:
    """Whether models of these architectures give vectors and classes alone."""
    return all(map(pools_alone, names))


def pooled_errors(folder: Path, family: str, labels: int) -> list[float]:
    """Our largest error a dtype: of vectors before they are scaled, or of the numbers of classes."""
    model = encoders.write(folder, family, labels=labels)
    texts, core = encoders.texts(), encoders.tokenizer()
    given, how = [core.encode(text).ids for text in texts], encoders.FAMILIES[family].pooling
    if labels:
        wanted = [encoders.logits(model, ids) for ids in given]
    else:
        wanted = [encoders.pooled(encoders.states(model, ids), how) for ids in given]
    found = []
    for dtype in DTYPES:
        with LLM(str(folder), dtype=dtype) as llm:
            if labels:
                ours = [each.outputs.probs for each in llm.classify(texts, use_activation=False)]
            else:
                ours = [each.outputs.embedding for each in llm.embed(texts, normalize=False)]
        pairs = zip(ours, wanted, strict=True)
        found.append(max(float((torch.tensor(mine) - their).abs().max()) for mine, their in pairs))
    return found


def pooling() -> str:
    """A line for each family of models that pool: what is compared, and the largest errors in each dtype."""
    own = names_by_type()
    lines = [
        "| `model_type` | `architectures` | compared | " + " | ".join(DTYPES) + " |",
        "|---" * (3 + len(DTYPES)) + "|",
    ]
    with tempfile.TemporaryDirectory() as place:
        for name, family in encoders.FAMILIES.items():
            labels = (0, 3) if family.classifier else (0,)
            worst = [pooled_errors(Path(place) / f"{name}-{count}", name, count) for count in labels]
            columns = [max(column) for column in zip(*worst, strict=True)]
            cells = (
                name if name == family.model_type else f"{family.model_type} ({name})",
                ", ".join(f"`{each}`" for each in pooling_names(family.model_type, own)),
                "vectors, classes" if family.classifier else "vectors",
                *(f"{error:.1e}" if i == 0 else f"{error:.2g}" for i, error in enumerate(columns)),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pooling_names(model_type: str, own: Mapping[str, list[str]]) -> list[str]:
    """Architectures of a `model_type` that pool."""
    names = own[model_type]
    return names if pools(names) else [name for name, decoder in DERIVED.items() if decoder in names]


def part(page: str, name: str) -> str:
    """What is between the marks called `name`."""
    return page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def canaries(types: Iterable[str] = FILE_TYPES) -> str:
    """What the canary finds of the embedded model, quantised on request, and stored in GGUF's types: MXFP4, and of
    those that `quire quantize` writes `types`."""
    rows = []
    settings = Settings.of()
    for method in ONLINE:
        canary = build_canary(settings)
        assert canary is not None
        model = load_model(embedded(), dtype="float32", quantization=method, canary=canary)
        assert canary.quality is not None
        rows.append((f"`--quantization {method}`", canary.quality))
    model = load_model(embedded(), dtype="float32")
    tokens = build_tokenizer(settings).encode(PROBE)
    for name, form in FLOAT8.items():
        rows.append((f"`--kv-cache-dtype {name}`", float8_layers(model, tokens, CPU, form=form)[1]))
    reference = AutoModelForCausalLM.from_pretrained(embedded(), dtype=torch.float32)
    before = answers(model, probe(model.spec.vocab, tokens), CPU)
    with tempfile.TemporaryDirectory() as place:
        for kind in types:
            path = Path(place) / f"{kind}.gguf"
            quantize(embedded(), path, kind, check=False, progress=no_progress)
            after = answers(load_model(path, dtype="float32"), probe(model.spec.vocab, tokens), CPU)
            rows.append((f"`--type {kind}`, a GGUF file", compare(before, after, probe(model.spec.vocab, tokens))))
        for kind in ("MXFP4",):
            path = Path(place) / f"{kind}.gguf"
            write(path, reference, kind)
            after = answers(load_model(path, dtype="float32"), probe(model.spec.vocab, tokens), CPU)
            rows.append((f"GGUF {kind}", compare(before, after, probe(model.spec.vocab, tokens))))
    lines = [f"| {name} | {100 * q.agreement:.1f} % | {q.kl:.1e} | {q.nll - q.before:+.4f} |" for name, q in rows]
    return "\n".join(["| | top-1 agreement | KL, nats | loss, nats |", "|---|---|---|---|", *lines]) + "\n"


def written(text: str, name: str, made: str) -> str:
    """The page with the part between the marks called `name` made anew."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    return text.partition(begin)[0] + begin + made + end + text.partition(end)[2]


def main() -> None:
    for name, made in (("errors", table(SHAPES)), ("canaries", canaries()), ("pooling", pooling())):
        PAGES[name].write_text(written(PAGES[name].read_text("utf-8"), name, made), "utf-8")
    models = PAGES["errors"]
    models.write_text(written(models.read_text("utf-8"), "families", families(models.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
