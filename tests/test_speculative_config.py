"""`--speculative-config` is checked key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import Settings
from quire.config.sources import load
from quire.config.speculative import parse
from quire.errors import InvalidConfig


def test_vllms_object_is_understood() -> None:
    made = parse('{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}')
    assert made is not None and (made.method, made.num_speculative_tokens, made.prompt_lookup_max) == ("ngram", 5, 4)
    draft = parse('{"model": "some/draft"}')
    assert draft is not None and draft.method == "draft_model"
    assert parse(None) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"method": "eagle"}', "eagle"),
        ('{"method": "ngram", "num_speculative_token": 3}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 32"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "from 1 to 32"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "prompt_lookup_min"),
        ('{"method": "draft_model", "model": 3}', "model"),
        ('{"method": "ngram", "adaptive": 1}', "adaptive"),
    ],
)
def test_what_cannot_be_is_named(text: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        Settings.of(speculative_config=text)


def test_python_and_files_may_give_the_object_itself(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 5\n")
    given = {"method": "ngram", "num_speculative_tokens": 5}
    for settings in (Settings.of(speculative_config=given), load(file=file)):
        made = parse(settings.scheduler.speculative_config)
        assert made is not None and (made.method, made.num_speculative_tokens) == ("ngram", 5)
    for wrong in (["ngram"], {"method": {1, 2}}, 5):
        with pytest.raises(InvalidConfig, match="speculative_config: must be a JSON object"):
            Settings.of(speculative_config=wrong)
    with pytest.raises(InvalidConfig, match="must be text"):
        Settings.of(model={"name": "embedded"})
