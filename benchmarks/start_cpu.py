"""`python -m benchmarks.start_cpu`: how soon `quire serve` answers on this CPU, with weights in several formats.

Models are of random weights at a public shape, with a vocabulary and merges as large as a real one's: a start reads
them, too. Two source trees are measured in turns. What to read is seconds of the processor's time, which hold on a busy
machine, too: those of the engine's main thread are one after the other, what readers and packing take is beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.cpu_formats import INT4
from benchmarks.front import child
from benchmarks.servers import spawned
from quire.bench.peers import checkpoints
from quire.bench.shapes import SHAPES
from quire.weights.load import no_progress
from quire.weights.quantize import quantize

FORMATS = ("bf16", "q8_0", "q4_k_m", "int8", "int4")
GGUF = ("q8_0", "q4_k_m")
MERGES: Mapping[str, int] = MappingProxyType({"smollm2-135m": 48_900, "llama-3.2-1b": 280_147})
"""As many as SmolLM2's and Llama 3's tokenizers have."""

GROUP = 64
"""Columns of a scale in int4, see `benchmarks.cpu_formats.INT4`."""


class Start(NamedTuple):
    """Seconds. wall: by the clock, until the server is ready. front, main, engine: of the processor until then, of the
    server's process, of the engine's main thread, and of all of the engine's process. token: until the first token of
    50 then, by the clock; token_main: of the engine's main thread."""

    wall: float
    front: float
    main: float
    engine: float
    token: float
    token_main: float


@click.command("start_cpu")
@click.option("--shapes", default=",".join(MERGES), show_default=True)
@click.option("--formats", default=",".join(FORMATS), show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Turns, of which medians count.")
@click.option("--threads", default=1, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where models are written, and kept [temporary].")
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Another checkout, to be compared with.")
@click.option("--port", default=18361, show_default=True)
def command(
    shapes: str, formats: str, repeat: int, threads: int, folder: Path | None, against: Path | None, port: int
) -> None:
    """Start servers of models in several formats, in turns: seconds until they are ready."""
    trees = {"this": Path(__file__).parents[1], **({} if against is None else {"that": against})}
    with tempfile.TemporaryDirectory() as place:
        for shape, kind in product(shapes.split(","), formats.split(",")):
            model, more = written(folder or Path(place), shape, kind)
            found: dict[str, list[Start]] = {name: [] for name in trees}
            for turn in range(repeat + 1):
                for name, tree in list(trees.items())[:: -1 if turn % 2 else 1]:
                    argv = ["serve", str(model), "--device", "cpu", "--dtype", "bfloat16", *more]
                    row = start(tree, [*argv, "--threads", str(threads), "--port", str(port)], port, place)
                    what = {"shape": shape, "format": kind, "tree": name, "turn": turn}
                    click.echo(json.dumps({**what, **{key: round(value, 2) for key, value in row._asdict().items()}}))
                    if turn:  # the first judges the model
                        found[name].append(row)
            Console(width=120).print(table(f"{shape} in {kind}", found))


def table(title: str, found: Mapping[str, list[Start]]) -> Table:
    """Medians, a row for each tree."""
    made = Table(title=f"{title}: seconds, medians")
    for heading in ("tree", *Start._fields):
        made.add_column(heading, justify="right")
    for name, rows in found.items():
        made.add_row(name, *(f"{statistics.median(column):.2f}" for column in zip(*rows, strict=True)))
    return made


def start(tree: Path, argv: list[str], port: int, place: str) -> Start:
    """Start a server of a checkout's code, ask for a token, and stop it. place: a folder for what it keeps."""
    path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(Path(place, tree.name))}
    began = time.perf_counter()
    with spawned([sys.executable, "-P", "-m", "quire", *argv], port, {**os.environ, **environment}) as pid:
        wall, engine = time.perf_counter() - began, child(pid)
        before, front, all_threads = main_thread(engine), whole(pid), whole(engine)
        began = time.perf_counter()
        ask(port, {"model": argv[1], "prompt": list(range(300, 350)), "max_tokens": 1, "ignore_eos": True})
        token = time.perf_counter() - began
        return Start(wall, front, before, all_threads, token, main_thread(engine) - before)


def ask(port: int, body: Mapping[str, object]) -> None:
    """Wait for an answer of the server."""
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def main_thread(pid: int) -> float:
    """Seconds of processor time that a process's first thread has used."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def whole(pid: int) -> float:
    """Seconds of processor time that a process has used, threads that have ended included."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


# -------------------------------------------------------------------- models


def written(folder: Path, shape: str, kind: str) -> tuple[Path, list[str]]:
    """A model of a shape and format, written unless it is there, and the options that it is served with."""
    plain = folder / f"{shape}-bf16"
    if not plain.exists():
        checkpoints.write_folder(plain, SHAPES[shape], "bfloat16")
        vocabulary(SHAPES[shape]["vocab_size"], MERGES[shape]).save(str(plain / "tokenizer.json"))
        (plain / "tokenizer_config.json").write_text(json.dumps({"eos_token": special(0)}))
    if kind in GGUF:
        path = folder / f"{shape}-{kind}.gguf"
        if not path.exists():
            quantize(plain, path, kind, check=False, progress=no_progress)
        return path, []
    if kind == "int4":
        return write_int4(plain, folder / f"{shape}-int4"), []
    return plain, [] if kind == "bf16" else ["--quantization", kind]


def write_int4(plain: Path, folder: Path) -> Path:
    """A checkpoint in compressed-tensors' 4 bits, of random numbers: what a start takes does not depend on them."""
    if folder.exists():
        return folder
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(INT4)}))
    draw, made = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, weight in checkpoints.tensors(SHAPES[folder.name.removesuffix("-int4")]):
        if "_proj" not in name:
            made[name] = weight.bfloat16()
            continue
        rows, columns = weight.shape
        base = name.removesuffix(".weight")
        words = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8), generator=draw)
        made[f"{base}.weight_packed"] = words.int()
        made[f"{base}.weight_scale"] = torch.full((rows, columns // GROUP), checkpoints.SPREAD / 4).bfloat16()
        made[f"{base}.weight_shape"] = torch.tensor([rows, columns])
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def special(number: int) -> str:
    """A token that no text has."""
    return f"<|special_{number}|>"


def vocabulary(count: int, merges: int) -> Tokenizer:
    """Byte-level BPE of `count` tokens and so many merges: words of letters, the shortest first, each of which is its
    beginning and its last letter, and, while there are merges left, any other two tokens."""
    known = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    pairs, limit = list[tuple[str, str]](), count - 256
    for word in words():
        if len(known) >= limit:
            break
        known[word] = len(known)
        pairs.append((word[:-1], word[-1]))
        for cut in range(1, len(word) - 1):
            spare = len(pairs) < merges - (limit - len(known))
            if spare and word[:cut] in known and word[cut:] in known:
                pairs.append((word[:cut], word[cut:]))
    made = Tokenizer(BPE(known, pairs))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteDecoder()
    made.add_special_tokens([special(i) for i in range(count - made.get_vocab_size())])
    return made


def words() -> Iterator[str]:
    """Words of two letters and more, with or without a space before them."""
    for length in range(1, 5):
        for first, *rest in product("Ġ" + LETTERS, *[LETTERS] * length):
            yield first + "".join(rest)


if __name__ == "__main__":
    command()
