"""A server whose ranks run out of memory on purpose: `python -m tests.contract.starved serve ARGS`.

The engine's process is this module too, with a number for its argument. Its ranks are `starved_rank_child`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

from quire.assembly import engine_start
from quire.assembly.engine_child import main as child
from quire.assembly.server import serve
from quire.cli import main as quire
from quire.cli import serve as command


def main() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if sys.argv[1].isdecimal():
            patch.setattr(engine_start, "RANK_MODULE", "tests.contract.starved_rank_child")
            return child()
        patch.setattr(command, "serve", partial(serve, child="tests.contract.starved"))
        return quire.main(sys.argv[1:], prog_name="quire")


if __name__ == "__main__":
    sys.exit(main())
