"""A proxy that notes what clients send: URL/CELL/PATH goes to PATH of the cell's server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx

_HOP = {"connection", "content-length", "transfer-encoding", "host", "accept-encoding", "keep-alive"}


class Recorder(ThreadingHTTPServer):
    """servers: the URL of each cell's. sent: the requests of each cell that had a JSON body: path and body."""

    def __init__(self, servers: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.servers = servers
        self.sent: dict[str, list[dict[str, Any]]] = {}
        self.client = httpx.Client(trust_env=False, timeout=600)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def _pass_on(self) -> None:
        _, cell, path = self.path.split("/", 2)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if body:
            self.server.sent.setdefault(cell, []).append({"path": f"/{path}", "body": json.loads(body)})
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        url = f"{self.server.servers[cell]}/{path}"
        # A client that has left is left by us, too: its answer is closed with this block.
        with suppress(OSError), self.server.client.stream(self.command, url, content=body, headers=headers) as answer:
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name not in _HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            for piece in answer.iter_raw():
                self.wfile.write(piece)
                self.wfile.flush()

    do_GET = do_HEAD = do_POST = do_DELETE = _pass_on


@contextmanager
def recording(servers: Mapping[str, str]) -> Iterator[Recorder]:
    recorder = Recorder(servers)
    thread = Thread(target=recorder.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.shutdown()
        thread.join()
        recorder.server_close()
        recorder.client.close()
