"""`python -m benchmarks.embeddings`: short texts through /v1/embeddings and through sentence-transformers, in turn.

Both load the same checkpoint of MiniLM-L6's shape with random weights, and run on the same CPU with as many threads.
Needs the package sentence-transformers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from benchmarks.servers import through
from quire.frontend.supervisor import free_port

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB, HIDDEN, LAYERS, HEADS, WIDTH, LONGEST = 30_522, 384, 6, 12, 1536, 512
"""Of all-MiniLM-L6-v2."""


@click.command("embeddings")
@click.option("--texts", "count", default=10_000, show_default=True, help="Texts of a turn.")
@click.option("--turns", default=3, show_default=True, help="Times that each is measured, one after the other.")
@click.option("--threads", default=1, show_default=True, help="Of torch, on either side.")
@click.option("--inputs", default=250, show_default=True, help="Texts of a request.")
@click.option("--clients", default=4, show_default=True, help="Requests at a time.")
@click.option("--batch", default=32, show_default=True, help="sentence-transformers' batch size.")
@click.option("--words", default="4,24", show_default=True, help="Words of a text, from and to.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="File for the numbers.")
def command(
    count: int, turns: int, threads: int, inputs: int, clients: int, batch: int, words: str, out: Path | None
) -> None:
    """Texts a second of both, and how far their vectors are apart."""
    low, high = map(int, words.split(","))
    with tempfile.TemporaryDirectory() as made:
        folder = write(Path(made))
        texts = make_texts(count, low, high)
        torch.set_num_threads(threads)
        other = peer(folder, batch)
        options = {"--threads": threads, "--dtype": "float32", "--max-num-queued-reqs": inputs * clients}
        arguments = [str(folder), *(str(word) for pair in options.items() for word in pair)]
        with through(arguments, free_port(), Path(made) / "server.log") as url:
            mine = through_http(url, inputs, clients)
            apart = float(np.abs(mine(texts[:500]) - other(texts[:500])).max())
            sides = (("quire", mine, server_seconds), ("sentence-transformers", other, time.process_time))
            seconds, used = ({name: list[float]() for name, *_ in sides} for _ in range(2))
            for _ in range(turns):
                for name, run, processor in sides:
                    began, before = time.perf_counter(), processor()
                    run(texts)
                    seconds[name].append(time.perf_counter() - began)
                    used[name].append(processor() - before)
    found = {
        name: {"seconds": each, "median": statistics.median(each), "processor_seconds": used[name]}
        for name, each in seconds.items()
    }
    show(found, count, apart)
    if out is not None:
        sizes = {
            "texts": count,
            "threads": threads,
            "inputs": inputs,
            "clients": clients,
            "batch": batch,
            "words": words,
        }
        out.write_text(json.dumps({"sizes": sizes, "largest_difference": apart, "found": found}, indent=1))


def show(found: dict[str, Any], count: int, apart: float) -> None:
    """A table of both."""
    table = Table("", "median s", "fastest s", "texts/s (median)", "processor s (least)")
    for name, each in found.items():
        values = each["median"], min(each["seconds"]), count / each["median"], min(each["processor_seconds"])
        table.add_row(name, f"{values[0]:.2f}", f"{values[1]:.2f}", f"{values[2]:,.0f}", f"{values[3]:.2f}")
    console = Console()
    console.print(table)
    console.print(f"largest difference between the vectors: {apart:.1e}")


def server_seconds() -> float:
    """Processor seconds of this process's children, and of theirs: the server and its engine."""
    ticks, parents = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)], ticks[int(path.parent.name)] = (
                int(words[1]),
                int(words[11]) + int(words[12]),
            )

    def own(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return sum(count for pid, count in ticks.items() if own(pid)) / os.sysconf("SC_CLK_TCK")


def make_texts(count: int, low: int, high: int) -> list[str]:
    """Texts of `low` to `high` words in random order of length."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(low, high + 1, count)
    return [" ".join(f"w{word}" for word in rng.integers(0, VOCAB - len(SPECIAL), n)) for n in lengths]


def through_http(url: str, inputs: int, clients: int) -> Callable[[Sequence[str]], Any]:
    """The vectors of texts, by requests of `inputs` texts each, `clients` at a time."""

    async def ask(texts: Sequence[str]) -> Any:
        gate = asyncio.Semaphore(clients)
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

            async def one(part: Sequence[str]) -> list[Any]:
                async with gate:
                    body = {"input": part, "encoding_format": "base64"}
                    answer = await client.post("/v1/embeddings", json=body)
                answer.raise_for_status()
                return [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in answer.json()["data"]]

            parts = await asyncio.gather(*(one(texts[i : i + inputs]) for i in range(0, len(texts), inputs)))
        return np.stack([vector for part in parts for vector in part])

    return lambda texts: asyncio.run(ask(texts))


def peer(folder: Path, batch: int) -> Callable[[Sequence[str]], Any]:
    """The same by sentence-transformers."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found,unused-ignore]

    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=batch, show_progress_bar=False)


def write(folder: Path) -> Path:
    """The checkpoint, with a WordPiece tokenizer of the same size, and sentence-transformers' files."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDTH,
        max_position_embeddings=LONGEST,
    )
    BertModel(config).save_pretrained(folder)
    core = Tokenizer(
        models.WordPiece(
            {name: i for i, name in enumerate((*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))))},
            unk_token="[UNK]",
        )
    )
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    core.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "BertTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    files: dict[str, Any] = {
        "tokenizer_config.json": {**named, "unk_token": "[UNK]", "mask_token": "[MASK]", "model_max_length": LONGEST},
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True},
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(
                (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
            )
        ],
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


if __name__ == "__main__":
    command()
