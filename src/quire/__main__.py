"""The command `quire`, which is `python -m quire` as well."""

from __future__ import annotations

import importlib
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""The exit code after Ctrl-C, as of what a shell runs."""


def main() -> None:
    """Run the command line. Whenever Ctrl-C comes, there is no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    importlib.import_module("quire.spinning").limit_spinning()
    importlib.import_module("quire.cli").main()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt where a command runs. Raised in an import, it might be printed, swallowed, or end the
    process in C++: there is nothing to tidy up yet, so the process ends at once."""
    runs = False
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        runs = runs or (frame.f_code.co_name == "invoke" and frame.f_globals.get("__name__") == "quire.cli.base")
        frame = frame.f_back
    if not runs:
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
