"""The composition root: chooses implementations by settings, and passes them to each other.

`engine` builds an engine in this process (imports torch), `text` the tokenizer and templates, `server` and `proxy` HTTP
servers, `engine_main` is the program of the engine's own process, `engine_start` what it does before it imports torch,
and `engine_child` the rest. They are separate so that a server never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quire.errors import InvalidConfig


def extra(module: str, name: str) -> Any:
    """Import `module`, which needs the extra called `name`. Raises InvalidConfig where a package is missing or too
    old."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"this needs a package that is not installed ({error.name}): pip install 'quire-llm[{name}]' "
            f"(in a clone: pip install -e '.[{name}]')"
        ) from error
    except ImportError as error:
        raise InvalidConfig(
            f"an installed package is too old ({error.name}): pip install -U 'quire-llm[{name}]'"
        ) from error
