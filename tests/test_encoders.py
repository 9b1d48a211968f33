"""Embeddings, classes and scores of every family, beside those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from quire.assembly.limits import resolve
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest
from quire.frontend.pooling import RERANKER_BEGIN, RERANKER_END, RERANKER_TASK
from quire.llm import LLM
from quire.models.registry import read_spec
from quire.types import UNLIMITED
from quire.weights.files import read_config
from tests import encoders
from tests.encoders import FAMILIES

pytestmark = pytest.mark.usefixtures("forked_children")

ATOL = 1e-5


def expected_embeddings(model: Any, texts: list[str], how: str) -> Any:
    core = encoders.tokenizer()
    made = [encoders.pooled(encoders.states(model, core.encode(text).ids), how) for text in texts]
    return torch.nn.functional.normalize(torch.stack(made), dim=1).numpy()


OPS: dict[str, dict[str, Any]] = {
    "native": {},
    "torch": {"cpu_kernels": "torch"},
    "deterministic": {"deterministic": True},
}
"""Operations that the same model is computed with."""
OTHERS = ("torch", "deterministic", "ranks")


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        pytest.param(name, ops, marks=() if ops in ("native", OTHERS[at % 2]) else pytest.mark.nightly)
        for at, name in enumerate(FAMILIES)
        for ops in ("native", *OTHERS)
    ],
)
def test_embeddings_are_those_of_transformers_alone_and_in_a_crowd(name: str, ops: str, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name)
    texts = encoders.texts()
    wanted = expected_embeddings(model, texts, FAMILIES[name].pooling)
    with LLM(str(tmp_path), dtype="float32", **OPS.get(ops, {"tensor_parallel_size": 2})) as llm:
        crowd = [one.outputs.embedding for one in llm.embed(texts)]
        alone = [llm.embed(text)[0].outputs.embedding for text in texts[:6]]
        assert llm._engine.gauges().used_blocks == 0 or not llm._engine.description.bidirectional
    np.testing.assert_allclose(crowd, wanted, atol=ATOL)
    np.testing.assert_allclose(alone, wanted[:6], atol=ATOL)
    if ops == "deterministic":
        assert alone == crowd[:6]


@pytest.mark.parametrize("name", ["bert", "embeddinggemma", "qwen3"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_in_deterministic_mode_every_pooling_has_the_same_bits(name: str, pooling: Any, tmp_path: Path) -> None:
    encoders.write(tmp_path, name)
    texts = encoders.texts(16)
    steps = {} if name != "qwen3" else {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    with LLM(str(tmp_path), dtype="float32", deterministic=True, **steps) as llm:
        crowd = [one.outputs.embedding for one in llm.embed(texts, pooling=pooling)]
        assert [llm.embed(text, pooling=pooling)[0].outputs.embedding for text in texts[::3]] == crowd[::3]
        again = [one.outputs.embedding for one in llm.embed(texts[::-1], pooling=pooling)]
    assert again[::-1] == crowd


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.classifier])
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name, labels=3)
    texts, core = encoders.texts(), encoders.tokenizer()
    wanted = torch.stack([encoders.logits(model, core.encode(text).ids) for text in texts])
    with LLM(str(tmp_path), dtype="float32") as llm:
        made = [one.outputs.probs for one in llm.classify(texts)]
        raw = [one.outputs.probs for one in llm.classify(texts, use_activation=False)]
    np.testing.assert_allclose(made, wanted.softmax(-1).numpy(), atol=ATOL)
    np.testing.assert_allclose(raw, wanted.numpy(), atol=ATOL)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.classifier])
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = encoders.write(tmp_path, name, labels=1)
    query, documents, core = "what dog runs", encoders.texts(12), encoders.tokenizer()
    pairs = [core.encode(query, document) for document in documents]
    typed = FAMILIES[name].model_type in ("bert", "nomic_bert")
    wanted = torch.stack([encoders.logits(model, one.ids, one.type_ids if typed else None) for one in pairs])
    with LLM(str(tmp_path), dtype="float32") as llm:
        made = [one.outputs.score for one in llm.score(query, documents)]
    np.testing.assert_allclose(made, wanted.sigmoid()[:, 0].numpy(), atol=ATOL)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("name", ["bert", "embeddinggemma"])
def test_vectors_are_made_as_sentence_transformers_files_say(
    name: str, pooling: str, normalize: bool, tmp_path: Path
) -> None:
    model = encoders.write(tmp_path, name)
    layers = encoders.sentence_transformers(
        tmp_path, pooling=pooling, dense=[(32, 48, "Tanh"), (48, 20, "Identity")], normalize=normalize
    )
    texts, core = encoders.texts(10), encoders.tokenizer()
    wanted = torch.stack([encoders.pooled(encoders.states(model, core.encode(text).ids), pooling) for text in texts])
    for weight, bias, activation in layers:
        wanted = wanted @ weight.T + bias
        wanted = wanted.tanh() if activation == "Tanh" else wanted
    wanted = torch.nn.functional.normalize(wanted, dim=1) if normalize else wanted
    with LLM(str(tmp_path), dtype="float32") as llm:
        made = [one.outputs.embedding for one in llm.embed(texts)]
    np.testing.assert_allclose(made, wanted.numpy(), atol=ATOL)


def test_prompts_stand_before_texts_and_lengths_are_sentence_transformers(tmp_path: Path) -> None:
    encoders.write(tmp_path, "bert")
    encoders.sentence_transformers(tmp_path, max_seq_length=20, prompts={"query": "what is "}, default_prompt_name=None)
    long = " ".join(["dog"] * 30)
    with LLM(str(tmp_path), dtype="float32") as llm:
        [named], [written] = llm.embed("red dog", prompt_name="query"), llm.embed("what is red dog")
        assert named.outputs == written.outputs
        with pytest.raises(InvalidRequest, match=r"prompt_name.*'other'.*query"):
            llm.embed("a", prompt_name="other")
        with pytest.raises(InvalidRequest, match="32 tokens, and this model takes 20"):
            llm.embed(long)
        [cut], [whole] = llm.embed(long, truncate_prompt_tokens=-1), llm.embed(" ".join(["dog"] * 18))
        assert len(cut.prompt_token_ids) == 20 and cut.outputs == whole.outputs


@pytest.mark.parametrize("lengths", [(3, 40), (40, 3), (30, 30), (9, 9)])
def test_pairs_are_cut_as_transformers_cuts_them(lengths: tuple[int, int], tmp_path: Path) -> None:
    encoders.write(tmp_path, "bert", labels=1)
    texts = [" ".join(["dog"] * n) for n in lengths]
    core = encoders.tokenizer()
    core.enable_truncation(24, strategy="longest_first")
    wanted = core.encode(*texts)
    with LLM(str(tmp_path), dtype="float32") as llm:
        [made] = llm.score(*texts, truncate_prompt_tokens=24)
    assert [id % encoders.VOCAB for id in made.prompt_token_ids] == wanted.ids
    assert [id // encoders.VOCAB for id in made.prompt_token_ids] == wanted.type_ids


WORD_RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_that_answers_in_words_scores_as_its_logits_say(tied: bool, tmp_path: Path) -> None:
    fields = {**encoders.DECODER, "tie_word_embeddings": tied, "max_position_embeddings": 400}
    model = encoders.randomized(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields)), 3)
    model.save_pretrained(tmp_path / "words")
    core = encoders.tokenizer(bert=False)
    core.add_tokens(["no", "yes"])
    core.save(str(tmp_path / "words" / "tokenizer.json"))
    no, yes = (core.token_to_id(word) for word in ("no", "yes"))
    query, documents = "what dog runs", encoders.texts(6, longest=40)
    overrides = {**WORD_RERANKER, "is_original_qwen3_reranker": True}
    with LLM(str(tmp_path / "words"), dtype="float32", hf_overrides=overrides) as llm:
        made = llm.score(query, documents)
        other = llm.score(query, documents, instruction="red fish")
    for one, document in zip(made, documents, strict=True):
        text = f"{RERANKER_BEGIN}<Instruct>: {RERANKER_TASK}\n<Query>: {query}\n<Document>: {document}{RERANKER_END}"
        assert list(one.prompt_token_ids) == core.encode(text).ids
        with torch.inference_mode():
            logits = model(torch.tensor([one.prompt_token_ids])).logits[0, -1]
        assert abs(one.outputs.score - float(logits[[no, yes]].softmax(0)[1])) < ATOL
    assert [one.outputs for one in made] != [one.outputs for one in other]
    # The converted form: a classifier's checkpoint whose only row is the difference.
    head = model.lm_head.weight.detach()
    converted = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("qwen3", **fields, num_labels=1))
    converted.model.load_state_dict(model.model.state_dict())
    converted.score.weight.data = (head[yes] - head[no])[None].clone()
    converted.save_pretrained(tmp_path / "converted")
    core.save(str(tmp_path / "converted" / "tokenizer.json"))
    flag = {"is_original_qwen3_reranker": True}
    with LLM(str(tmp_path / "converted"), dtype="float32", hf_overrides=flag) as llm:
        again = llm.score(query, documents)
    np.testing.assert_allclose([a.outputs.score for a in again], [m.outputs.score for m in made], atol=ATOL)


def test_embedders_score_by_the_cosine_and_give_vectors_of_tokens(tmp_path: Path) -> None:
    model = encoders.write(tmp_path, "bert")
    texts, core = encoders.texts(5), encoders.tokenizer()
    with LLM(str(tmp_path), dtype="float32") as llm:
        vectors = np.array([one.outputs.embedding for one in llm.embed(texts)])
        made = [one.outputs.score for one in llm.score(texts[0], texts[1:])]
        paired = [one.outputs.score for one in llm.score(texts[:2], texts[2:4])]
        [tokens] = llm.encode(texts[0], pooling_task="token_embed", use_activation=False)
        [whole] = llm.encode(texts[0])
    np.testing.assert_allclose(made, vectors[1:] @ vectors[0], atol=ATOL)
    np.testing.assert_allclose(paired, (vectors[:2] * vectors[2:4]).sum(1), atol=ATOL)
    np.testing.assert_allclose(whole.outputs.data, vectors[0], atol=ATOL)
    np.testing.assert_allclose(tokens.outputs.data, encoders.states(model, core.encode(texts[0]).ids), atol=ATOL)


def test_what_a_model_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    encoders.write(tmp_path / "embedder", "bert", is_matryoshka=False)
    encoders.write(tmp_path / "classifier", "bert", labels=3, matryoshka_dimensions=[8])
    refused = pytest.raises
    with LLM(str(tmp_path / "embedder"), dtype="float32") as llm:
        for ask in (lambda: llm.generate("a"), lambda: list(llm.stream("a"))):
            with refused(InvalidRequest, match=r"pooling model.*/v1/embeddings"):
                ask()
        with refused(InvalidRequest, match="no classifier"):
            llm.classify("a")
        with refused(InvalidRequest, match="is_matryoshka false"):
            llm.embed("a", dimensions=8)
    with LLM(str(tmp_path / "classifier"), dtype="float32") as llm:
        with refused(InvalidRequest, match="--convert embed"):
            llm.embed("a")
        with refused(InvalidRequest, match="3"):
            llm.score("a", "b")
        with refused(InvalidRequest, match="/classify"):
            llm.generate("a")
    with LLM(str(tmp_path / "classifier"), dtype="float32", convert="embed") as llm:
        assert len(llm.embed("a", dimensions=8)[0].outputs.embedding) == 8
        with refused(InvalidRequest, match="only 8"):
            llm.embed("a", dimensions=9)
    with LLM(max_num_seqs=2) as llm:
        with refused(InvalidRequest, match="--runner pooling"):
            llm.score("a", "b")
        with refused(InvalidRequest, match="no classifier"):
            llm.classify("a")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_num_batched_tokens": 64, "max_num_seqs": 8}, "max_num_batched_tokens"),
        ({"long_prefill_token_threshold": 16}, "long_prefill_token_threshold"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"runner": "generate"}, "runner"),
        ({"convert": "classify"}, "convert"),
        ({"pooler_config": {"pooling_type": "ALL"}}, "pooler_config"),
        ({"pooler_config": {"step_tag_id": 3}}, "pooler_config"),
        ({"hf_overrides": {"hidden_size": 3}}, "hf_overrides"),
        ({"max_model_len": 131}, None),
        ({"executor": "onnx"}, "model"),
    ],
)
def test_options_that_do_not_go_with_an_encoder_are_refused(
    options: dict[str, Any], param: str | None, tmp_path: Path
) -> None:
    encoders.write(tmp_path, "bert")
    with pytest.raises((InvalidConfig, InvalidModel)) as caught:
        LLM(str(tmp_path), dtype="float32", **options)
    assert caught.value.param == param


def test_an_encoder_has_whole_prompts_on_a_gpu_too(tmp_path: Path) -> None:
    encoders.write(tmp_path, "modernbert")
    spec = read_spec(read_config(tmp_path))
    limits = resolve(Settings.of(model=str(tmp_path)), spec, torch.device("cuda"))
    assert limits.max_chunk_tokens == UNLIMITED and limits.max_num_batched_tokens == 8192
    with pytest.raises(InvalidConfig, match="computes a prompt in one step"):
        resolve(Settings.of(model=str(tmp_path), max_num_batched_tokens=64), spec, torch.device("cuda"))


def test_a_decoder_pools_without_its_head_and_long_prompts_in_chunks(tmp_path: Path) -> None:
    model = encoders.write(tmp_path, "qwen3")
    texts = encoders.texts(8)
    wanted = expected_embeddings(model, texts, "last")
    with LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        made = [one.outputs.embedding for one in llm.embed(texts)]
        again = [one.outputs.embedding for one in llm.embed(texts)]
    np.testing.assert_allclose(made, wanted, atol=ATOL)
    np.testing.assert_allclose(again, wanted, atol=ATOL)
    options = {"pooler_config": {"pooling_type": "MEAN", "normalize": False}}
    with LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=16, max_num_seqs=4, **options) as llm:
        made = [one.outputs.embedding for one in llm.embed(texts)]
    core = encoders.tokenizer()
    means = [encoders.states(model, core.encode(text).ids).mean(0) for text in texts]
    np.testing.assert_allclose(made, torch.stack(means).numpy(), atol=ATOL)


def test_no_prefix_is_shared_and_one_layers_blocks_serve_all(tmp_path: Path) -> None:
    encoders.write(tmp_path, "bert")
    text = " ".join(["dog"] * 100)
    with LLM(str(tmp_path), dtype="float32") as llm:
        for _ in range(2):
            assert llm.embed(text)[0].num_cached_tokens == 0
        assert len(llm._engine.executor.runner.kv) == 1  # type: ignore[attr-defined]
        # The longest text that there are positions for.
        longest = llm.embed({"prompt_token_ids": [7] * 130})
        assert len(longest) == 1
        with pytest.raises(InvalidRequest, match="131 tokens, and this model takes 130"):
            llm.embed({"prompt_token_ids": [7] * 131})
