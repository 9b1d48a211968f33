"""What a model is, what it takes, and where it departs: from headers, in words, with the right exit code."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quire.assembly.engine import build_engine, choose_ops
from quire.cli import main
from quire.cli.diff import FAR, Layer, compare, departs
from quire.cli.inspect import count, read_facts
from quire.cli.plan import need, plan_lines, weights
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel
from quire.ops.native.ops import NativeOps
from quire.weights.files import SINGLE
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.gguf_files import write
from tests.quantised import SHAPE, SIZES, quantise
from tests.tokenization.vocabulary import CHATML, byte_level, save

MIB = 1 << 20


FOREIGN = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("name", "sizes", "kept", "planned"),
    [
        ("gpt_neox", {**FOREIGN, "max_position_embeddings": 256}, "1,024 bytes, 256.00 KiB", "256.00 KiB for 256"),
        (
            "mamba",
            {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
            "0 bytes, beside states of fixed size",
            "1 bytes for 2,048",
        ),
    ],
)
def test_a_model_that_transformers_runs_is_described_and_planned(
    name: str, sizes: dict[str, int], kept: str, planned: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=300, **sizes))
    model.save_pretrained(tmp_path)
    save(tmp_path, byte_level())
    found = rows(run("inspect", tmp_path))
    assert found["architecture"] == type(model).__name__
    assert found["run by"] == "transformers (--executor hf), slower than Quire's own layers"
    assert found["parameters"] == count(sum(each.numel() for each in model.parameters()))
    assert found["KV a token"].startswith(kept)
    plan = rows(run("plan", tmp_path, "--memory", "1GiB"))
    assert plan["run by"].startswith("transformers (--executor hf)")
    assert plan["KV a sequence"].startswith(planned)
    assert "fits" not in plan
    assert rows(run("plan", tmp_path, "--memory", "100KiB"), code=1)["fits"].startswith("no:")


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def rows(result: Result, code: int = 0) -> dict[str, str]:
    assert result.exit_code == code, result.output
    lines = (line.split("  ", 1) for line in result.stdout.splitlines() if "  " in line)
    return {name.strip(): value.strip() for name, value in lines}


def test_a_model_is_described_from_its_headers(tmp_path: Path) -> None:
    make(tmp_path, "gemma3_text-gqa", shard="20KB")
    config = {"eos_token": "<|end|>", "chat_template": CHATML}
    save(tmp_path, byte_level(), tokenizer_config=config, generation_config={"temperature": 0.3, "top_k": 7})
    found = rows(run("inspect", tmp_path))
    assert found["architecture"] == "Gemma3ForCausalLM"
    assert found["heads"] == "6 of queries, 2 of keys and values, 14 numbers each"
    assert found["attention"] == "3 of 4 layers see 9 positions"
    assert (
        found["rope"] == "base 200 over 14 numbers of a head; base 5,000 over 14 numbers of a head, linear scaling by 4"
    )
    assert found["vocabulary"] == "199, head tied to the embedding"
    assert found["stored as"] == "F32 100.0 %"
    assert found["KV a token, as activations"].startswith("896 bytes (float32)")
    assert found["loads"] == "every tensor has its place"
    assert "'<|end|>' (1)" in found["ends at"]
    assert "knows add_generation_prompt" in found["chat template"]
    assert found["sampled by default"] == "temperature 0.3, top_k 7 (generation_config.json)"


def test_nothing_but_headers_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "qwen3_moe-raw-shares-some-dense")
    monkeypatch.setattr("quire.weights.entries.read_tensor", None)
    found = rows(run("inspect", tmp_path), 2)
    assert found["experts"] == "2 of 5 a token, of width 33, layers 0, 2 dense"
    total = sum(t.numel() for t in load_file(tmp_path / SINGLE).values())
    idle = 2 * 3 * (3 * 54 * 33)
    assert found["parameters"] == f"{total / 1000:.3g} k, {(total - idle) / 1000:.3g} k used a token"
    assert "no tokenizer.json" in found["tokenizer"]


def test_quantised_checkpoints_and_gguf_files_are_described_by_how_they_are_stored(tmp_path: Path) -> None:
    make(tmp_path / "awq", SHAPE, **SIZES)
    quantise(tmp_path / "awq", "awq")
    found = rows(run("inspect", tmp_path / "awq"), 2)
    assert found["quantization"].startswith("awq: IntegerScheme(layout='awq', group=16")
    assert "I32" in found["stored as"]
    assert found["loads"] == "every tensor has its place"
    write(tmp_path / "model.gguf", make(tmp_path / "plain", "llama-gqa-tied", hidden_size=288), "Q8_0")
    found = rows(run("inspect", tmp_path / "model.gguf"), 2)
    assert found["files"].startswith("1 (model.gguf)")
    assert "Q8_0" in found["stored as"]


def test_what_would_not_load_is_said(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied")
    held = load_file(tmp_path / SINGLE)
    held.pop("model.norm.weight")
    save_file(held, tmp_path / SINGLE)
    result = run("inspect", tmp_path)
    said = "lacks 1 tensors of the model: model.norm.weight"
    assert said in rows(result, 2)["loads"]
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_transformers_cannot_load_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "llama-gqa-tied")

    def refuse(*args: object, **options: object) -> object:
        raise OSError("nothing\nhere")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    result = run("diff", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == "Error: transformers cannot load it, so there is nothing to compare with: nothing here\n"


def test_layers_of_mixtures_of_any_width_are_compared(tmp_path: Path) -> None:
    """transformers' products of several matrices need rows of 16 bytes; its loop over experts does not."""
    make(tmp_path, "mixtral-gqa")
    assert "no layer differs" in run("diff", tmp_path).stdout


CPU = torch.device("cpu")


def test_a_plan_adds_up_and_its_smallest_change_fits(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied", num_hidden_layers=24, max_position_embeddings=4096)
    settings = Settings.of(model=str(tmp_path))
    looked = read_facts(settings)
    whole = need(settings, looked, 1 << 32, CPU)
    assert whole.weights == sum(t.nbytes for t in load_file(tmp_path / SINGLE).values())
    assert whole.least == 256
    assert whole.page == 24 * 2 * 16 * 3 * 8 * 4
    plan = dict(plan_lines(settings, looked, 1 << 32, CPU))
    assert plan["KV pool"] == "1023.19 MiB: 14,551 blocks, 56.8 sequences of the whole length"
    enough = whole.weights + whole.work + 257 * whole.page
    proposed = []
    for room in (4 * enough, 2 * enough, enough, enough - 1, enough * 3 // 4, enough // 2, enough // 3):
        plan = dict(plan_lines(settings, looked, room, CPU))
        if "fits" in plan:
            assert plan["fits"].startswith("no: ")
            words = plan["smallest change"].split()
            assert words[0].startswith("--"), room
            changed = {n.lstrip("-").replace("-", "_"): v for n, v in zip(words[::2], words[1::2], strict=True)}
            assert "fits" not in dict(plan_lines(Settings.of(model=str(tmp_path), **changed), looked, room, CPU)), (
                changed
            )
            proposed.append(sorted(changed))
    assert proposed[0] == ["kv_cache_memory_bytes"]
    assert ["kv_cache_dtype"] in proposed
    assert ["kv_cache_dtype", "max_model_len", "quantization"] in proposed
    tiny = dict(plan_lines(settings, looked, 1 << 16, CPU))
    assert tiny["smallest change"].startswith("none is enough")
    assert tiny["fits"].startswith("no: weights and activations take")


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "F32"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_weights_of_a_gguf_file_are_planned_as_they_are_kept(tmp_path: Path, kind: str, kernels: str) -> None:
    write(tmp_path / "m.gguf", make(tmp_path / "source", "llama-gqa-tied", **WIDE), kind)
    settings = Settings.of(model=str(tmp_path / "m.gguf"), cpu_kernels=kernels)
    facts = read_facts(settings)
    ops = choose_ops(CPU, kernels=kernels)
    packed = ops.multiplies_integers and kind != "F32"
    assert facts.dtype is (torch.bfloat16 if packed else torch.float32)
    model = load_model(tmp_path / "m.gguf", ops=ops)
    assert model.dtype is facts.dtype, "what is planned is what is loaded"
    sixes = 8.625 if isinstance(ops, NativeOps) and ops.level == "amx" else 6.625  # AMX's tiles are of bytes
    bits = {"Q8_0": 8.5, "Q4_K": 4.625, "Q6_K": sixes, "IQ4_NL": 4.5}.get(kind, 32) if packed else 32
    assert weights(settings, facts) == pytest.approx(facts.parameters * bits / 8, rel=0.02)


@pytest.mark.parametrize("method", ["q8_0", "q4_k", "int8"])
def test_weights_that_are_quantized_while_they_are_loaded_are_planned(tmp_path: Path, method: str) -> None:
    make(tmp_path, "llama-gqa-tied", **WIDE)
    settings = Settings.of(model=str(tmp_path), quantization=method, dtype="bfloat16")
    facts = read_facts(settings)
    heads = facts.spec.vocab * facts.spec.hidden
    size = {"q8_0": 8.5 / 8, "q4_k": 4.625 / 8, "int8": 1}[method]
    assert weights(settings, facts) == pytest.approx(2 * heads + (facts.parameters - heads) * size, rel=0.02)


def test_the_plan_is_what_the_engine_takes(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied")
    settings = Settings.of(model=str(tmp_path), kv_cache_memory_bytes="2MiB", max_num_seqs=64)
    plan = dict(plan_lines(settings, read_facts(settings), 1 << 30, CPU))
    blocks = build_engine(settings).description.num_blocks
    assert f": {blocks:,} blocks" in plan["KV pool"]


def test_a_plan_says_that_the_weights_are_cut_short(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied")
    weights = tmp_path / SINGLE
    weights.write_bytes(weights.read_bytes()[:-8])
    found = rows(run("plan", tmp_path, "--memory", "80GiB"))
    assert "truncated" in found["loads"] and "KV pool" in found


def test_the_memory_planned_for_can_be_given(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied")
    found = rows(run("plan", tmp_path, "--memory", "80GiB", "--device", "cuda"))
    assert found["memory"] == "80.00 GiB (cuda)"
    assert "KV pool" in found
    tight = run("plan", tmp_path, "--memory", "1MiB", "--device", "cuda")
    assert rows(tight, code=1)["fits"].startswith("no: "), "scripts go by the exit status"
    result = run("plan", tmp_path, "--memory", "lots")
    assert result.exit_code == 2
    assert "--memory must be a size such as 24GiB, not 'lots'" in result.stderr


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "gpt2-odd-heads", "gemma3_text-gqa", "qwen3_moe-gqa"])
def test_a_model_departs_nowhere_from_transformers(tmp_path: Path, shape: str) -> None:
    model = make(tmp_path, shape)
    result = run("diff", tmp_path)
    assert len(rows(result)) == model.config.num_hidden_layers + 1
    assert "logits" in rows(result)


def test_the_first_layer_that_departs_is_named(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied")
    model = load_model(tmp_path, dtype="float32")
    with torch.inference_mode():
        model.blocks[1].before_mlp.norm.weight[3] += 0.5
    found = list(compare(model, tmp_path, list(range(50))))
    first = departs(found)
    assert first is not None
    assert first.name == "layer 1"
    assert [layer.share < 1e-4 for layer in found] == [True, False, False, False]


@pytest.mark.parametrize(
    ("share", "far"), [(0.0, False), (FAR / 2, False), (FAR, True), (math.inf, True), (math.nan, True)]
)
def test_a_layer_departs_that_is_too_far_off_or_no_number(share: float, far: bool) -> None:
    layers = [Layer("layer 0", 0.0, 0.0), Layer("layer 1", 1.0, share)]
    assert departs(layers) == (layers[1] if far else None)


BROKEN = {
    "truncated shard": "truncated",
    "wrong dtype": "is stored as int32",
    "index naming a missing file": "which is not in the folder",
    "unknown architecture": "architecture 'MambaForCausalLM' is not supported",
    "pickle with code": "code perhaps, which is never run",
}


def spoil(folder: Path, how: str) -> None:
    make(folder, "llama-gqa-tied", shard="20KB" if how.startswith("index") else "5GB")
    save(folder, byte_level(), tokenizer_config={"eos_token": "<|end|>"})
    if how == "truncated shard":
        data = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(data[: len(data) // 2])
    elif how == "wrong dtype":
        held = load_file(folder / SINGLE)
        save_file({**held, "model.norm.weight": torch.ones(72, dtype=torch.int32)}, folder / SINGLE)
    elif how.startswith("index"):
        next(iter(folder.glob("model-*.safetensors"))).unlink()
    elif how == "unknown architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    elif how == "pickle with code":
        (folder / SINGLE).unlink()
        torch.save({"model.norm.weight": Trap(folder / "mark")}, folder / "pytorch_model.bin")
    elif how in TEMPLATES:
        (folder / "chat_template.jinja").write_text(TEMPLATES[how])


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.mkdir, (self.mark,)  # type: ignore[return-value]


TEMPLATES = {
    "a template that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a template that includes itself": "{% include 'chat_template.jinja' %}",
    "a template that counts for ever": "{% for a in range(10**9) %}{% endfor %}",
    "a template that reaches for Python": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "a template that reaches for a function's globals": (
        "{{ raise_exception.__globals__['__builtins__']['open']('mark','w') }}"
    ),
}


SAID = BROKEN | {
    "a template that calls itself": "the chat template fails: it calls itself without end",
    "a template that includes itself": "it asks for another template, 'chat_template.jinja', and there is none",
    "a template that counts for ever": "the chat template fails: it does not terminate",
    "a template that reaches for Python": "it accesses '__class__' of 'list', which a template may not access",
    "a template that reaches for a function's globals": "it accesses '__globals__' of 'function'",
}


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("how", SAID)
def test_broken_and_hostile_input_is_one_clear_line_and_exit_code_2_and_nothing_of_it_runs(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(tmp_path, how)
    monkeypatch.chdir(tmp_path)
    served, inspected = run("serve", tmp_path, "--port", "0"), run("inspect", tmp_path)
    for code, said in (served.exit_code, served.stderr), (inspected.exit_code, inspected.stderr):
        assert code == 2, said
        assert SAID[how] in said
        assert said.count("\n") == 1
    assert served.stdout == ""
    assert not (tmp_path / "mark").exists()


def test_a_plan_says_what_each_rank_takes_and_how_many_gpus_are_enough(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_moe-gqa", hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    settings = Settings.of(model=str(tmp_path), device="cuda", max_num_seqs=4, enforce_eager=True)
    looked, cuda = read_facts(settings), torch.device("cuda")
    one, two, four = (need(settings.changed(tensor_parallel_size=n), looked, 1 << 32, cuda) for n in (1, 2, 4))
    assert (one.page, four.page) == (2 * two.page, two.page // 2), "K/V is divided by heads"
    assert 1.9 * two.weights < one.weights < 2 * two.weights, "norms and routers are whole on every rank"
    spread = need(settings.changed(tensor_parallel_size=2, enable_expert_parallel=True), looked, 1 << 32, cuda)
    assert one.weights / 2 < spread.weights < one.weights, "four of seven experts"
    room = (one.weights + 2 * one.work) * 10 // 9
    plan = dict(plan_lines(settings.changed(tensor_parallel_size=2), looked, room, cuda))
    assert plan["ranks"] == "2; what follows is of each"
    said = [int(n) for n in re.findall(r"--tensor-parallel-size (\d+)", plan["GPUs"])]
    for size, enough in zip(said, (lambda n: n.fits, lambda n: n.fits and n.blocks >= n.most), strict=True):
        tried = (1, 2, 4)
        fits = [n for n in tried if enough(need(settings.changed(tensor_parallel_size=n), looked, room, cuda))]
        assert size == fits[0]
    assert "GPUs" not in dict(plan_lines(settings, looked, 1 << 32, CPU))
    with pytest.raises(InvalidModel, match="cannot be divided among"):
        need(settings.changed(tensor_parallel_size=64), looked, 1 << 32, cuda)


def test_a_plan_for_stages_says_what_the_one_with_least_room_takes(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_moe-gqa", hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    settings = Settings.of(model=str(tmp_path), device="cpu", max_num_seqs=4)
    looked = read_facts(settings)
    one = need(settings, looked, 1 << 33, CPU)
    stages, both = (
        need(settings.changed(pipeline_parallel_size=2, tensor_parallel_size=size), looked, 1 << 34, CPU)
        for size in (1, 2)
    )
    layers = looked.spec.layers
    assert stages.page == one.page * -(-layers // 2) // layers and both.page == stages.page // 2
    assert one.weights / 2 < stages.weights < one.weights * 0.8, "an end and about half of the layers"
    plan = dict(plan_lines(settings.changed(pipeline_parallel_size=2, tensor_parallel_size=2), looked, 1 << 34, CPU))
    assert plan["ranks"] == "4, in 2 stages; what follows is of one in the stage with least room for K/V"
    with pytest.raises(InvalidModel, match="stages are too many"):
        need(settings.changed(pipeline_parallel_size=64), looked, 1 << 33, CPU)
    with pytest.raises(InvalidConfig, match="works on a CPU only"):
        need(settings.changed(pipeline_parallel_size=2), looked, 1 << 33, torch.device("cuda"))
