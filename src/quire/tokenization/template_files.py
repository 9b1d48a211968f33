"""The chat templates of a model's folder: one, and for some models another for requests with tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import InvalidModel
from quire.tokenization.tokenizer import read_json
from quire.tokenization.vocabularies import FOR_TOOLS


def templates_of(folder: Path, default: Any = None) -> dict[str, str]:
    """The templates of a folder by name, "default" and `FOR_TOOLS`. default: where its files have none.

    Raises InvalidModel for what is no text.
    """
    files = {
        "default": folder / "chat_template.jinja",
        FOR_TOOLS: folder / "additional_chat_templates" / f"{FOR_TOOLS}.jinja",
    }
    found = {name: read_template(path) for name, path in files.items() if path.is_file()}
    if "default" in found:
        return found
    given = read_json(folder / "tokenizer_config.json").get("chat_template", default)
    several = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = {one.get("name"): one.get("template") for one in several if isinstance(one, dict)}
    for name in ("default", FOR_TOOLS):
        if isinstance(source := named.get(name), str):
            found[name] = source
        elif source is not None:
            kind = type(source).__name__
            raise InvalidModel(f"chat_template of tokenizer_config.json is of type {kind}: not a template")
    return found


def read_template(path: Path) -> str:
    """The text of a file. Raises InvalidModel."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidModel(f"chat template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidModel(f"chat template {path} is not text: {error}") from error
