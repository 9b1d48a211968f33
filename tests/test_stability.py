"""What users rely on by name, listed in tests/stable.json: nothing of it goes, or changes its meaning, unnoticed.

`PYTHONPATH=src python -m tests.test_stability` writes the list anew. A name that is taken out has to warn for one
minor version first: see docs/reference/stability.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quire
from quire.cli import main
from quire.config import OPTIONS
from quire.config.option import SHORT
from quire.executors.contract import executor_pb2
from quire.executors.contract.translate import VERSION as CONTRACT
from quire.observability.recording_format import VERSION as RECORDING
from quire.ops.gemm import FORMAT as GEMM
from quire.server import openapi
from quire.server.batch_api.store import FORMAT as BATCHES
from quire.server.response_store import FORMAT as RESPONSES
from quire.sim.calibration import VERSION as CALIBRATION
from quire.weights.files import ONNX_FORMAT
from tests.commands import commands
from tools.metrics_page import rows as metrics

FILE = Path(__file__).with_name("stable.json")
PAGE = Path(__file__).parents[1] / "docs/reference/stability.md"


def flags() -> dict[str, list[str]]:
    """The flags of each command, but for those of settings, which are options."""
    options = {flag for known in OPTIONS.values() for flag in (known.flag, f"--no-{known.flag[2:]}")} | {
        *SHORT.values()
    }
    found = {path: {f for p in one.params for f in (*p.opts, *p.secondary_opts)} for path, one in commands(main)}
    return {path: sorted(flag for flag in each - options if flag.startswith("-")) for path, each in found.items()}


def fields(messages: Any, before: str = "") -> Iterator[tuple[str, dict[str, int]]]:
    """Each message of the gRPC contract with the numbers of its fields."""
    for name, message in messages.items():
        yield before + name, {field.name: field.number for field in message.fields}
        yield from fields(message.nested_types_by_name, f"{before}{name}.")


def surface() -> dict[str, Any]:
    """The names that there are."""
    described = json.loads(openapi.document("0"))
    contract = executor_pb2.DESCRIPTOR
    return {
        "quire.__all__": sorted(quire.__all__),
        "commands": flags(),
        "options": sorted(known.flag for known in OPTIONS.values()),
        "short options": dict(sorted(SHORT.items())),
        "routes": sorted(f"{method.upper()} {path}" for path, kinds in described["paths"].items() for method in kinds),
        "metrics": {name: f"{kind} {' '.join(labels)}".strip() for name, kind, labels, _ in sorted(metrics())},
        "grpc": {"package": contract.package, "messages": dict(sorted(fields(contract.message_types_by_name)))},
        "formats": {
            "recording": RECORDING,
            "batches": BATCHES,
            "responses": RESPONSES,
            "gemm cache": GEMM,
            "grpc contract": CONTRACT,
            "onnx graphs": ONNX_FORMAT,
            "calibration": CALIBRATION,
        },
    }


def test_the_stable_names_are_those_that_are_listed() -> None:
    listed, found = json.loads(FILE.read_text("utf-8")), surface()
    assert listed.keys() == found.keys()
    for part, names in found.items():
        assert names == listed[part], f"{part}: see the docstring of this module"


def test_the_page_gives_each_format_with_its_version() -> None:
    page = PAGE.read_text("utf-8")
    for name, version in surface()["formats"].items():
        assert f"| {name} | {version} |" in page


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n", "utf-8")
