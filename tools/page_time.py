"""`python tools/page_time.py URL`: seconds from opening a server's live page to its first answer, in headless Chromium.

Needs playwright, and Chromium on the PATH.
"""

from __future__ import annotations

import shutil
import sys
import time

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWERED = "(document.querySelector('.talk .assistant > .text')?.textContent.length ?? 0) > 0"


def measure(url: str) -> dict[str, float]:
    """Seconds after the browser was told to open the page: until one may type, and until an answer's first text.

    Typing takes no time. The page's content policy lets nobody wait within it, so it is asked every 5 milliseconds.
    """
    path = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(f"{url}/ui")
        page.locator("#say").fill("Tell me a story about a dog.")
        ready = time.perf_counter() - began
        page.press("#say", "Enter")
        while not page.evaluate(ANSWERED):
            page.wait_for_timeout(5)
        first = time.perf_counter() - began
        page.locator(".talk .assistant:not(.waiting)").wait_for()
        whole = time.perf_counter() - began
        browser.close()
    return {"ready": ready, "first text": first, "whole answer": whole}


if __name__ == "__main__":
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in measure(sys.argv[1]).items()))
