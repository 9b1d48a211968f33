"""`python -m benchmarks.price`: what each feature of a request costs, as its speed's ratio to plain decoding.

Models have random weights. `run` starts one model and measures each feature at each number of sequences, in turns with
plain requests of the same prompts and lengths; `http` does the same through a server. Both append rows of JSON to a
file, so that several runs add up to one matrix, and `draw` and `page` show it. A new feature is an entry of FEATURES, a
new format an entry of MODELS.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import click

from benchmarks.card import needed, prepare_all
from benchmarks.http import serving
from benchmarks.price_page import draw, page
from benchmarks.shapes import AWQ, SHAPES, byte_words, write
from benchmarks.workloads import prompts
from quire import heap
from quire.assembly.engine import count_compiles
from quire.bench.load_client import LoadJob, run_clients, summarize
from quire.bench.monitor import environment, revision
from quire.errors import QuireError
from quire.llm import LLM
from quire.model_runner import graphs
from quire.models.registry import read_spec
from quire.parsers.tools.styles import HERMES
from quire.server.limits import Limits
from quire.server.tools import make_tool_set
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.tokenization.tokenizer import Tokenizer
from quire.types import RequestOutput, SamplingParams, StructuredOutputsParams

Row = dict[str, Any]
Span = tuple[int, int]
"""The least and the most of a number of tokens."""


# ---------------------------------------------------------------- models


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """shape: of SHAPES. config: fields of config.json that differ from it. options: of `LLM`. draft: the shape that
    drafts for it; without one, drafts are looked up in the prompt."""

    shape: str
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: str = ""


SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 4096,
    "bos_token_id": 4094,
    "eos_token_id": 4095,
}

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "0.6B bf16": Model(shape="qwen3-0.6b"),
        "8B bf16": Model(shape="qwen3-8b", draft="qwen3-0.6b"),
        "8B fp8": Model(shape="qwen3-8b", options={"quantization": "fp8"}, draft="qwen3-0.6b"),
        "8B int4": Model(shape="qwen3-8b", config={"quantization_config": AWQ}, draft="qwen3-0.6b"),
        "30B-A3B": Model(shape="qwen3-30b-a3b", draft="qwen3-0.6b"),
        "30B-A3B fp8": Model(shape="qwen3-30b-a3b", options={"quantization": "fp8"}, draft="qwen3-0.6b"),
        "30B-A3B int4": Model(shape="qwen3-30b-a3b", config={"quantization_config": AWQ}, draft="qwen3-0.6b"),
        "gpt-oss-20B mxfp4": Model(shape="gpt-oss-20b"),
        "tiny": Model(shape="qwen3-0.6b", config=SMALL),
    }
)
"""The columns of the matrix, and one for CPUs, to try commands out."""

SIZES = (64, 256, 16, 1)
"""Sequences at once, in the order in which they are measured."""


# ---------------------------------------------------------------- one batch of requests


@dataclass(slots=True)
class Batch:
    """Requests that plain decoding and a feature both answer. new: how many tokens each is to get. answers: plain's."""

    prompts: list[list[int]]
    new: list[int]
    turn: int
    vocab: int
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def random(self, i: int) -> random.Random:
        """Random choices for request `i`: others in each turn, the same in each run."""
        return random.Random(f"{self.turn} {i}")


class Speed(NamedTuple):
    """tok_s: sampled tokens a second, without `forced` ones, where a structure allowed one token only."""

    tok_s: float
    tokens: int
    forced: int

    @property
    def share(self) -> float:
        """All tokens for each sampled one."""
        return self.tokens / (self.tokens - self.forced)


Pair = tuple[Speed, Speed]
"""The speed of a feature, and the one it is compared with."""


class Bench:
    """A running model. reference: answers plain requests; another engine where options are measured.

    late: kernels compiled and graphs captured since it was ready. forced: tokens of an answer of each feature whose
    structure leaves no choice.
    """

    def __init__(self, llm: LLM, reference: LLM, vocab: int, late: list[Row]) -> None:
        self.llm = llm
        self.reference = reference
        self.vocab = vocab
        self.late = late
        self.fresh = itertools.count(1)
        self.forced: dict[str, int] = {}

    def warm(self, names: Sequence[str]) -> float:
        """Answer a few requests, plain and of each structure; seconds of the first structure, which reads the
        vocabulary. Before, graphs that a server would capture while it is idle are: beside what other threads do here,
        such as reading vocabularies, each would take as long as that."""
        ids, new = prompts(8, (32, 64), (8, 8), seed=99, ids=usual_ids(self.vocab))
        for llm in {id(each): each for each in (self.llm, self.reference)}.values():
            prepare_all(llm)
            ask(llm, ids, [params(n) for n in new])
        forms = {name: FEATURES[name].structure for name in names}
        seconds = 0.0
        for name, form in forms.items():
            if form is not None:
                self.forced[name] = forced_tokens(form(0), self.llm.get_tokenizer())
                began = time.perf_counter()
                ask(self.llm, ids, [params(n, structured_outputs=form(0)) for n in new])
                seconds = seconds or time.perf_counter() - began
        heap.settled()
        return seconds

    def batch(self, size: int, turn: int, prompt: Span, new: Span) -> Batch:
        """Random requests, others in each turn."""
        ids, lengths = prompts(size, prompt, new, seed=1000 * size + turn, ids=usual_ids(self.vocab))
        return Batch(ids, lengths, turn, self.vocab)

    def plain(self, batch: Batch) -> Speed:
        """Answer the batch without any feature, and keep the answers."""
        speed, done = ask(self.reference, batch.prompts, [params(n) for n in batch.new])
        batch.answers = [each.outputs[0].token_ids for each in done]
        return speed

    def run(self, name: str, batch: Batch, structure: StructuredOutputsParams | None = None) -> Speed:
        """Answer the batch with a feature. A structured answer samples as many tokens as the plain one."""
        feature = FEATURES[name]
        forced = self.forced.get(name, 0)
        if structure is None and feature.structure is not None:
            structure = feature.structure(0)
        count = len(batch.new) // feature.n
        asked = [
            params(
                batch.new[i] + forced, **{"structured_outputs": structure, "n": feature.n, **feature.fields(batch, i)}
            )
            for i in range(count)
        ]
        return ask(self.llm, batch.prompts[:count], asked, forced)[0]


def usual_ids(vocab: int) -> Span:
    return 1000, min(50000, vocab)


def params(new: int, **fields: Any) -> SamplingParams:
    """Greedy, without text, and of exactly `new` tokens; `fields` differ."""
    plain = {"temperature": 0.0, "max_tokens": new, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(plain | fields))


def ask(
    llm: LLM, ids: Sequence[Sequence[int]], asked: Sequence[SamplingParams], forced: int = 0
) -> tuple[Speed, list[RequestOutput]]:
    """Answer all of them at once, from an empty prefix cache. forced: tokens of each answer that do not count.

    Raises ClickException where an answer is shorter than asked for: its time could not be compared.
    """
    llm.reset_prefix_cache()
    began = time.perf_counter()
    done = llm.generate([list(each) for each in ids], list(asked), use_tqdm=False)
    seconds = time.perf_counter() - began
    answers = [one for each in done for one in each.outputs]
    made = sum(len(one.token_ids) for one in answers)
    wanted = sum((one.max_tokens or 0) * one.n for one in asked)
    if made != wanted:
        why = {one.stop_reason for one in answers if one.finish_reason != "length"}
        raise click.ClickException(f"{made} tokens were made, not {wanted}: answers ended early ({why})")
    out = forced * len(answers)
    return Speed((made - out) / seconds, made, out), done


# ---------------------------------------------------------------- structures

WALK = 128
"""Tokens of an answer that are tried to find those that are forced: all that comes before the free texts."""


def json_schema(i: int) -> StructuredOutputsParams:
    """Schema `i` of many alike: a text of fixed length, then more free ones than an answer can hold."""
    letters = "".join(random.Random(i).sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 20))
    code: Mapping[str, Any] = {"type": "string", "pattern": f"^[{letters}]{{12}}$"}
    return StructuredOutputsParams(json=listing(code), disable_any_whitespace=True)


def listing(code: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with a code and a list. Names are short: each letter is a forced token."""
    fields = {"a": code, "t": {"type": "array", "items": {"type": "string"}, "minItems": 1000}}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def regex(i: int) -> StructuredOutputsParams:
    """Words of small letters, as many as there is room for."""
    return StructuredOutputsParams(regex="[a-z ]*")


def tools(i: int) -> StructuredOutputsParams:
    """What the server makes of two tools with `tool_choice` "required", for models that write calls as Hermes does."""
    schema = listing({"type": "string", "pattern": "^[A-Z0-9]{12}$"})
    listed = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("look", "find")]
    made = make_tool_set(listed, "required", None, HERMES, Limits()).structure(None)
    assert made is not None
    return made


def forced_tokens(structure: StructuredOutputsParams, tokenizer: Tokenizer) -> int:
    """How many of an answer's tokens are the only ones allowed, along the answer of the least token ids.

    The structures here leave no choice at a fixed number of places before their free texts. (A free text that ends
    adds some; with random weights that is one token in as many as there are.)
    """
    constraint = LlguidanceCompiler(lambda: tokenizer)(structure)()
    tokens: list[int] = []
    forced = 0
    for _ in range(WALK):
        bits = int.from_bytes(constraint.masks(tokens, ())[0] or b"", "little")
        forced += bits.bit_count() == 1
        tokens.append((bits & -bits).bit_length() - 1)
    return forced


# ---------------------------------------------------------------- features


def usual(bench: Bench, name: str, batch: Batch, plain: Speed) -> Pair:
    """All requests have the feature."""
    return bench.run(name, batch), plain


def beside(bench: Bench, name: str, batch: Batch, plain: Speed) -> Pair:
    """Plain requests beside 8 that last longer, with the feature's structure, compared with themselves alone."""
    form = FEATURES[name].structure
    ids = batch.prompts[:-8]
    asked = [params(n) for n in batch.new[:-8]]
    longer = max(batch.new) + 16
    others = params(longer, structured_outputs=form and form(0))
    alone = ask(bench.llm, ids, asked)[0]
    with ThreadPoolExecutor(1) as thread:
        rest = thread.submit(bench.llm.generate, batch.prompts[-8:], others, use_tqdm=False)
        speed = ask(bench.llm, ids, asked)[0]
        rest.result()
    return speed, alone


def first_run(bench: Bench, name: str, batch: Batch, plain: Speed) -> Pair:
    """A structure that was never used before, compared with the same requests again."""
    structure = json_schema(next(bench.fresh))
    first = bench.run(name, batch, structure)
    return first, bench.run(name, batch, structure)


def no_fields(batch: Batch, i: int) -> Mapping[str, Any]:
    return {}


def always(**fields: Any) -> Callable[[Batch, int], Mapping[str, Any]]:
    """The same fields for every request."""
    return lambda batch, i: fields


def bias(batch: Batch, i: int) -> Mapping[str, Any]:
    """300 tokens, as many as OpenAI takes."""
    chance = batch.random(i)
    return {"logit_bias": {token: chance.uniform(-10, 10) for token in chance.sample(range(batch.vocab), 300)}}


def allowed(batch: Batch, i: int) -> Mapping[str, Any]:
    """Up to 4,000 tokens."""
    return {"allowed_token_ids": batch.random(i).sample(range(batch.vocab), min(4000, batch.vocab // 2))}


def bad_words(batch: Batch, i: int) -> Mapping[str, Any]:
    """20 sequences of up to 4 tokens: 4 that the plain answer contains, and others."""
    answer = batch.answers[i]
    chance = batch.random(i)
    hit = [answer[length * len(answer) // 5 :][:length] for length in range(1, 5)]
    others = [tuple(chance.choices(range(batch.vocab), k=1 + k % 4)) for k in range(16)]
    return {"bad_words_token_ids": (*hit, *others)}


def min_tokens(batch: Batch, i: int) -> Mapping[str, Any]:
    """Stop tokens with which the plain answer would end."""
    answer = batch.answers[i]
    return {"min_tokens": batch.new[i], "stop_token_ids": {answer[0], answer[len(answer) // 2]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """fields: of request `i` of a batch. structure: the `i`th of many alike. n: answers to a prompt. least: the fewest
    sequences that it can be measured with. short: prompts of the least length only."""

    fields: Callable[[Batch, int], Mapping[str, Any]] = no_fields
    structure: Callable[[int], StructuredOutputsParams] | None = None
    measure: Callable[[Bench, str, Batch, Speed], Pair] = usual
    n: int = 1
    least: int = 1
    short: bool = False


PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
ABSENT = ("STOP HERE", "END OF TEXT", "###", "Observation:")

FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "logprobs": Feature(fields=always(logprobs=5)),
        "prompt_logprobs": Feature(fields=always(prompt_logprobs=5), short=True),
        "bias": Feature(fields=bias),
        "allowed": Feature(fields=allowed),
        "bad words": Feature(fields=bad_words),
        "min_tokens": Feature(fields=min_tokens),
        "penalties": Feature(fields=always(temperature=0.7, **PENALTIES)),
        "seeds": Feature(fields=lambda batch, i: {"temperature": 1.0, "seed": i}),
        "top-k/p": Feature(fields=always(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)),
        "JSON schema": Feature(structure=json_schema),
        "regex": Feature(structure=regex),
        "tools": Feature(structure=tools),
        "first run of a schema": Feature(structure=json_schema, measure=first_run),
        "beside 8 structured": Feature(structure=json_schema, measure=beside, least=16),
        "beside 8 plain": Feature(measure=beside, least=16),
        "n = 4": Feature(fields=always(temperature=0.7), n=4, least=4),
        "stop strings": Feature(fields=always(stop=ABSENT, detokenize=True)),
        "drafts": Feature(),
        "deterministic": Feature(),
    }
)

OPTIONS = ("drafts", "deterministic")
"""Features that are options of the engine, each measured in a process of its own beside an engine without it."""


# ---------------------------------------------------------------- the matrix


class Group(NamedTuple):
    """Features that are measured together, in turns with one plain run."""

    size: int
    names: tuple[str, ...]


def plan(names: Sequence[str], sizes: Sequence[int], together: int = 4) -> list[Group]:
    """All cells, in groups of one size and one length of prompts."""
    groups = []
    for size in sizes:
        for short in (False, True):
            fit = [name for name in names if FEATURES[name].short == short and FEATURES[name].least <= size]
            groups += [Group(size, tuple(fit[i : i + together])) for i in range(0, len(fit), together)]
    return groups


def measured(bench: Bench, group: Group, repeat: int, prompt: Span, new: Span) -> Iterator[Row]:
    """A row for plain and for each feature: medians of `repeat` turns. A feature that fails has `error` instead.

    `late` in a row: what was compiled or captured meanwhile.
    """
    if FEATURES[group.names[0]].short:
        prompt = (prompt[0], prompt[0])
    pairs: dict[str, list[Pair]] = {name: [] for name in ("plain", *group.names)}
    failed: dict[str, str] = {}
    seen = len(bench.late)
    for turn in range(repeat):
        batch = bench.batch(group.size, turn, prompt, new)
        at = turn % len(group.names)
        for name in ("plain", *group.names[at:], *group.names[:at]):
            try:
                if name == "plain":
                    plain = bench.plain(batch)
                    pairs[name].append((plain, plain))
                elif len(pairs["plain"]) > turn:
                    pairs[name].append(FEATURES[name].measure(bench, name, batch, pairs["plain"][turn][0]))
            except (QuireError, click.ClickException) as error:
                failed |= dict.fromkeys(group.names if name == "plain" else [name], str(error)[:300])
            for one in bench.late[seen:]:
                one.setdefault("during", f"{name} at {group.size}")
    where = {"size": group.size, "prompt": prompt, "new": new}
    for name, found in pairs.items():
        late = [one for one in bench.late[seen:] if one["during"] == f"{name} at {group.size}"]
        if name in failed or found:
            row = {"error": failed[name]} if name in failed else compared(found)
            yield {"feature": name, **where, **row, "late": late}


def compared(pairs: Sequence[Pair]) -> Row:
    """Medians. ratio_all: of all tokens, forced ones included."""
    ratios = [one.tok_s / other.tok_s for one, other in pairs]
    every = [one.tok_s * one.share / (other.tok_s * other.share) for one, other in pairs]
    last = pairs[-1][0]
    return {
        "tok_s": round(statistics.median(one.tok_s for one, _ in pairs)),
        "reference_tok_s": round(statistics.median(other.tok_s for _, other in pairs)),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_all": round(statistics.median(every), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "tokens": last.tokens,
        "forced": last.forced,
    }


@contextmanager
def watched(late: list[Row], device: str) -> Iterator[None]:
    """While entered, every kernel that is compiled and every graph that is captured is a row in `late`."""
    inner = vars(graphs)["captured"]

    def capture(*given: Any) -> Any:
        began = time.perf_counter()
        made = inner(*given)
        late.append({"what": "capture", "ms": round(1e3 * (time.perf_counter() - began), 1)})
        return made

    count_compiles(device)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(graphs, "captured", capture))
        if device != "cpu":
            compilation = import_module("triton").knobs.compilation  # not installed without CUDA
            listener = compilation.listener

            def compiled(**given: Any) -> None:
                listener(**given)
                late.append({"what": given["src"].name, "ms": round(given["times"].total / 1e3, 1)})

            patches.enter_context(mock.patch.object(compilation, "listener", compiled))
        yield


def engines(folder: Path, name: str, option: str, most: int, tokens: int, running: ExitStack) -> tuple[LLM, LLM]:
    """An engine with the option, and one without, both of random weights; the same one where there is no option.

    most, tokens: sequences at once, and tokens of one, for which there is to be K/V memory.
    """
    model = MODELS[name]
    place = write(folder, model.shape, tokenizer=byte_words, config=model.config)
    common: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": max(SIZES), "max_model_len": 4096}
    common |= model.options
    if not option:
        llm = running.enter_context(LLM(str(place), **common))
        return llm, llm
    spec = read_spec({**SHAPES[model.shape], **model.config})
    # Half as much again: a draft model has K/V too.
    common["kv_cache_memory_bytes"] = int(1.5 * most * (tokens + 128) * spec.kv_bytes(2)) + (256 << 20)
    if option == "deterministic":
        changed: dict[str, Any] = {"deterministic": True}
    elif model.draft:
        small = write(folder / "draft", model.draft, tokenizer=byte_words)
        drafts = {"method": "draft_model", "model": str(small), "synthetic_acceptance_rate": 0.7}
        changed = {"speculative_config": json.dumps(drafts)}
    else:
        changed = {"speculative_config": json.dumps({"method": "ngram"})}
    reference = running.enter_context(LLM(str(place), **common))
    return running.enter_context(LLM(str(place), **common, **changed)), reference


# ---------------------------------------------------------------- commands


@click.group("price")
def command() -> None:
    """What each feature of a request costs, as its speed's ratio to plain decoding."""


ROWS = click.argument("rows", type=click.Path(path_type=Path, dir_okay=False))
LENGTHS: Mapping[str, Any] = {"nargs": 2, "type": int, "show_default": True}
COMMIT = click.option("--commit", default=revision, help="What is measured, where this is no checkout.")


@command.command("run")
@click.argument("model", type=click.Choice(list(MODELS)))
@ROWS
@click.option("--option", type=click.Choice(["", *OPTIONS]), default="", help="Measure this option of the engine.")
@click.option("--feature", "names", multiple=True, type=click.Choice(list(FEATURES)), help="Only these.")
@click.option("--size", "sizes", multiple=True, type=int, default=SIZES, show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Turns; medians count.")
@click.option("--seconds", default=540.0, show_default=True, help="From the start; later no further cells are begun.")
@click.option("--prompt", default=(100, 300), help="Prompt tokens.", **LENGTHS)
@click.option("--new", default=(100, 200), help="New tokens.", **LENGTHS)
@COMMIT
def run(
    model: str,
    rows: Path,
    option: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    repeat: int,
    seconds: float,
    prompt: Span,
    new: Span,
    commit: str,
) -> None:
    """Measure MODEL offline, through `LLM`, and append to ROWS."""
    began = time.monotonic()
    if model != "tiny":
        needed("`run tiny` tries the commands out")
    chosen = (option,) if option else tuple(n for n in names or FEATURES if n not in OPTIONS)
    left = plan(chosen, sizes)
    late: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        llm, reference = engines(Path(folder), model, option, max(sizes), prompt[1] + new[1], running)
        ready = time.monotonic() - began
        about = llm._engine.description
        running.enter_context(watched(late, about.device))
        vocab = llm.get_tokenizer().vocab_size
        bench = Bench(llm, reference, vocab, late)
        structured = bench.warm(chosen)
        start = {"model": model, "option": option, "ready_s": ready, "first_structure_s": structured, "late": [*late]}
        append(rows, {**start, "environment": environment() | {"revision": commit}})
        while left and time.monotonic() - began < seconds:
            for row in measured(bench, left.pop(0), repeat, prompt, new):
                if row["feature"] != "plain" or not option:
                    append(rows, {"model": model, **row})
    if left:
        missing = [f"{name} at {group.size}" for group in left for name in group.names]
        append(rows, {"model": model, "missing": missing})
        click.echo(f"not measured within {seconds:g} s: {', '.join(missing)}", err=True)


def append(path: Path, row: Row) -> None:
    """Print a row and append it to the file, at once: a run may be ended from outside."""
    line = json.dumps(row)
    click.echo(line)
    with path.open("a") as file:
        file.write(line + "\n")


@command.command("http")
@click.argument("model", type=click.Choice(list(MODELS)))
@ROWS
@click.option("--streams", default=64, show_default=True, help="Requests at once.")
@click.option("--requests", "count", default=192, show_default=True, help="Requests of one measurement.")
@click.option("--processes", default=4, show_default=True, help="Client processes at most.")
@click.option("--port", default=18322, show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Turns; medians count.")
@click.option("--new", default=(100, 200), help="New tokens.", **LENGTHS)
@COMMIT
def http(
    model: str, rows: Path, streams: int, count: int, processes: int, port: int, repeat: int, new: Span, commit: str
) -> None:
    """Measure MODEL through one server, plain, with log-probabilities and with a JSON schema in turns."""
    if model != "tiny":
        needed("`http tiny` tries the commands out")
    chosen = MODELS[model]
    structure = json_schema(0)
    schema = {"json": structure.json, "disable_any_whitespace": True}
    kinds: Mapping[str, Mapping[str, Any]] = {
        "plain": {},
        "logprobs": {"logprobs": 5},
        "JSON schema": {"structured_outputs": schema},
    }
    pairs: dict[str, list[Pair]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        place = write(Path(folder), chosen.shape, tokenizer=byte_words, config=chosen.config)
        tokenizer = Tokenizer.from_folder(place)
        forced = {"JSON schema": forced_tokens(structure, tokenizer)}
        more = [f"--{name}={value}" for name, value in chosen.options.items()]

        def sent(kind: str, turn: int) -> Speed:
            ids, lengths = prompts(count, (128, 256), new, seed=turn, ids=usual_ids(tokenizer.vocab_size))
            extra = forced.get(kind, 0)
            job = LoadJob(host="127.0.0.1", port=port, model=model, streams=streams, prompts=ids, output_lens=[])
            job.output_lens = [n + extra for n in lengths]
            job.salt = f"{kind} {turn}"
            job.extra = dict(kinds[kind])
            found = summarize(run_clients(job, processes))
            if found["failed"]:
                raise click.ClickException(f"{found['failed']} of {count} requests failed ({kind})")
            out = extra * count
            return Speed((found["tokens"] - out) / found["seconds"], found["tokens"], out)

        with serving(place, model, port, *more) as ready:
            append(
                rows,
                {
                    "model": model,
                    "option": "http",
                    "ready_s": ready,
                    "environment": environment() | {"revision": commit},
                },
            )
            for turn in range(-1, repeat):  # the first, which is not counted, warms connections and caches
                speeds = {kind: sent(kind, turn) for kind in kinds}
                for kind, speed in speeds.items() if turn >= 0 else ():
                    pairs[kind].append((speed, speeds["plain"]))
    for kind, found in pairs.items():
        row = {"model": model, "feature": f"{kind}, HTTP", "size": streams, "prompt": (128, 256), "new": new}
        append(rows, {**row, **compared(found)})


MATRIX: Mapping[str, Any] = {"features": [*FEATURES], "models": [m for m in MODELS if m != "tiny"], "sizes": SIZES}
SOURCES = click.argument("rows", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
TO = click.argument("to", type=click.Path(path_type=Path, dir_okay=False))


@command.command("draw")
@SOURCES
@TO
def draw_command(rows: tuple[Path, ...], to: Path) -> None:
    """Draw the matrix in ROWS as a heat map, an image of TO's kind (.png, .svg). Needs matplotlib."""
    draw(rows, to, **MATRIX)


@command.command("page")
@SOURCES
@TO
@click.option("--picture", default="", help="Address of the heat map, for the page.")
def page_command(rows: tuple[Path, ...], to: Path, picture: str) -> None:
    """Write the matrix in ROWS as a page of Markdown."""
    to.write_text(page(rows, picture, **MATRIX), encoding="utf-8")


if __name__ == "__main__":
    command()
