"""Settings from defaults < file < environment < flags. Unknown names are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from quire.config.option import PREFIX
from quire.config.settings import OPTIONS, Settings
from quire.config.unknown import refuse
from quire.errors import InvalidConfig

FILE_VARIABLE = "QUIRE_CONFIG"
"""Names the file, as `--config` does. The only variable that is not an option's."""

_SERVICE = re.compile(r"QUIRE(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")


def load(
    flags: Mapping[str, object] | None = None,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from `flags` (by option name, only those given), `environ` and `file`, in order of precedence.

    Without `file`, `environ` may name one in QUIRE_CONFIG. Raises InvalidConfig for an unknown option, a bad value, or
    a file that cannot be read.
    """
    environ = environ or {}
    file = file or environ.get(FILE_VARIABLE)
    given = _from_file(Path(file)) if file else {}
    given.update(_from_environment(environ))
    for name, value in (flags or {}).items():
        known = OPTIONS.get(name)
        given[name] = (value, f"flag {known.flag}" if known else "flag")
    return Settings.build(given)


def _from_file(path: Path) -> dict[str, tuple[object, str]]:
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


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    variables = {known.variable: known.name for known in OPTIONS.values()}
    given: dict[str, tuple[object, str]] = {}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        if _is_of_a_service(variable, value):
            continue
        if variable not in variables:
            raise refuse(variable, "environment", variables)
        given[variables[variable]] = (value, f"environment {variable}")
    return given


def _is_of_a_service(variable: str, value: str) -> bool:
    """Whether Kubernetes, or a Docker link, set this for a Service whose name begins with `quire`.

    It does so for every Service of a namespace: `QUIRE_PORT=tcp://10.0.0.1:8000`, for example, is no port.
    """
    if variable.endswith("_PORT") and _SERVICE_URL.fullmatch(value):
        return True
    return _SERVICE.fullmatch(variable) is not None
