"""The live page in a real browser, on a real server under load."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route

from tests.browser import CHROMIUM, CODE, Crowd, Opened, chromium, stream
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


@pytest.fixture(scope="module")
def front(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that wants a key, in front of `live` and of one that is away."""
    behind = ("--backend", "openai", "--upstream", live.url, "--upstream", "http://127.0.0.1:9")
    with serving(tmp_path_factory.mktemp("front"), *behind, "--api-key", "sesame") as server:
        yield server


def test_pages_fill_and_free_and_a_request_says_what_happened_to_it(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url, view="engine")
    page = opened.page
    opened.wait("document.querySelector('#state').dataset.is === 'live'")
    opened.wait("document.querySelector('#pages .count').textContent.startsWith('0 held')")
    with Crowd(live.url, 12):
        opened.wait("parseInt(document.querySelector('#pages .count').textContent) >= 40")
        opened.wait("document.querySelectorAll('.rows button').length >= 12")
        assert page.locator("#figures").inner_text().count("of at most 8") == 1
        opened.wait("document.querySelector('.one-step p').textContent.includes('decode')")
        assert re.search(r"Step \d+ .* for \d+ requests?, \d+ tokens?: ", page.inner_text(".one-step"))
        page.locator(".rows button").nth(2).click()
        page.get_by_text("What happened, and why").wait_for()
    opened.wait("document.querySelector('#pages .count').textContent.startsWith('0 held')")
    shown = page.locator("#story").inner_text()
    for words in ("submitted:", "admitted", "prefix cache:", "first token after", "finished:"):
        assert words in shown or words == "finished:", shown
    assert re.search(r"[1-9]\d* cached", page.locator("#pages .count").inner_text())
    opened.wait("document.querySelectorAll('#figures .tile .value')[1].textContent === '0 of at most 8'")
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
    page.get_by_role("button", name="Explain").click()
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
        opened.wait("document.querySelectorAll('.rows button').length >= 6")
        opened.wait("document.querySelectorAll('.one-step button').length >= 4")
        page.locator(".rows button").first.click()
        page.get_by_text("What happened, and why").wait_for()
    page.keyboard.press("Escape")
    page.locator("#requests").focus()
    page.keyboard.press("Space")
    assert page.locator("#state").inner_text() == "paused"
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
    half = tmp_path / "half.json"
    half.write_text(json.dumps(saved | {"frames": saved["frames"][: len(saved["frames"]) // 2 + 1]}))
    alone.page.set_input_files("#file", [half, path])
    alone.page.get_by_role("columnheader", name="Difference").wait_for()
    made = alone.page.locator("#compare tr", has_text="Tokens generated").locator("td")
    alone.wait("document.querySelectorAll('#compare tr')[3].children[3].textContent !== ''")
    [first, second, difference] = made.all_inner_texts()
    counts = [frame["now"]["generated"] - saved["frames"][0]["now"]["generated"] for frame in saved["frames"]]
    assert [first, second] == [str(counts[len(counts) // 2]), str(counts[-1])]
    # The last frames may have brought no token more.
    assert difference.startswith("+") or first == second if first != "0" else difference == "–"
    assert alone.page.locator("#compare tr", has_text="Preemptions").locator("td").last.inner_text() == "equal"
    assert alone.violations() == []
    alone.page.get_by_role("button", name="saved.json").click()
    alone.page.locator(".rows button").last.click()
    alone.page.get_by_text("What happened, and why").wait_for()
    alone.page.get_by_role("button", name="Live").click()
    alone.page.locator("#compare").wait_for(state="hidden")
    path.write_text('{"format": "something else"}')
    alone.page.set_input_files("#file", path)
    alone.wait("document.querySelector('#notice').textContent.includes('was not saved by this page')")
    path.write_text(json.dumps(saved | {"version": 2}))
    alone.page.set_input_files("#file", path)
    alone.wait("document.querySelector('#notice').textContent.includes('saved by a newer version of this page')")
    assert alone.complaints == []
    alone.close()


@pytest.mark.parametrize(
    ("size", "theme"),
    [pytest.param("desktop", theme, marks=pytest.mark.nightly) for theme in ("light", "dark")] + [("phone", "dark")],
)
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


@pytest.mark.parametrize(
    ("size", "theme"), [pytest.param("desktop", "light", marks=pytest.mark.nightly), ("phone", "dark")]
)
def test_the_page_of_routes_is_accessible(live: Live, browser: Browser, size: str, theme: str) -> None:
    opened = Opened(browser, live.url, size, theme)
    page = opened.page
    page.goto(f"{live.url}/docs")
    page.get_by_text("POST /v1/chat/completions").click()
    assert page.get_by_role("cell", name="list of object, required").first.is_visible()
    assert opened.violations() == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing hangs out at the side"
    page.get_by_role("link", name="Chat and engine view").click()
    page.locator("#say").wait_for()
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


@pytest.mark.nightly
def test_the_time_from_opening_the_page_to_an_answer_is_measured(live: Live) -> None:
    """As `.ci/newcomer` does, with a browser of its own."""
    script = Path(__file__).parents[1] / "tools/page_time.py"
    done = subprocess.run(
        [sys.executable, str(script), live.url], capture_output=True, text=True, timeout=300, check=True
    )
    ready, first, whole = map(float, re.findall(r"([\d.]+) s", done.stdout))
    assert done.stdout.startswith("ready ") and 0 < ready <= first <= whole


def sign_in(page: Page) -> None:
    page.get_by_label("API key").fill("sesame")
    page.keyboard.press("Enter")


def test_in_front_of_others_they_are_side_by_side_beside_chat(front: Live, live: Live, browser: Browser) -> None:
    opened = Opened(browser, front.url)
    page = opened.page
    sign_in(page)
    opened.wait("document.querySelector('#state').dataset.is === 'live'")
    page.fill("#say", "Tell me a story about a dog.")
    page.press("#say", "Enter")
    opened.wait("(document.querySelector('.talk .assistant')?.textContent.length ?? 0) > 5")
    page.get_by_role("tab", name="Engine").click()
    page.locator(".rows button").first.click()
    page.get_by_text(f"sent to {live.url}").wait_for()
    assert not page.locator("#pages").is_visible() and not page.locator("#steps").is_visible()
    heads = page.locator("#compare thead button")
    assert heads.all_inner_texts() == ["this server", live.url.removeprefix("http://"), "127.0.0.1:9"]
    state = page.locator("#compare tr", has_text="State").locator("td")
    opened.wait("document.querySelectorAll('#compare tbody td')[1].textContent === 'live'")
    opened.wait("document.querySelectorAll('#compare tbody td')[2].textContent === 'nothing listens there'")
    assert state.first.inner_text() == "live"
    made = page.locator("#compare tr", has_text="Tokens generated").locator("td")
    for column in (1, 2):
        opened.wait(f"/^[1-9]/.test(document.querySelectorAll('#compare tr')[4].children[{column}].textContent)")
    assert made.last.inner_text() == "–"
    heads.nth(1).click()
    opened.wait("document.querySelector('#pages .count').textContent.includes('held')")
    page.locator(".rows button").first.click()
    page.get_by_text("admitted").wait_for()
    heads.nth(2).click()
    assert page.locator(".rows button").count() == 0 or opened.violations() == []
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Explain").click()
    page.get_by_text(f"sent to {live.url}").wait_for()
    assert heads.first.get_attribute("aria-pressed") == "true", "one's own request is this server's"
    assert opened.violations() == []
    assert {url.split("/")[2] for url in opened.asked} == {front.url.split("/")[2]}, "nothing is asked of others"
    opened.close()


def test_with_keys_a_browser_signs_in_once(front: Live, browser: Browser) -> None:
    opened = Opened(browser, front.url)
    page = opened.page
    page.get_by_label("API key").fill("guess")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("not one of this server's keys").wait_for()
    assert opened.violations() == []
    sign_in(page)
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


def test_two_tabs_keep_each_others_conversations(live: Live, browser: Browser) -> None:
    one = Opened(browser, live.url)
    one.answers({"content": "Yes."})
    other = one.tab()
    other.answers({"content": "No."})
    one.ask("first?")
    other.page.get_by_text("first?").wait_for(state="attached")
    other.page.locator("#new-chat").click()
    other.ask("second?")
    one.ask("third?")
    assert one.titles() == other.titles() == ["first?", "second?"]
    for tab in (one, other):
        tab.page.reload()
    assert one.page.locator(".talk .user > .text").all_inner_texts() == ["first?", "third?"]
    assert other.page.locator(".talk .user > .text").all_inner_texts() == ["second?"]
    # The same conversation in both, with an answer on its way in one: both go on, as two.
    other.show_list()
    other.page.get_by_role("button", name="Open first?").click()
    one.page.unroute_all()
    held: list[Route] = []
    one.page.route("**/v1/chat/completions", lambda route: held.append(route))
    one.page.fill("#say", "here?")
    one.page.press("#say", "Enter")
    other.page.locator(".talk").get_by_text("here?").wait_for()
    other.answers({"content": "There."})
    other.ask("there?")
    held[0].fulfill(body=stream({"content": "Here."}))
    one.page.locator("#send", has_text="Send").wait_for()
    assert sorted(one.titles()) == sorted(other.titles()) == ["first?", "first? (2)", "second?"]
    one.page.reload()
    assert one.page.locator(".talk article > .text").all_inner_texts()[-2:] == ["here?", "Here."]
    other.page.reload()
    assert other.page.locator(".talk article > .text").all_inner_texts()[-2:] == ["there?", "There."]
    other.page.once("dialog", lambda dialog: dialog.accept())
    other.show_list()
    other.page.get_by_role("button", name="Delete second?").click()
    one.wait("document.querySelectorAll('.conversations li').length === 2")
    assert one.complaints == other.complaints == []
    one.close()


def test_what_does_not_fit_is_dropped_oldest_first_and_none_is_broken(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url)
    full = """async () => {
        const { Conversations } = await import("/ui/conversations.js");
        const kept = new Conversations(() => 0);
        const said = (text) => ({ ...kept.create(), title: text[0], messages: [{ role: "user", content: text }] });
        for (let i = 0; i < 60; i += 1) kept.keep(said(`${i}`));
        const many = kept.list.length;
        const gone = [..."abcde"].map((name) => kept.keep(said(name.repeat(1_000_000))));
        localStorage.setItem("quire-conversation-odd", "{");
        localStorage.setItem("quire-conversation-other", JSON.stringify({ id: "another", messages: 5 }));
        const messages = [{ role: "assistant", content: "x", tool_calls: [5], reasoning: 7, images: ["javascript:1"] }];
        const last = { id: "last", title: 1, changed: 9e15, messages };
        localStorage.setItem("quire-conversation-last", JSON.stringify(last));
        const again = new Conversations(() => 0).list;
        return [many, gone, again.slice(1).map((one) => one.title), again[0].messages[0]];
    }"""
    many, gone, titles, message = opened.page.evaluate(full)
    assert (many, gone, titles) == (50, [1, 1, 1, 48, 1], ["e", "d", "c"])
    call = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    assert message == {"role": "assistant", "content": "x", "tool_calls": [call], "images": []}
    opened.page.reload()
    opened.page.locator(".talk .assistant").wait_for()
    assert opened.complaints == []
    opened.close()


def test_conversations_are_exported_imported_and_files_attached(live: Live, browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, live.url)
    page = opened.page
    opened.answers({"content": "Yes."})
    (tmp_path / "notes.md").write_text("a\n```\nb\n```\n")
    page.set_input_files("#attachment", tmp_path / "notes.md")
    opened.wait("document.querySelector('#say').value.startsWith('notes.md:\\n````\\na\\n```')")
    (tmp_path / "large.txt").write_text("x" * 200_001)
    page.set_input_files("#attachment", tmp_path / "large.txt")
    page.get_by_text("large.txt is larger than 200 kB").wait_for()
    (tmp_path / "odd.bin").write_bytes(b"\0\xff")
    page.set_input_files("#attachment", tmp_path / "odd.bin")
    page.get_by_text("odd.bin is not text").wait_for()
    page.press("#say", "Enter")
    page.locator(".talk .assistant:not(.waiting)").wait_for()
    opened.show_list()
    with page.expect_download() as coming:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "kept.json"
    coming.value.save_as(file)
    opened.close()
    fresh = Opened(browser, live.url)
    fresh.page.set_input_files("#conversations-file", file)
    fresh.page.get_by_text("1 conversation imported").wait_for()
    assert fresh.page.locator(".talk article").count() == 2
    fresh.page.set_input_files("#conversations-file", file)
    fresh.page.get_by_text("here already").wait_for()
    file.write_text("{}")
    fresh.page.set_input_files("#conversations-file", file)
    fresh.page.get_by_text("kept.json has no conversations saved by this page").wait_for()
    fresh.page.reload()
    assert fresh.page.locator(".talk article").count() == 2
    assert fresh.complaints == []
    fresh.close()


def test_escape_stops_an_answer_and_a_failed_one_can_be_retried(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url)
    page = opened.page
    opened.wait("document.querySelector('#model').textContent.startsWith('embedded')")
    page.fill("#say", "Tell me a story about a dog.")
    page.press("#say", "Enter")
    opened.wait("(document.querySelector('.talk .assistant > .text')?.textContent.length ?? 0) > 5")
    assert page.locator(".talk").get_attribute("aria-busy") == "true"
    page.press("#say", "Escape")
    page.locator(".talk .notes", has_text="Stopped").wait_for()
    assert page.locator("#heard").inner_text() == "The answer was stopped."
    assert page.locator(".talk").get_attribute("aria-busy") == "false"
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#say", "Again?")
    page.press("#say", "Enter")
    page.get_by_text("The server cannot be reached. Is it running?").wait_for()
    assert page.locator(".talk article").count() == 3, "the question stays, an empty answer does not"
    opened.answers({"content": "Half"}, finish="")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("The connection ended before the answer did.").wait_for()
    assert page.locator(".talk .notes").last.inner_text().startswith("Incomplete")
    opened.answers({"content": "Whole."})
    page.get_by_role("button", name="Retry").click()
    page.locator(".talk .assistant", has_text="Whole.").wait_for()
    assert page.locator("#heard").inner_text() == "The answer is complete."
    assert page.locator(".talk article").count() == 4 and page.locator(".talk .error").count() == 0
    assert [said for said in opened.complaints if "ERR_FAILED" not in said] == []
    opened.close()


def test_a_message_that_is_sent_before_the_models_are_known_is_answered(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url)
    opened.page.route("**/v1/models", lambda route: None)  # held back
    opened.page.reload()
    opened.ask("Tell me a story about a dog.")
    assert opened.page.locator(".talk .assistant > .text").inner_text() and opened.complaints == []
    opened.close()


def test_an_answer_outlives_a_reload_and_the_server_in_its_middle(browser: Browser, tmp_path: Path) -> None:
    """What had come is kept, it is said that it is not whole, and the next message is answered."""
    grown = "(document.querySelector('.talk .assistant:last-child > .text')?.textContent.length ?? 0) > 20"
    with serving(tmp_path, ends=-signal.SIGKILL) as mortal:
        opened = Opened(browser, mortal.url)
        page = opened.page
        page.fill("#say", "Tell me a story about a dog.")
        page.press("#say", "Enter")
        opened.wait(grown)
        page.reload()
        page.locator(".talk .user").wait_for()
        assert page.locator(".talk .user").count() == 1
        opened.ask("Another one, please.")
        assert page.locator(".talk .user").count() == 2
        assert opened.complaints == []
        page.locator("#new-chat").click()
        page.fill("#say", "Tell me a story about a cat.")
        page.press("#say", "Enter")
        opened.wait(grown)
        mortal.process.kill()
        page.get_by_text("The connection ended before the answer did.").wait_for()
        assert page.get_by_role("button", name="Retry").is_visible()
        assert len(page.locator(".talk .assistant > .text").last.inner_text()) > 20
        assert page.locator("#send").inner_text() == "Send"
        opened.close()


def test_images_are_attached_only_where_the_model_reads_them(live: Live, browser: Browser, tmp_path: Path) -> None:
    picture = tmp_path / "dot.png"
    Image.new("RGB", (2000, 10), "red").save(picture)
    blind = Opened(browser, live.url)
    blind.wait("document.querySelector('#state').dataset.is === 'live'")
    blind.page.set_input_files("#attachment", picture)
    blind.page.get_by_text("dot.png is not text; this model reads text only").wait_for()
    blind.close()
    opened = Opened(browser, live.url, "phone", view="none")
    page = opened.page
    card = {"id": "sees", "architecture": {"input_modalities": ["text", "image"]}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    page.reload()
    opened.wait("document.querySelector('#attach').title.includes('image')")
    page.set_input_files("#attachment", picture)
    page.get_by_role("button", name="Remove image 1").click()
    page.set_input_files("#attachment", picture)
    page.get_by_role("img", name="Image 1").wait_for()
    opened.answers({"content": "A dot."})
    page.fill("#say", "What is it?")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press("#say", "Enter")
    [image, text] = (asked.value.post_data_json or {})["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    page.locator(".talk .assistant:not(.waiting)").wait_for()
    page.reload()
    size = page.get_by_role("img", name="Image 1 of the message").evaluate("(image) => [image.naturalWidth]")
    assert size == [1024]
    assert opened.violations() == []
    assert opened.complaints == []
    opened.close()


def test_a_turn_late_in_a_long_conversation_costs_no_more_than_an_early_one(live: Live, browser: Browser) -> None:
    opened = Opened(browser, live.url)
    page = opened.page
    said = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": CODE, "finish": "stop", "first": 0.1}]
    many = json.dumps({"id": "long", "title": "Long", "changed": 1, "messages": said * 200})
    page.evaluate("(text) => localStorage.setItem('quire-conversation-long', text)", many)
    page.reload()
    assert page.locator(".talk article").count() == 400
    made = page.evaluate_handle("document.querySelector('.talk article')")
    drawn = "() => { window.made = 0; new MutationObserver((all) => all.forEach((one) => {"
    drawn += " window.made += [...one.addedNodes].filter((node) => node.nodeName === 'ARTICLE').length; }))"
    page.evaluate(drawn + ".observe(document.querySelector('.talk'), { childList: true }); }")
    opened.answers({"content": "Well."})
    opened.ask("And?")
    assert page.evaluate("window.made") == 2, "the question and the answer"
    assert page.evaluate("(first) => first.isConnected", made), "no other turn is drawn again"
    assert opened.complaints == []
    opened.close()


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        pytest.param("desktop", "light", marks=pytest.mark.nightly),
        ("desktop", "dark"),
        pytest.param("phone", "light", marks=pytest.mark.nightly),
    ],
)
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
