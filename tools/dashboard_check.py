"""`python -m tools.dashboard_check FILE...`: whether Grafana's own types know everything in a dashboard.

Needs `pip install grafana-foundation-sdk`. Each file is read into the SDK's types and written again; what is lost or
changed on the way is a field that Grafana does not know.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths of what `after` lacks of `before`, or has otherwise."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after[name], f"{path}/{name}") if name in after else [f"{path}/{name}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif before != after:
        yield path


def main() -> None:
    sdk = "grafana_foundation_sdk"
    types, encoder = (importlib.import_module(f"{sdk}.{name}") for name in ("models.dashboard", "cog.encoder"))
    importlib.import_module(f"{sdk}.cog.plugins").register_default_plugins()
    for file in sys.argv[1:]:
        before = json.loads(Path(file).read_text("utf-8"))
        after = json.loads(json.dumps(types.Dashboard.from_json(before), cls=encoder.JSONEncoder))
        if unknown := list(lost(before, after)):
            sys.exit(f"{file}: Grafana does not know {', '.join(unknown)}")
        print(f"{file}: {len(before['panels'])} panels, as Grafana has them")


if __name__ == "__main__":
    main()
