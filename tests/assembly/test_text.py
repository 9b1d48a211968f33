"""Errors for folders that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.assembly.text import build_text
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel
from quire.weights.locate import embedded

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "config.json",
            {"architectures": ["MPNetModel"], "model_type": "bert"},
            "architecture 'MPNetModel' is not supp",
        ),
        ("config.json", {"architectures": 5}, "architectures must be a list"),
        ("config.json", [], "config.json must hold a JSON object"),
        ("adapter_config.json", {"peft_type": "LORA"}, "is a LoRA adapter"),
        ("config.json", LLAMA, "no tokenizer.json"),
    ],
)
def test_what_is_wrong_with_a_model_itself_is_said_before_what_its_tokenizer_lacks(
    tmp_path: Path, file: str, content: Mapping[str, Any] | list[Any], says: str
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(InvalidModel, match=says):
        build_text(Settings.of(model=str(tmp_path)))


def test_other_executors_know_other_architectures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MPNetModel"]}))
    with pytest.raises(InvalidModel, match=r"no tokenizer\.json"):
        build_text(Settings.of(model=str(tmp_path), executor="hf"))


def test_the_tokenizer_is_described_with_the_template_that_is_used(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    own, given = (build_text(Settings.of(chat_template=one)).info() for one in (None, str(template)))
    assert given["chat_template"] == template.read_text() != own["chat_template"]
    assert own.items() - given.items() == {("chat_template", own["chat_template"])} and own["eos_token"]


def test_a_folder_that_is_named_for_its_tokenizer_is_not_asked_for_a_model(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((embedded() / name).read_bytes())
    for name in ("model-Q8_0.gguf", "model-Q4_K_M.gguf"):
        (tmp_path / name).write_bytes(b"a model")
    named, own = (build_text(Settings.of(tokenizer=one)) for one in (str(tmp_path), None))
    assert named.tokenizer.encode("A little dog.") == own.tokenizer.encode("A little dog.")
    assert named.info() == own.info()


THINKS = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{{ messages[0].content }}"


def test_the_template_gets_what_requests_do_not_say(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(THINKS)
    kwargs = {"enable_thinking": False}
    text = build_text(Settings.of(chat_template=str(template), default_chat_template_kwargs=kwargs))
    assert text.template is not None and text.template.kwargs == kwargs
    said = [{"role": "user", "content": "hi"}]
    assert text.template.render(said) == "hi" == text.tokenizer.apply_chat_template(said, tokenize=False)
    assert text.template.render(said, chat_template_kwargs={"enable_thinking": True}) == "<think>hi"


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("default_chat_template_kwargs", '{"enable_thinkin": false}', "does not read 'enable_thinkin'"),
        ("default_chat_template_kwargs", '{"tools": []}', "tools is for requests to say"),
        ("default_chat_template_kwargs", "[]", "must be a JSON object"),
        ("override_generation_config", '{"temperatur": 1}', "'temperatur' is none of .* Did you mean 'temperature'"),
        ("override_generation_config", '{"temperature": -1}', "temperature must be between"),
        ("override_generation_config", '{"top_k": "many"}', "top_k must be"),
        ("override_generation_config", "{", "is not JSON"),
    ],
)
def test_defaults_of_requests_that_could_not_be_are_refused_at_the_start(option: str, value: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{option}.*{says}") as caught:
        build_text(Settings.of(**{option: value}))
    assert caught.value.param == option


def test_template_arguments_without_a_template_are_refused() -> None:
    kwargs = {"enable_thinking": False}
    with pytest.raises(InvalidConfig, match="this model has no chat template"):
        build_text(Settings.of(skip_tokenizer_init=True, default_chat_template_kwargs=kwargs))


def test_sampling_parameters_of_requests_that_do_not_say_are_the_models_or_the_operators(tmp_path: Path) -> None:
    for file in embedded().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 9}')

    def defaults(**options: Any) -> Mapping[str, Any]:
        return build_text(Settings.of(model=str(tmp_path), **options)).defaults

    assert defaults() == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert defaults(generation_config="vllm") == {}
    changed = {"temperature": 0.1, "max_new_tokens": 3}
    assert defaults(override_generation_config=changed) == {"temperature": 0.1, "top_k": 20, "max_tokens": 3}
    assert defaults(generation_config="vllm", override_generation_config=changed) == {
        "temperature": 0.1,
        "max_tokens": 3,
    }
