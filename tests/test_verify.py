"""`quire verify`: what it proves, what it catches, how it says so, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quire.cli import main
from quire.cli.verify import LENGTHS, PLAIN, Difference, difference, drafting, scarce
from quire.engine.executor import Description
from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.reference import ReferenceOps
from quire.types import UNLIMITED, Request, TokenLogprobs
from quire.weights.schemes import ONLINE
from tests.checkpoints import make
from tests.product import KINDS

SITUATIONS = [
    "alone, once more",
    "in a batch",
    "warm prefix cache",
    "small chunks",
    "preempted",
    "drafts by look-up",
    "drafts by look-up, all at once",
    "drafts by a model",
    "drafts by a model, all at once",
]

MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'


def verify(*args: str) -> Result:
    return CliRunner().invoke(main, ["verify", "--max-model-len", "100", *args])


def verified(*args: str) -> tuple[int, dict[str, Any]]:
    result = verify("--repeat", "0", "--json", *args)
    return result.exit_code, json.loads(result.stdout)


def test_deterministic_mode_keeps_its_promise_in_every_situation_and_every_one_came_about() -> None:
    code, found = verified("--deterministic", "--dtype", "bfloat16", "--requests", "6", "--new", "8")
    rows = found["situations"]
    assert code == 0 and found["equal"] and found["deterministic"]
    assert [row["name"] for row in rows] == SITUATIONS
    assert all(row["tokens"] == 6 * 8 and row["differ"] == 0 and row["first"] is None for row in rows)
    assert all(row["happened"] > 0 for row in rows), rows


def test_memory_is_scarce_for_as_many_requests_as_run_at_once() -> None:
    about = Description(num_blocks=1000, block_size=16, num_rows=64, max_model_len=2048, vocab_size=100)
    asked = [Request(id=str(i), prompt=(1,) * n, max_new_tokens=24) for i, n in enumerate(LENGTHS * 64)]
    begun, grown = (sum(n // 16 + 1 for n in LENGTHS), sum(-(-(n + 24) // 16) for n in LENGTHS))
    assert scarce(asked[:8], about, 64) < grown
    assert scarce(asked, about, 64) == 64 // 8 * begun // 4 > -(-(max(LENGTHS) + 24) // 16)


class Batched(BatchInvariantOps):
    """A planted bug: attention sums as the shape of the batch has it."""

    attend = ReferenceOps.attend


class Untiled(BatchInvariantOps):
    """A planted bug: products are of as many rows as there are."""

    rows = UNLIMITED
    product = ReferenceOps.product


@pytest.mark.parametrize(
    ("bug", "args"),
    [
        (Batched, ()),
        pytest.param(Untiled, ("--quantization", "fp8", "--speculative-config", NGRAM), marks=pytest.mark.nightly),
    ],
)
def test_a_planted_dependence_on_the_batch_is_caught(
    bug: type[BatchInvariantOps], args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.assembly.engine.BatchInvariantOps", bug)
    torch_only = ("--cpu-kernels", "torch")
    code, found = verified("--deterministic", "--dtype", "float32", "--requests", "4", "--new", "4", *torch_only, *args)
    rows = {row["name"]: row for row in found["situations"]}
    assert code == 1 and not found["equal"]
    assert rows["alone, once more"]["differ"] == 0
    assert rows["in a batch"]["differ"] > 0
    first = rows["in a batch"]["first"]
    assert first["alone"] != first["here"] and 0 < rows["in a batch"]["apart"] < 1e-2


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_and_format_keeps_the_promise(kind: str, dtype: str, tmp_path: Path) -> None:
    config = ("--speculative-config", MTP) if kind.startswith("mtp ") else ()
    check_every_situation(KINDS[kind](tmp_path), "--dtype", dtype, *config)


@pytest.mark.nightly
@pytest.mark.parametrize("format", ONLINE)
def test_every_format_made_while_loading_keeps_the_promise(format: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
    make(tmp_path, "llama-gqa-tied", **sizes)
    check_every_situation(tmp_path, "--dtype", "bfloat16", "--quantization", format, "--canary", "warn")


def check_every_situation(folder: Path, *options: str) -> None:
    """Ten requests, greedy and seeded, in all situations."""
    code, found = verified("--deterministic", "--requests", "10", "--new", "6", *options, str(folder))
    rows = [row for row in found["situations"] if not row["why"]]
    assert code == 0 and len(rows) >= 7
    assert all(row["tokens"] == 10 * 6 and row["differ"] == 0 for row in rows), rows


def test_the_default_mode_says_where_it_differs_and_the_table_names_the_place() -> None:
    torch_only = ("--cpu-kernels", "torch")
    result = verify("--dtype", "bfloat16", "--requests", "4", "--new", "4", "--repeat", "0", *torch_only)
    assert result.exit_code == 1
    assert "embedded, default mode" in result.stdout
    assert "request 2, token 1" in result.stdout.replace("\n", " ")
    assert "Some differ, by rounding, as they may in the default mode" in result.stdout
    assert "price: not asked for" in result.stdout


def test_the_price_is_both_modes_and_their_ratio() -> None:
    result = verify("--deterministic", "--requests", "1", "--new", "2", "--repeat", "1")
    assert result.exit_code == 0, result.output
    assert "Every token and every log-probability compared is the same to the bit." in result.stdout
    for workload in ("decode, 1 at once", "decode, 8 at once", "a prompt"):
        line = next(line for line in result.stdout.splitlines() if workload in line)
        off, on, ratio = (float(cell.replace(",", "")) for cell in line.split("│")[2:5])
        assert ratio == pytest.approx(on / off, abs=0.02)


def test_a_situation_that_did_not_come_about_is_not_called_a_proof() -> None:
    result = verify("--deterministic", "--no-enable-prefix-caching", "--requests", "1", "--new", "1", "--repeat", "0")
    line = next(line for line in result.stdout.splitlines() if "warm prefix cache" in line)
    assert "it did not come about" in line
    assert "Not put to the test: in a batch, warm prefix cache, " in result.stdout.replace("\n", " ")


def test_an_executor_without_the_mode_is_looked_at_and_says_what_it_lacks() -> None:
    pytest.importorskip("transformers")
    result = verify("--executor", "hf", "--requests", "2", "--new", "3", "--repeat", "1")
    assert result.exit_code in (0, 1), "whatever transformers does"
    said = " ".join(result.stdout.replace("│", " ").split())
    assert "drafts" in said
    assert "price: --deterministic does not go with --executor hf" in said


def test_what_cannot_be_is_refused_in_a_line() -> None:
    result = verify("--new", "110")
    assert result.exit_code == 2
    assert "answers of 110 tokens do not fit" in result.stderr
    assert verify("--deterministc").exit_code == 2


def test_speculation_as_configured_is_what_is_put_to_the_test() -> None:
    code, found = verified("--deterministic", "--speculative-config", NGRAM, "--requests", "3", "--new", "8")
    assert code == 0
    assert [row["name"] for row in found["situations"]][5:] == [
        "drafts as configured",
        "drafts as configured, all at once",
    ]


def one(token: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, 1)


def test_a_difference_is_the_first_and_gives_how_far_likelihoods_moved_while_tokens_agreed() -> None:
    alone = (one(1, -1.0), one(2, -1.0), one(3, -1.0), one(4, -1.0))
    assert difference("a", alone, alone) is None
    here = (one(1, -1.0), one(2, -1.5), one(7, -9.0))
    assert difference("a", alone, here) == Difference("a", 1, (2, -1.0), (2, -1.5), 2, 0.5)
    assert difference("a", alone, alone[:3]) == Difference("a", 3, (4, -1.0), None, 3, 0.0)


def test_every_kind_of_schedule_is_a_situation_with_and_without_speculation() -> None:
    flags = [(each.name, *each[2:]) for each in (*PLAIN, *drafting("n-gram"))]
    assert flags == [
        ("alone, once more", False, False, False, False),
        ("in a batch", True, False, False, False),
        ("warm prefix cache", False, True, False, False),
        ("small chunks", True, False, True, False),
        ("preempted", True, False, False, True),
        ("n-gram", True, False, False, False),
        ("n-gram, all at once", True, True, True, True),
    ]
