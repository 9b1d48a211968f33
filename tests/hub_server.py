"""A little hub on loopback: the routes of the Hugging Face hub that its client uses, over folders."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest
from huggingface_hub import constants

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class LittleHub:
    """repositories: folders by "owner/name". gated: names that need a login. asked: files that were sent. ranges: what
    was asked for of files. cut: files whose next answer ends at half."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    commit: str = COMMIT
    address: str = ""


def environment(cache: Path, **more: str) -> dict[str, str]:
    """The process's environment without the hub's variables, proxies and Ollama's store, with a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().startswith(("hf_", "ollama_"))}
    free = {name: value for name, value in kept.items() if "proxy" not in name.lower()}
    return {**free, "HF_HOME": str(cache), "OLLAMA_MODELS": str(cache / "no-ollama"), **more}


def use(little: LittleHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it this process's hub, with a cache in `folder` and no store of Ollama's."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(folder / "ollama"))
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    template = little.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", little.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


class _Handler(BaseHTTPRequestHandler):
    hub: LittleHub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        folder = self.hub.repositories.get(name)
        if name in self.hub.gated:
            self.tell(b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, 403)
            return
        if folder is None:
            self.tell(b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, 401)
            return
        if path.startswith("/api/models/"):
            self.describe(name, folder, path)
            return
        parts = path.strip("/").split("/")
        file = folder / "/".join(parts[4:])
        if parts[2] != "resolve" or not file.is_file():
            self.tell(b"", {"X-Error-Code": "EntryNotFound"}, 404)
            return
        if parts[3] not in ("main", self.hub.commit):
            self.tell(b"", {"X-Error-Code": "RevisionNotFound"}, 404)
            return
        self.send(file, file.relative_to(folder).as_posix())

    def describe(self, name: str, folder: Path, path: str) -> None:
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        rest = path.removeprefix(f"/api/models/{name}").strip("/").split("/")
        if len(rest) > 1 and rest[1] not in ("main", self.hub.commit):
            self.tell(b"{}", {"X-Error-Code": "RevisionNotFound"}, 404)
            return
        relative = [(each.relative_to(folder).as_posix(), each.stat().st_size) for each in files]
        if rest[0] == "tree":
            tree = [{"type": "file", "path": file, "size": size, "oid": "0" * 40} for file, size in relative]
            self.tell(json.dumps(tree).encode())
            return
        siblings = [{"rfilename": file, "size": size} for file, size in relative]
        about = {"id": name, "sha": self.hub.commit, "siblings": siblings, "private": False}
        self.tell(json.dumps(about).encode())

    def send(self, file: Path, name: str) -> None:
        if self.command == "GET":
            self.hub.asked.append(name)
        data = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.hub.commit}
        asked = self.headers.get("Range")
        if asked is None or self.command == "HEAD":
            self.tell(data, headers, cut=name in self.hub.cut and self.command == "GET", name=name)
            return
        self.hub.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").partition("-")[0])
        self.tell(data[start:], {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}, 206)

    def tell(
        self,
        body: bytes,
        headers: Mapping[str, str] = MappingProxyType({}),
        status: int = 200,
        *,
        cut: bool = False,
        name: str = "",
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.hub.cut.discard(name)
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def hub(repositories: Mapping[str, Path]) -> Iterator[LittleHub]:
    """Serve folders by "owner/name" while the block runs."""
    little = LittleHub(dict(repositories))
    handler = type("Handler", (_Handler,), {"hub": little})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    little.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield little
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
