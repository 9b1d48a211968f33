"""What is written from the code is current, links lead somewhere, and every command shown is one there is."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from playwright.sync_api import expect

import quire
from quire.cli import main
from quire.cli.base import DEVELOPER_BENCHMARKS
from quire.config import OPTIONS, Settings
from quire.config.other_servers import ELSEWHERE, UNSUPPORTED
from tests.browser import CHROMIUM, chromium
from tools import metrics_page, options_page, other_servers_page, parsers_page, requests_page, vllm_page
from tools.reference import PAGES as GENERATED

ROOT = Path(__file__).parents[1]
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*.md"))


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("configuration", options_page),
        ("requests", requests_page),
        ("metrics", metrics_page),
        ("parsers", parsers_page),
        ("vllm", vllm_page),
        ("other-servers", other_servers_page),
    ],
)
def test_what_is_written_from_the_code_is_current(name: str, page: ModuleType) -> None:
    written = ROOT / f"docs/reference/{name}.md"
    assert written.read_text(encoding="utf-8") == page.markdown(), "run `make docs`"


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in PAGES))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            path = ((ROOT / page).parent / target).resolve()
            assert path.exists() or str(path.relative_to(ROOT / "docs")) in GENERATED, target


SEARCHED = {
    "function calling": "guides/tool-calling/",
    "windows": "installation/#windows",
    "macos": "installation/#macos",
    "out of memory": "troubleshooting/#the-server-runs-out-of-memory",
    "gguf": "guides/gguf/",
    "system message": "guides/prefix-caching/#what-is-shared",
    "asyncllm": "examples/#async_llmpy",
    "lora": "troubleshooting/#adapters-are-not-applied-at-run-time",
    "guided_json": "guides/structured-outputs/#choices-regular-expressions-and-grammars",
    "trust_remote_code": "reference/vllm/#llm-engineargs-asyncengineargs",
    "tensor-parallel-size": "guides/many-gpus/",
    "reverse proxy": "guides/deployment/#behind-a-reverse-proxy",
    "systemd": "guides/deployment/#systemd",
    "cors": "guides/security/#requests-from-web-pages-cors",
    "tls": "guides/security/#tls",
    "rocm": "installation/#linux",
    "mirostat": "reference/requests/#refused",
}
"""What newcomers look for, and a place that the site's search has to find for it."""
FIRST = ("function calling", "windows", "macos", "out of memory", "gguf")
"""Those whose page is the first that is shown."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        ["make", "site", f"PYTHON={sys.executable}", f"SITE={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    """Every page is in the navigation, every link and anchor leads to one, and search finds what is looked for."""
    assert (site / "reference/configuration/index.html").stat().st_size > 10_000
    fetched = re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(https?:[^"]+)"', (site / "index.html").read_text())
    assert not fetched, "a page fetches something from elsewhere"
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    for words, place in SEARCHED.items():
        found = [each["location"] for each in index if words in f"{each['title']} {each['text']}".lower()]
        assert place in found, (words, found)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Tests are quiet."""


@pytest.mark.nightly
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_the_search_box_shows_what_is_looked_for_first(site: Path) -> None:
    """Pages of help before benchmarks and the changelog, which mention everything."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server, chromium() as browser:
        Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        box, first = page.locator(".md-search__input"), page.locator(".md-search-result__item a").first
        box.click()
        for words in FIRST:
            box.fill(words[:-1])
            box.press_sequentially(words[-1])
            path = f"/{SEARCHED[words].partition('#')[0]}?"
            expect(first, words).to_have_attribute("href", re.compile(re.escape(path)), timeout=60_000)
        server.shutdown()


def commands(text: str) -> Iterator[str]:
    """Every `quire ...` line, in blocks and in sentences."""
    text = text.replace("\\\n", " ")  # lines that go on
    shown = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in shown for line in block.splitlines()]
    lines += re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
    for line in (*lines, *re.findall(r"`([^`\n]+)`", text)):
        for part in re.split(r"&&|\|(?= )", line):
            words = part.split(" #")[0].strip()
            if re.match(r"(?:\w+=\S+ )*quire [a-z]", words):
                yield re.sub(r"^(?:\w+=\S+ )*quire |\[[^]]*\]|&$| \.\.\.$", "", words)


def is_current(page: str, line: str) -> bool:
    """Whether a command is one of this version: the changelog also names benchmarks that were commands once."""
    words = shlex.split(line)
    return not (page == "CHANGELOG.md" and words[0] == "bench" and words[1] in DEVELOPER_BENCHMARKS)


SHOWN = sorted(
    (page, line)
    for page, line in {
        (str(path.relative_to(ROOT)), line) for path in PAGES for line in commands(path.read_text("utf-8"))
    }
    if is_current(page, line)
)


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[line for _, line in SHOWN])
def test_every_command_shown_is_one_there_is(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as parsing goes: the subcommand, its options and the values they take."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    for word in words:
        if word.endswith(".json"):
            (tmp_path / word).touch()
    with click.Context(main) as context:
        group: click.Command | None = main
        while isinstance(group, click.Group) and words:
            name = words.pop(0)
            group = group.get_command(context, name)
            assert group is not None, f"{page}: there is no command {name}"
        assert group is not None
        if words and not isinstance(group, click.Group):  # a bare name is only a mention
            group.make_context(line, words, parent=context)


def benchmarks_shown(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every `python -m benchmarks.NAME ...` line that is whole: the name, and its arguments."""
    text = text.replace("\\\n", " ")
    for name, rest in re.findall(r"^ *python -m benchmarks\.(\w+)([^`#\n]*)(?=[`#\n])", text, re.MULTILINE):
        yield name, shlex.split(rest)


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in PAGES))
def test_every_benchmark_shown_is_one_there_is(page: str) -> None:
    for name, words in benchmarks_shown((ROOT / page).read_text("utf-8")):
        if name in DEVELOPER_BENCHMARKS:
            with suppress(click.exceptions.Exit):
                command: click.Command = importlib.import_module(f"benchmarks.{name}").command
                command.make_context(name, words)
        else:
            assert (ROOT / "benchmarks" / f"{name}.py").is_file() or name == "NAME"


def test_commands_are_found_in_blocks_and_sentences() -> None:
    assert len(SHOWN) > 30
    assert ("docs/guides/executors.md", "serve my-graphs --executor onnx") in SHOWN
    assert list(commands("```sh\nA=1 quire serve x # so\n```\n`quire plan M` or `quire bench`")) == [
        "serve x",
        "plan M",
        "bench",
    ]


def test_options_named_in_prose_are_options_there_are() -> None:
    known = {known.flag for known in OPTIONS.values()} | {f"--no-{known.flag[2:]}" for known in OPTIONS.values()}
    known |= {f"--{name.replace('_', '-')}" for name in (*UNSUPPORTED, *ELSEWHERE)} | set(
        _flags(main, click.Context(main))
    )
    for name in DEVELOPER_BENCHMARKS:
        command = importlib.import_module(f"benchmarks.{name}").command
        known |= set(_flags(command, click.Context(command)))
    foreign = {"--build-arg", "--extra-index-url", "--no-cache-dir", "--gpus", "--rm"}
    foreign |= {"--dataset-name", "--ignore-eos"}  # of vllm bench serve
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        # Benchmarks say what was run on the day, the other page what other servers have.
        if "benchmarks" not in page.parts and page.name != "other-servers.md":
            for quoted in re.findall(r"`([^`\n]+)`", text):
                for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", quoted):
                    assert flag in known | foreign, f"{page.relative_to(ROOT)}: there is no {flag}"


def _flags(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            assert member is not None
            yield from _flags(member, context)
    for param in command.params:
        yield from (*param.opts, *param.secondary_opts)


GUIDES = ROOT / "docs/guides"


@pytest.mark.parametrize(
    ("page", "number", "lines"),
    [
        ("offline-inference", 0, 4),
        ("offline-inference", 1, 3),
        ("offline-inference", 2, 2),
        ("offline-inference", 3, 2),
        ("offline-inference", 4, 3),
        ("engine", 0, 10),
        ("engine", 1, 1),
        ("from-vllm", 0, 5),
    ],
)
def test_each_example_in_python_runs(page: str, number: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (GUIDES / f"{page}.md").read_text("utf-8"), re.S | re.M)
    exec(compile(blocks[number], page, "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert len(said) >= lines
    assert said[-1].split()[0] in ("0", "800") or page != "engine"


def test_the_example_for_notebooks_runs_in_a_loop_that_runs_already(capsys: pytest.CaptureFixture[str]) -> None:
    """As a cell does: IPython compiles it so and awaits what it gives."""
    page = (GUIDES / "offline-inference.md").read_text("utf-8")
    [block] = re.findall(r"^<!-- notebook -->\n```python\n(.*?)^```$", page, re.S | re.M)

    async def cell() -> None:
        await eval(compile(block, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {})

    asyncio.run(cell())
    said = capsys.readouterr().out.splitlines()
    assert len(said[0]) > 10 and said[-1] == said[0]


def test_the_quickstart_shows_the_examples_of_the_readme() -> None:
    shown, readme = (
        dict(re.findall(r"^<!-- (\w+) -->\n(```.*?^```$)", (ROOT / page).read_text("utf-8"), re.S | re.M))
        for page in ("docs/quickstart.md", "README.md")
    )
    assert shown == readme
    assert len(shown) == 5


def test_each_switch_shown_can_be_set_alone() -> None:
    """The table of switches: every flag in it, by itself, with the value it is shown with."""
    text = (GUIDES / "scheduling.md").read_text("utf-8")
    shown = re.findall(r"`(--[^`]+)`", text[text.index("## Turn each optimization") :])
    assert len(shown) > 20
    for one in shown:
        with click.Context(main) as context:
            serve = main.get_command(context, "config")
            assert serve is not None
            serve.make_context("config", shlex.split(one), parent=context)
            main.main(["config", *shlex.split(one)], standalone_mode=False)


IDEAS = sorted(page for page in (ROOT / "docs/how-it-works").glob("*.md") if page.stem != "index")


def test_files_that_are_named_are_there() -> None:
    """Paths in code quotes on the pages for contributors: from the root, or the end of a path in src/quire."""
    for page in (ROOT / "docs/architecture.md", ROOT / "CONTRIBUTING.md", *IDEAS):
        for path in re.findall(r"`([\w/.]+(?:/|\.py|\.proto))`", page.read_text("utf-8")):
            assert (ROOT / path).exists() or any((ROOT / "src/quire").rglob(path.rstrip("/"))), (page, path)


def test_each_idea_has_its_drawing_its_files_and_its_place() -> None:
    """Drawings are plain: a title, no script, nothing fetched. Names of classes and functions exist in a file named."""
    index = (ROOT / "docs/how-it-works/index.md").read_text("utf-8")
    assert re.findall(r"^\| \[[^]]+\]\(([\w-]+)\.md\)", index, re.MULTILINE) and len(IDEAS) >= 9
    for page in IDEAS:
        text = page.read_text("utf-8")
        assert f"]({page.name})" in index
        [drawing] = re.findall(r"^!\[.+\]\((\S+)\)$", text, re.MULTILINE)
        root = ElementTree.parse(page.parent / drawing).getroot()
        kinds = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert "title" in kinds and kinds <= {"svg", "title", "defs", "marker", "path", "rect", "line", "text"}
        rows = re.findall(r"^\| `([\w/.]+)` \| (.*) \|$", text, re.MULTILINE)
        assert rows, page
        for path, what in rows:
            code = (ROOT / "src/quire" / path).read_text("utf-8")
            for name in re.findall(r"`(\w+)`", what):
                assert re.search(rf"\b(?:class|def) {name}\b", code), (page.name, path, name)


def test_the_reference_has_each_public_name_and_each_of_its_methods() -> None:
    page = GENERATED["reference/python.md"]()
    sections = dict(re.findall(r"^## `quire\.(\w+)`\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert list(sections) == [name for name in quire.__all__ if inspect.isclass(getattr(quire, name))]
    for name, section in sections.items():
        one = getattr(quire, name)
        if one.__name__ != name:
            assert f"`quire.{one.__name__}`" in section
            continue
        missing = [each for each in vars(one) if not each.startswith("_") and f"`{each}`" not in section]
        assert section.strip() and (not missing or one is quire.QuireError), f"quire.{name}: {missing}"


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert len(quoted) > 20
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "src/quire").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code).replace("{EMBEDDED!r}", "'embedded'")  # messages over several lines
    assert [message for message in quoted if message not in code] == []


def test_settings_shown_as_yaml_are_settings() -> None:
    blocks = [b for page in PAGES for b in re.findall(r"^```yaml\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M)]
    assert blocks
    for block in blocks:
        Settings.of(**{name.replace("-", "_"): value for name, value in yaml.safe_load(block).items()})
