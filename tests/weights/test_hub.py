"""A hub id, end to end, with a little hub: downloaded once with its progress shown, then found without the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.checkpoints import make
from tests.tokenization.vocabulary import CHATML, byte_level, save

COMMIT = "c0ffee" * 6 + "c0ff"
NAME = "owner/tiny"


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The hub's routes over `folder` -> its address, and the files asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            files = sorted(folder.iterdir())
            if self.path.startswith(f"/api/models/{NAME}/tree/"):
                tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in files]
                self.tell(json.dumps(tree).encode())
                return
            if self.path.startswith(f"/api/models/{NAME}"):
                names = [{"rfilename": path.name} for path in files]
                self.tell(json.dumps({"id": NAME, "sha": COMMIT, "siblings": names, "private": False}).encode())
                return
            path = folder / self.path.partition("?")[0].rpartition("/")[2]
            if not self.path.startswith(f"/{NAME}/resolve/") or not path.is_file():
                self.tell(b"", {}, 404)
                return
            asked.append(path.name)
            data = path.read_bytes()
            self.tell(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

        def tell(self, body: bytes, headers: Mapping[str, str] = MappingProxyType({}), status: int = 200) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def inspect(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.lower().startswith("hf_")}
    free = {name: value for name, value in kept.items() if "proxy" not in name.lower()}
    return subprocess.run(
        [sys.executable, "-m", "quire", "inspect", NAME],
        env={**free, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    make(folder, "llama-gqa-tied")
    save(folder, byte_level(), tokenizer_config={"eos_token": "<|end|>", "chat_template": CHATML})
    (folder / "modeling.py").write_text("raise SystemExit('this must not run')")
    (folder / "pytorch_model.bin").write_bytes(b"this must not be read")
    return folder


def test_a_hub_id_is_downloaded_once_with_its_progress_shown(repository: Path, tmp_path: Path) -> None:
    with hub(repository) as (address, asked):
        first = inspect(tmp_path / "cache", HF_ENDPOINT=address)
    assert first.returncode == 0, first.stderr
    assert "LlamaForCausalLM" in first.stdout
    assert "100%" in first.stderr, "a bar is drawn while it downloads"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(asked)
    assert not {"modeling.py", "pytorch_model.bin"} & set(asked)
    again = inspect(tmp_path / "cache", HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert "%" not in again.stderr, "nothing is downloaded again"
    missing = inspect(tmp_path / "other", HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert missing.returncode == 1
    said = f"Error: {NAME} is not in the local hub cache, and the hub is offline or cannot be reached: "
    assert missing.stderr.startswith(said)
    assert str(tmp_path / "other") in missing.stderr
    assert f"HF_HOME names another). Where there is a network, `hf download {NAME}` fetches it" in missing.stderr
