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
from contextlib import contextmanager
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
SIZES = {"desktop": (1440, 900), "laptop": (1280, 720), "phone": (390, 844)}
HEADS = (
    "Once upon a time there was a girl called Lily who lived in a small house near the sea with her dog. ",
    "The old king had three sons, and the youngest of them was called Tom. One day the king said: ",
    "A dog and a boat. ",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Opened:
    """A page, and what its console said that it should not have."""

    def __init__(self, browser: Browser, url: str, size: str = "desktop", theme: str = "light") -> None:
        width, height = SIZES[size]
        scale = 2 if size == "phone" else 1
        self.context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,  # type: ignore[arg-type]
            device_scale_factor=scale,
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(150_000)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{url}/ui")

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

    def serious(self) -> list[str]:
        """axe-core's serious and critical violations."""
        if not self.page.evaluate("typeof window.axe === 'object'"):
            self.page.evaluate(Path(AXE_FILE_PATH).read_text("utf-8"))
        found: dict[str, Any] = self.page.evaluate("axe.run()")
        return [
            f"{one['id']}: {one['help']} ({one['nodes'][0]['html'][:120]})"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]

    def close(self) -> None:
        self.context.close()


class Crowd:
    """Clients that ask for stories until told to stop; each hears its answer to the end."""

    def __init__(self, url: str, streams: int = 12) -> None:
        self._url, self._streams = url, streams
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))
        self.answered = 0

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *about: object) -> None:
        self._over.set()
        self._thread.join()

    async def _all(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False) as client:
            await asyncio.gather(*(self._one(client, random.Random(i)) for i in range(self._streams)))

    async def _one(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        words = ("the", "cat", "tree", "sun", "red", "ball", "play", "saw", "big")
        while not self._over.is_set():
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
        image.convert("RGB").save(path, optimize=True)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        few = ("--num-gpu-blocks-override", "144", "--max-num-seqs", "12", "--long-prefill-token-threshold", "48")
        with serving(Path(place), *few) as live, Crowd(live.url, 17):
            for size, theme in (("desktop", "light"), ("desktop", "dark"), ("phone", "light"), ("phone", "dark")):
                opened = Opened(browser, live.url, size, theme)
                opened.page.wait_for_timeout(9000)
                opened.page.fill("#say", "Tell me a story about a dog and a boat.")
                opened.page.press("#say", "Enter")
                opened.page.wait_for_timeout(2500)
                if theme == "dark":
                    opened.page.locator(".rows button").nth(3).click()
                    opened.page.wait_for_timeout(1500)
                if size == "phone":
                    top = "#side" if theme == "dark" else "body"
                    opened.page.evaluate(f"document.querySelector('{top}').scrollIntoView()")
                    opened.page.wait_for_timeout(300)
                picture(opened, folder / f"ui-{size}-{theme}.png")
                print(json.dumps({"size": size, "theme": theme, "complaints": opened.complaints}))
                opened.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
