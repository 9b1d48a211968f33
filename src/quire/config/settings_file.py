"""Settings from a YAML file. Unknown names are refused."""

from __future__ import annotations

from pathlib import Path

import yaml

from quire.config.settings import OPTIONS
from quire.config.unknown import refuse
from quire.errors import InvalidConfig


def read(path: Path) -> dict[str, tuple[object, str]]:
    """Value and source of the options in a file. Raises InvalidConfig for an unknown option, and for a file that cannot
    be read."""
    try:
        text = path.read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise InvalidConfig(f"cannot read the settings file {path}: {error.strerror}", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # A caret on a line of its own points at nothing where all is one line.
        lines = (
            line for line in str(error).replace('in "<unicode string>", ', "in ").split("\n") if line.strip() != "^"
        )
        reason = " ".join(" ".join(lines).split())
        raise InvalidConfig(f"the settings file {path} is not valid YAML: {reason}", param="config") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"the settings file {path} must hold 'option: value' lines", param="config")
    given: dict[str, tuple[object, str]] = {}
    # `content` has the last of equal keys only.
    names = [key.value.replace("-", "_") for key, _ in node.value] if node is not None else []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in OPTIONS:
            raise refuse(str(key), f"file {path}", _keys("-" if "-" in str(key) else "_"))
        if names.count(name) > 1:
            raise InvalidConfig(f"file {path}: {name} is given twice", param=name)
        given[name] = (value, f"file {path}")
    return given


def _keys(joint: str) -> list[str]:
    return [name.replace("_", joint) for name in OPTIONS]
