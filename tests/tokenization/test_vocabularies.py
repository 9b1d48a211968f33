"""Vocabularies without a tokenizer.json speak as the libraries they come from do."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tiktoken
import tokenizers

from quire.assembly.text import build_text
from quire.assembly.tokenizer import build_tokenizer
from quire.config import Settings
from quire.errors import InvalidModel
from quire.tokenization.tokenizer import Tokenizer
from quire.tokenization.vocabularies import LLAMA3, QWEN2, from_gguf, pairs_of
from tests.tokenization.vocabulary import CHATML, CORPUS, byte_level

TEXTS = [
    "the quick brown fox",
    "  two  spaces, 12345 and tabs\t\n\nlines ",
    "I'll say: héllo wörld €5 日本 😀!",
    "",
    "a",
    "boat'S x²",
]


def trained(kind: str, **more: object) -> bytes:
    """A sentencepiece model of the library's own training."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=made,
        vocab_size=330,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        minloglevel=2,
        **more,
    )
    return made.getvalue()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_cuts_as_sentencepiece_does(tmp_path: Path, kind: str, prefix: bool) -> None:
    data = trained(kind, add_dummy_prefix=prefix, remove_extra_whitespaces=False, user_defined_symbols=["<|im_start|>"])
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": kind == "bpe"}))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.vocab_size == theirs.vocab_size()
    for text in TEXTS:
        assert list(ours.encode(text, add_special_tokens=False)) == theirs.encode(text), text
        assert ours.decode(theirs.encode(text)) == text
    assert ours.encode("the", add_special_tokens=True)[0] == (
        theirs.bos_id() if kind == "bpe" else theirs.encode("the")[0]
    )
    assert ours.eos == {theirs.eos_id()}
    assert ours.exact


def test_what_is_no_sentencepiece_model_is_named(tmp_path: Path) -> None:
    for data in (b"", b"\xff" * 40, trained("bpe")[:1000]):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(InvalidModel, match=r"tokenizer\.model is not a sentencepiece model"):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(trained("char"))
    with pytest.raises(InvalidModel, match="kind 4: only unigram"):
        Tokenizer.from_folder(tmp_path)


def ranks() -> dict[bytes, int]:
    """tiktoken's: single bytes, then what merges make, in the order of a trained vocabulary."""
    core = byte_level()
    spelled = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert len(spelled) == 256
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = {(chr(b) if b in set(plain) else chr(next(others))): b for b in range(256)}
    words = sorted(core.get_vocab(with_added_tokens=False).items(), key=lambda pair: pair[1])
    made = [bytes(letters[c] for c in word) for word, _ in words if all(c in letters for c in word)]
    order = [bytes([b]) for b in range(256)] + [word for word in made if len(word) > 1 and not word.startswith(b"<|")]
    return {word: i for i, word in enumerate(dict.fromkeys(order))}


@pytest.mark.parametrize(("file", "split"), [("qwen.tiktoken", QWEN2), ("tokenizer.model", LLAMA3)])
def test_tiktokens_ranks_cut_as_tiktoken_does(tmp_path: Path, file: str, split: str) -> None:
    own = ranks()
    lines = (base64.b64encode(word) + b" " + str(rank).encode() for word, rank in own.items())
    (tmp_path / file).write_bytes(b"\n".join(lines) + b"\n")
    special = {"added_tokens_decoder": {str(len(own)): {"content": "<|end|>", "special": True}}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    theirs = tiktoken.Encoding("test", pat_str=split, mergeable_ranks=own, special_tokens={"<|end|>": len(own)})
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert list(ours.encode(text)) == theirs.encode(text), text
        assert ours.decode(theirs.encode(text)) == text
    assert ours.encode("<|end|>") == (len(own),)
    assert ours.eos == {len(own)}
    (tmp_path / file).write_bytes(b"AAAA 1\nnonsense\n")
    with pytest.raises(InvalidModel, match="is not a tiktoken vocabulary"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2s_pair_of_files_is_the_tokenizer_they_were(tmp_path: Path, names: tuple[str, str]) -> None:
    core = byte_level()
    facts = json.loads(core.to_str())["model"]
    (tmp_path / names[0]).write_text(json.dumps(facts["vocab"]))
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in facts["merges"]]
    (tmp_path / names[1]).write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert list(ours.encode(text)) == core.encode(text, add_special_tokens=False).ids
    (tmp_path / names[1]).write_text("a b c d\n")
    with pytest.raises(InvalidModel, match="are not a vocabulary"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("head", ["#version: 0.2\n", ""])
def test_a_merge_that_begins_with_a_hash_sign_is_no_comment(tmp_path: Path, head: str) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"#": 0, "##": 1, "a": 2, "#a": 3}))
    (tmp_path / "merges.txt").write_text(head + "# #\n# a\n")
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("##") == (1,)
    assert ours.encode("###a") == (1, 0, 2), "heading and letter are split before merges"
    assert ours.encode("a##") == (2, 1)


def write(path: Path, model: str, pieces: list[str], kinds: list[int], **more: object) -> None:
    """A GGUF file of a tokenizer only, by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings(path: Path) -> Settings:
    return Settings.of(model=str(path))


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_a_gguf_files_bytes_are_cut_as_they_were_and_its_template_is_used(tmp_path: Path, pre: str) -> None:
    own = ranks()
    path = tmp_path / "qwen.tiktoken"
    path.write_bytes(b"\n".join(base64.b64encode(w) + b" " + str(i).encode() for w, i in own.items()))
    core = json.loads(Tokenizer.from_folder(tmp_path).to_json())["model"]
    pieces = [word for word, _ in sorted(core["vocab"].items(), key=lambda pair: pair[1])] + [
        "<|im_start|>",
        "<|im_end|>",
    ]
    kinds = [1] * (len(pieces) - 2) + [3, 3]
    merges = [" ".join(pair) for pair in core["merges"]]
    write(
        tmp_path / "model.gguf",
        "gpt2",
        pieces,
        kinds,
        token_merges=merges,
        tokenizer_pre=pre,
        eos_token_id=5,
        eot_token_id=len(pieces) - 1,
        chat_template=CHATML,
    )
    text = build_text(settings(tmp_path / "model.gguf"))
    pattern = {"gpt-2": None, "qwen2": QWEN2, "llama-bpe": LLAMA3}[pre]
    for sample in TEXTS:
        if pattern is not None:
            theirs = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=own, special_tokens={})
            assert list(text.tokenizer.encode(sample)) == theirs.encode(sample)
        assert text.tokenizer.decode(text.tokenizer.encode(sample)) == sample
    assert text.tokenizer.eos == {5, len(pieces) - 1}
    assert text.template is not None
    prompt = text.template.render([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text.tokenizer.encode(prompt)[0] == len(pieces) - 2


@pytest.mark.parametrize("prefix", [True, False])
def test_a_gguf_files_sentences_are_cut_as_sentencepiece_does(tmp_path: Path, prefix: bool) -> None:
    data = trained("bpe", add_dummy_prefix=prefix, remove_extra_whitespaces=False)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    count = theirs.vocab_size()
    pieces, scores = ([f(i) for i in range(count)] for f in (theirs.id_to_piece, theirs.get_score))
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        for i in range(count)
    ]
    about = {"token_scores": scores, "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": prefix}
    write(tmp_path / "m.gguf", "llama", pieces, kinds, **about)
    ours = build_tokenizer(settings(tmp_path / "m.gguf"))
    for text in TEXTS:
        assert list(ours.encode(text)) == [1, *theirs.encode(text)]
        assert ours.decode(theirs.encode(text)) == text


def test_a_gguf_tokenizer_that_is_not_known_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "bert", ["a"], [1])
    with pytest.raises(InvalidModel, match="tokenizer is 'bert': 'gpt2', 'llama' and 'gemma4' are read"):
        build_tokenizer(settings(tmp_path / "a.gguf"))
    write(tmp_path / "b.gguf", "gpt2", ["a"], [1], tokenizer_pre="martian")
    with pytest.raises(InvalidModel, match="pre-tokenizer 'martian'"):
        build_tokenizer(settings(tmp_path / "b.gguf"))


@pytest.mark.parametrize(("kind", "types", "scores"), [("llama", 2, 1), ("llama", 1, 2), ("gpt2", 3, 2)])
def test_a_gguf_tokenizer_with_lists_of_several_lengths_is_refused(kind: str, types: int, scores: int) -> None:
    names = {"model": kind, "tokens": ["a", "b"], "token_type": [1] * types, "scores": [0.0] * scores}
    with pytest.raises(InvalidModel, match=f"has 2 tokens, {types} types and {scores} scores"):
        from_gguf({f"tokenizer.ggml.{name}": value for name, value in names.items()})


def test_pairs_come_best_made_first() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "abb": 3}
    assert pairs_of(vocab, {"ab": -1.0, "abb": -0.5}) == [("ab", "b"), ("a", "b")]
