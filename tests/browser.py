"""A real browser on the live page: headless Chromium, where there is one. `python -m tests.browser FOLDER` takes the
pictures of docs/guides/live-page.md."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

import httpx
from axe_playwright_python.base import AXE_FILE_PATH
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.live import serving

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
SIZES = {"desktop": (1440, 900), "laptop": (1280, 720), "phone": (360, 780)}
OWN_SURFACE = (
    *("WebUIOmniboxPopup", "WebUIOmniboxFullPopup", "WebUIOmniboxAimPopup", "PreloadTopChromeWebUI", "InitialWebUI"),
    *("WebUIToolbar", "MediaRouter", "OptimizationHints", "LensOverlay", "HttpsUpgrades", "PaintHolding"),
)
"""Features of Chromium that are not seen here: for each window it loads 400 files of its own popups and toolbars, which
takes twice as long as the page itself."""
HEADS = (
    "Once upon a time there was a girl called Lily who lived in a small house near the sea with her dog. ",
    "The old king had three sons, and the youngest of them was called Tom. One day the king said: ",
    "A dog and a boat. ",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        without = f"--disable-features={','.join(OWN_SURFACE)}"
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", without])
        yield browser
        browser.close()


class Opened:
    """A page, and what its console said that it should not have."""

    def __init__(
        self, browser: Browser, url: str, size: str = "desktop", theme: str = "light", view: str = "chat"
    ) -> None:
        width, height = SIZES[size]
        scale = 2 if size == "phone" else 1
        self.context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,  # type: ignore[arg-type]
            device_scale_factor=scale,
        )
        self._begin(f"{url}/ui#{view}")

    def tab(self) -> Opened:
        """Another page of the same browser, at the same address."""
        other = copy(self)
        other._begin(self.page.url)
        return other

    def _begin(self, url: str) -> None:
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(150_000)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def show_list(self) -> None:
        """Open the list of conversations."""
        if not self.page.locator("#history[open]").count():
            self.page.locator("#history summary").click()

    def titles(self) -> list[str]:
        """Of the conversations, in the list's order."""
        names: list[str] = self.page.locator(".conversations .name").all_text_contents()
        return names

    def held(self) -> int:
        """KV blocks that are held, as the map's label says."""
        label = self.page.locator("#pages canvas").get_attribute("aria-label") or ""
        words = label.removeprefix("Map of KV blocks: ").split()
        return int(words[0]) if len(words) > 1 else -1

    def wait(self, script: str, seconds: float = 150.0) -> None:
        """Until an expression is true. Asked from here: the page's own policy lets nobody run text in it."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline, f"never true: {script}; {self.complaints}"
            self.page.wait_for_timeout(50)

    def violations(self) -> list[str]:
        """axe-core's violations, of all impacts."""
        if not self.page.evaluate("typeof window.axe === 'object'"):
            self.page.evaluate(Path(AXE_FILE_PATH).read_text("utf-8"))
        found: dict[str, Any] = self.page.evaluate("axe.run()")
        return [f"{one['id']}: {one['help']} ({one['nodes'][0]['html'][:120]})" for one in found["violations"]]

    def answers(self, *deltas: dict[str, Any], finish: str = "stop") -> None:
        """Let the page get these deltas for what it asks next, instead of the server's answer."""
        body = stream(*deltas, finish=finish)
        self.page.unroute_all()
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))

    def ask(self, text: str) -> None:
        """Send a message, and wait for the end of its answer."""
        before = self.page.locator(".talk .assistant").count()
        self.page.fill("#say", text)
        self.page.press("#say", "Enter")
        self.page.locator(".talk .assistant:not(.waiting)").nth(before).wait_for()
        self.page.locator("#send", has_text="Send").wait_for()

    def close(self) -> None:
        self.context.close()


def stream(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """The body of a streamed answer. finish: "" for one that breaks off."""
    chunks = [{"id": "chatcmpl-0", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if finish:
        chunks.append({"id": "chatcmpl-0", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})  # type: ignore[dict-item]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


class Crowd:
    """Clients that ask for stories until told to stop, and then hang up."""

    def __init__(self, url: str, streams: int = 12) -> None:
        self._url, self._streams = url, streams
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._asking = threading.Event()
        self.answered = 0

    def __enter__(self) -> Crowd:
        self._thread.start()
        self._asking.wait()
        return self

    def __exit__(self, *about: object) -> None:
        self._loop.call_soon_threadsafe(self._all.cancel)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._ask())

    async def _ask(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False, verify=False) as client:
            self._all = asyncio.gather(*(self._one(client, random.Random(i)) for i in range(self._streams)))
            self._asking.set()
            await self._all

    async def _one(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        words = ("the", "cat", "tree", "sun", "red", "ball", "play", "saw", "big")
        while True:
            prompt = draw.choice(HEADS) + " ".join(draw.choices(words, k=draw.randint(1, 120)))
            asked = {"model": "embedded", "prompt": prompt, "temperature": 0.8, "stream": True}
            asked["max_tokens"] = draw.choice((20, 60, 120))
            async with client.stream("POST", "/v1/completions", json=asked) as answer:
                async for _ in answer.aiter_lines():
                    pass
            self.answered += 1
            await asyncio.sleep(0.3 * draw.random())


def picture(opened: Opened, path: Path) -> None:
    """A small PNG."""
    opened.page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)


CODE = """Reverse a list **in place** or as a copy:

```python
words = ["one", "two", "three"]
words.reverse()          # in place
copy = words[::-1]       # a copy
```

| way | changes the list | returns |
|---|---|---|
| `reverse()` | yes | `None` |
| `[::-1]` | no | a new list |

1. Use `reverse()` where nobody else holds the list.
2. Else use a slice; see [the documentation](https://docs.python.org/3/tutorial/datastructures.html).
"""


def chats(browser: Browser, url: str, folder: Path, size: str, theme: str) -> None:
    """The chat, with given answers so that the pictures are the same each time."""
    opened = Opened(browser, url, size, theme)
    opened.wait("document.querySelector('#state').dataset.is === 'live'")
    picture(opened, folder / f"chat-idle-{size}-{theme}.png")
    opened.answers({"reasoning": "A slice makes a copy. reverse() changes the list itself."}, {"content": CODE})
    opened.ask("How do I reverse a list in Python?")
    picture(opened, folder / f"chat-code-{size}-{theme}.png")
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}}
    opened.answers({"tool_calls": [call]}, finish="tool_calls")
    opened.page.locator("#new-chat").click()
    opened.ask("What will the weather in Oslo be?")
    picture(opened, folder / f"chat-tool-{size}-{theme}.png")
    error = {"message": "This model's maximum context length is 512 tokens.", "code": "context_length_exceeded"}
    opened.page.unroute_all()
    opened.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": error}))
    opened.page.locator("#new-chat").click()
    opened.page.fill("#say", "Summarise this report: ...")
    opened.page.press("#say", "Enter")
    opened.page.locator(".talk .error").wait_for()
    picture(opened, folder / f"chat-failed-{size}-{theme}.png")
    opened.close()


def main(folder: Path) -> None:
    sides = [(size, theme) for size in ("desktop", "phone") for theme in ("light", "dark")]
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        few = ("--num-gpu-blocks-override", "144", "--max-num-seqs", "12", "--long-prefill-token-threshold", "48")
        inner = Path(place) / "front"
        inner.mkdir()
        behind = ("--backend", "openai", "--upstream")
        with serving(Path(place), *few) as live, serving(inner, *few) as other:
            for size, theme in sides:
                chats(browser, live.url, folder, size, theme)
            with Crowd(live.url, 17):
                for size, theme in sides:
                    opened = Opened(browser, live.url, size, theme, "engine")
                    opened.page.wait_for_timeout(7000)
                    if theme == "dark":
                        opened.page.locator(".rows button").nth(3).click()
                        opened.page.wait_for_timeout(1500)
                    if (size, theme) == ("phone", "dark"):
                        opened.page.evaluate("document.querySelector('#side').scrollIntoView()")
                        opened.page.wait_for_timeout(300)
                    picture(opened, folder / f"ui-{size}-{theme}.png")
                    opened.close()
            with serving(inner, *behind, live.url, "--upstream", other.url) as front, Crowd(front.url, 17):
                opened = Opened(browser, front.url, "desktop", "light", "engine")
                opened.page.wait_for_timeout(9000)
                picture(opened, folder / "ui-side-by-side.png")
                opened.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
