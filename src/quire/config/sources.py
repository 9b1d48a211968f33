"""Settings from defaults < file < environment < flags. Unknown names are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import cast

from quire.config.option import PREFIX
from quire.config.settings import OPTIONS, Settings
from quire.config.unknown import refuse

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
    """See `settings_file`, whose package for YAML is imported where there is a file."""
    return cast("dict[str, tuple[object, str]]", import_module("quire.config.settings_file").read(path))


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
