"""What every client does: `python with_CLIENT.py URL` prints a line of JSON for each of its functions.

URL/CELL is the server for the cell of that name, so that what a client sends is known to be of this cell. A function
raises where its client does not work, and may return a text for the table.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any
from urllib.request import ProxyHandler, build_opener

MODEL = "embedded"
CELLS = ("chat", "stream", "tools", "structured", "images", "cancel")
BOAT = "Tell me about a boat."
ASK = "What is the weather in Rome and in Paris?"
ON_AND_ON = "Count to a million."
SAYS = "It is done."
"""What the scripted model says behind the results of its tools."""
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAACgAAAAgAQMAAABaY6hDAAAABlBMVEX/AAAAAP9sof2OAAAAGElEQVR42mNgIBX8/8/AwMTAwEAb"
    "klQAACX0Ah0qoe3EAAAAAElFTkSuQmCC"
)
"""A blue square on red, a PNG file in base64."""
IMAGE_URL = f"data:image/png;base64,{IMAGE}"
CITIES = ["Rome", "Paris"]
CALLED: list[str] = []
"""The cities that `weather` was called with."""


def weather(city: str) -> str:
    """Tells the weather of a city."""
    CALLED.append(city)
    return f"It is sunny in {city}."


def check_loop(text: str) -> None:
    """After a loop of two calls of `weather`."""
    assert CALLED == CITIES, CALLED
    assert SAYS in text, text


def check_image(shown: int, plain: int) -> None:
    """Tokens of the prompt with the image, and without."""
    assert shown > plain + 4, (shown, plain)


def wait_until_answering(url: str) -> None:
    """Wait until the server is at work on a request."""
    opener = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + 100
    while not json.load(opener.open(f"{url}/stats"))["active_requests"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def main(*cells: Callable[[str], Any]) -> None:
    """Run each with its URL."""
    for cell in cells:
        assert cell.__name__ in CELLS
        try:
            outcome = cell(f"{sys.argv[1]}/{cell.__name__}") or "passed"
        except Exception:
            outcome = "failed: " + traceback.format_exc()
        print(json.dumps({"cell": cell.__name__, "outcome": outcome}), flush=True)
