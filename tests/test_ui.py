"""The live page in a real browser, on a real server under load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser import CHROMIUM, CODE, Crowd, Opened, chromium
from tests.live import Live, serving

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    few = ("--num-gpu-blocks-override", "96", "--max-num-seqs", "8")
    with serving(tmp_path_factory.mktemp("ui"), *few) as server:
        yield server


def test_pages_fill_and_free_and_a_request_says_what_happened_to_it(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url, view="engine")
    page = opened.page
    opened.wait("document.querySelector('#state').dataset.is === 'live'")
    opened.wait("document.querySelector('#pages .count').textContent.startsWith('0 held')")
    with Crowd(live.url, 12):
        opened.wait("parseInt(document.querySelector('#pages .count').textContent) >= 40")
        opened.wait("document.querySelectorAll('.rows button').length >= 12")
        assert page.locator("#figures").inner_text().count("of 8 seats") == 1
        opened.wait("document.querySelector('.one-step p').textContent.includes('decode')")
        assert re.search(r"Step \d+ .* for \d+ requests?, \d+ tokens?: ", page.inner_text(".one-step"))
        page.locator(".rows button").nth(2).click()
        page.get_by_text("What happened, and why").wait_for()
    opened.wait("document.querySelector('#pages .count').textContent.startsWith('0 held')")
    shown = page.locator("#story").inner_text()
    for words in ("submitted:", "got a place on the device", "prefix cache:", "first token after", "finished:"):
        assert words in shown or words == "finished:", shown
    assert re.search(r"[1-9]\d* cached", page.locator("#pages .count").inner_text())
    opened.wait("document.querySelectorAll('#figures .tile .value')[1].textContent === '0 of 8 seats'")
    assert {url.split("/")[2] for url in opened.asked} == {live.url.split("/")[2]}, "nothing is asked of others"
    assert opened.complaints == []
    opened.close()


def test_a_chat_streams_and_its_own_request_is_marked(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url)
    page = opened.page
    opened.wait("document.querySelector('#model').textContent.startsWith('embedded')")
    page.fill("#say", "Tell me a story about a dog.")
    page.press("#say", "Enter")
    grown = "(document.querySelector('.talk .assistant')?.textContent.length ?? 0) > "
    opened.wait(grown + "5")
    page.get_by_role("button", name="what happened to it").click()
    page.locator(".rows .own").wait_for()
    assert "yours" in (page.locator(".rows .own").get_attribute("aria-label") or "")
    assert len(page.locator(".talk .assistant").text_content() or "") > 40
    page.get_by_text("What happened, and why").wait_for()
    assert "chatcmpl-" in page.locator("#story code").inner_text()
    page.get_by_role("tab", name="Chat").click()
    page.fill("#say", "And a cat?")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator(".talk .error").count() == 0
    assert opened.complaints == []
    opened.close()
    live.settled()


def test_what_is_shown_can_be_held_saved_and_opened_again(live: Live, browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, live.url, view="engine")
    page = opened.page
    opened.wait("document.querySelector('#state').dataset.is === 'live'")
    with Crowd(live.url, 6):
        page.wait_for_timeout(1500)
        page.locator(".rows button").first.click()
    page.keyboard.press("Escape")
    page.locator("#requests").focus()
    page.keyboard.press("Space")
    assert page.locator("#state").inner_text() == "held"
    page.locator("#when").focus()
    for _ in range(3):
        page.keyboard.press("PageDown")
    assert page.locator("#moment").inner_text() not in ("", "−0.0 s")
    with page.expect_download() as coming:
        page.get_by_role("button", name="Save").click()
    path = tmp_path / "saved.json"
    coming.value.save_as(path)
    saved = json.loads(path.read_text())
    assert saved["frames"][0]["whole"] and saved["stories"]
    for frame in saved["frames"]:
        frame["told"] = frame.pop("events")
    path.write_text(json.dumps(saved), encoding="utf-8")
    opened.close()
    alone = Opened(browser, live.url, view="engine")
    alone.page.set_input_files("#file", path)
    alone.wait("document.querySelector('#state').textContent === 'a saved file'")
    alone.wait("document.querySelectorAll('.rows button').length >= 6")
    alone.page.locator(".rows button").last.click()
    alone.page.get_by_text("What happened, and why").wait_for()
    path.write_text('{"format": "something else"}')
    alone.page.set_input_files("#file", path)
    alone.wait("document.querySelector('#notice').textContent.includes('was not saved by this page')")
    path.write_text(json.dumps(saved | {"version": 2}))
    alone.page.set_input_files("#file", path)
    alone.wait("document.querySelector('#notice').textContent.includes('saved by a newer version of this page')")
    assert alone.complaints == []
    alone.close()


@pytest.mark.parametrize(("size", "theme"), [("desktop", "light"), ("desktop", "dark"), ("phone", "dark")])
def test_the_page_is_accessible(live: Live, browser: Browser, size: str, theme: str) -> None:
    opened = Opened(browser, live.url, size, theme, "engine")
    page = opened.page
    with Crowd(live.url, 4):
        opened.wait("document.querySelectorAll('.rows button').length >= 3")
        opened.wait("document.querySelectorAll('.one-step button').length >= 1")
        page.locator(".rows button").first.click()
        page.get_by_text("What happened, and why").wait_for()
        assert opened.violations() == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing hangs out at the side"
    heights = "[...document.querySelectorAll('header button, #side button')].map(button => button.offsetHeight)"
    assert [height for height in page.evaluate(heights) if 0 < height < 24] == [], "a finger finds them"
    assert opened.complaints == []
    opened.close()


def test_the_keyboard_reaches_everything(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url, view="engine")
    page = opened.page
    with Crowd(live.url, 4):
        opened.wait("document.querySelectorAll('.rows button').length >= 4")
        opened.wait("document.querySelectorAll('.one-step button').length >= 1")
        page.locator(".timeline").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.get_by_text("What happened, and why").wait_for()
        page.locator(".bars").focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(300)
        chosen = page.locator(".bars").get_attribute("aria-valuenow")
        page.wait_for_timeout(500)
        assert page.locator(".bars").get_attribute("aria-valuenow") == chosen
        page.keyboard.press("Escape")
        seen = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"pause", "save", "open", "theme", "span", "bars", "tab-engine"} <= seen
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert opened.complaints == []
    opened.close()


def test_in_front_of_another_server_there_are_requests_and_chat(live: Live, browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, "--backend", "openai", "--upstream", live.url) as front:
        opened = Opened(browser, front.url)
        page = opened.page
        opened.wait("document.querySelector('#state').dataset.is === 'live'")
        page.fill("#say", "Tell me a story about a dog.")
        page.press("#say", "Enter")
        opened.wait("(document.querySelector('.talk .assistant')?.textContent.length ?? 0) > 5")
        page.get_by_role("tab", name="Engine").click()
        page.locator(".rows button").first.click()
        page.get_by_text(f"sent to {live.url}").wait_for()
        assert not page.locator("#pages").is_visible() and not page.locator("#steps").is_visible()
        assert opened.complaints == []
        opened.close()


def test_with_keys_a_browser_signs_in_once(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, "--api-key", "sesame") as locked:
        opened = Opened(browser, locked.url)
        page = opened.page
        page.get_by_label("API key").fill("guess")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("not a key of this server").wait_for()
        assert opened.violations() == []
        page.get_by_label("API key").fill("sesame")
        page.keyboard.press("Enter")
        opened.wait("document.querySelector('#state').dataset.is === 'live'")
        assert page.evaluate("document.cookie") == ""
        page.fill("#say", "Hello")
        page.press("#say", "Enter")
        opened.wait("(document.querySelector('.talk .assistant')?.textContent.length ?? 0) > 5")
        page.reload()
        opened.wait("document.querySelector('#state').dataset.is === 'live'")
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("API key").wait_for()
        unwelcome = [said for said in opened.complaints if "401" not in said]
        assert unwelcome == []
        opened.close()


ATTACKS = """<img src=x onerror="window.broken=1"><script>window.broken=1</script>
[a](javascript:window.broken=1) [b](data:text/html,<script>1</script>) [c](JAVA\tSCRIPT:1) <javascript:1>
![image](https://example.com/x.png) **half `open [d](vbscript:1
````
```html
<iframe srcdoc="<script>parent.broken=1</script>"></iframe>
```
````
<svg/onload=window.broken=1>
"""


def test_text_of_a_model_never_becomes_html(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url, "phone")
    page = opened.page
    opened.answers(*({"content": ATTACKS[at : at + 7]} for at in range(0, len(ATTACKS), 7)))
    opened.ask("Break the page.")
    last = page.locator(".talk .assistant .text")
    assert last.locator("img, script, iframe, svg, [onerror], [onload]").count() == 0
    links = [link.get_attribute("href") for link in last.locator("a").all()]
    assert links == ["https://example.com/x.png"]
    assert "```html" in (last.locator("pre").text_content() or ""), "a longer fence holds a shorter one"
    assert page.evaluate("window.broken") is None
    rows = "| a | b |\n|---|---|\n" + "| 1 | <b> |\n" * 3000
    opened.answers({"content": rows + "\n" + "word " * 40_000 + "*" * 2000 + "[" * 2000 + ">" * 2000})
    opened.ask("A long one.")
    assert page.locator(".table tr").count() == 2001
    page.get_by_text("1000 more rows").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert opened.complaints == []
    opened.close()


def test_growing_markdown_is_what_the_whole_text_is(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url)
    same = """async (text) => {
        const { Markdown } = await import("/ui/markdown.js");
        const [grown, whole] = [document.createElement("div"), document.createElement("div")];
        const growing = new Markdown(grown);
        for (let end = 0; end <= text.length; end += 3) growing.update(text.slice(0, end));
        growing.update(text);
        new Markdown(whole).update(text);
        return [grown.innerHTML === whole.innerHTML, whole.innerHTML];
    }"""
    alike, html = opened.page.evaluate(same, CODE + "\n> said\n> **twice**\n\n- a\n  - b\n- c\n\n```\nopen\n``")
    assert alike, html
    for part in ("<strong>in place</strong>", '<ol start="1">', "<th>way</th>", "<blockquote>", "<li>a<ul><li>b"):
        assert part in html, html
    slow = """async () => {
        const { Markdown } = await import("/ui/markdown.js");
        const growing = new Markdown(document.createElement("div"));
        const text = "Some **bold** text and `code`.\\n\\n".repeat(6500);
        const began = performance.now();
        for (let end = 0; end < text.length; end += 500) growing.update(text.slice(0, end));
        return performance.now() - began;
    }"""
    assert opened.page.evaluate(slow) < 4000, "200 kB in 400 pieces"
    opened.close()


def test_a_chat_of_twenty_turns_is_kept_and_can_be_changed(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url, "phone", "dark")
    page = opened.page
    opened.wait("document.querySelector('#model').textContent.startsWith('embedded')")
    page.locator("#set summary").click()
    page.get_by_label("Most new tokens").fill("3")
    page.locator("#set summary").click()
    for turn in range(20):
        opened.ask(f"{turn}?")
    assert "Cut off at the limit" in page.locator(".talk .notes").last.inner_text()
    assert "3 tokens" in page.locator(".talk .notes").last.inner_text()
    page.reload()
    assert page.locator(".talk article").count() == 40
    opened.wait("document.querySelector('#state').dataset.is === 'live'")
    page.get_by_role("button", name="Regenerate").click()
    opened.wait("document.querySelector('#send').textContent === 'Send'")
    page.locator(".talk article:nth-child(40):not(.waiting)").wait_for()
    page.get_by_role("button", name="Edit").nth(18).click()
    assert page.input_value("#say") == "18?" and page.locator(".talk article").count() == 36
    assert opened.violations() == []
    page.locator("#history summary").click()
    page.once("dialog", lambda dialog: dialog.accept("Numbers"))
    page.get_by_role("button", name="Rename 0?").click()
    page.get_by_role("button", name="Open Numbers").wait_for()
    assert opened.violations() == []
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Numbers").click()
    assert page.locator(".talk article").count() == 0
    assert opened.complaints == []
    opened.close()


@pytest.mark.parametrize(("size", "theme"), [("desktop", "light"), ("desktop", "dark"), ("phone", "light")])
def test_reasoning_tool_calls_and_errors_are_shown(live: Live, browser: Browser, size: str, theme: str) -> None:
    opened = Opened(browser, live.url, size, theme)
    page = opened.page
    opened.answers({"reasoning": "Hm."}, {"content": CODE})
    opened.ask("How?")
    assert page.locator(".assistant .thoughts summary").inner_text().startswith("Thought")
    call = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    opened.answers({"tool_calls": [call]}, finish="tool_calls")
    opened.ask("Look.")
    assert page.locator(".calls").last.inner_text().split() == [
        "Calls",
        "look",
        "arguments",
        "Copy",
        "{",
        '"at":',
        "1",
        "}",
    ]
    opened.answers({"content": "Seen."})
    with page.expect_request("**/v1/chat/completions") as asked:
        opened.ask("a cat")
    sent = (asked.value.post_data_json or {})["messages"]
    assert sent[-1] == {"role": "tool", "content": "a cat", "tool_call_id": "call_1"}
    error = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    page.fill("#say", "More.")
    page.press("#say", "Enter")
    page.get_by_text("too long").wait_for()
    assert opened.violations() == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.locator(".talk .error").get_by_role("button", name="New chat").click()
    assert page.locator(".talk article").count() == 0
    opened.close()
