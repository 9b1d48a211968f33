"""A proxy that notes what clients send: URL/CELL/PATH goes to PATH of the cell's server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from select import select
from threading import Thread
from typing import Any


class Recorder(ThreadingHTTPServer):
    """servers: the URL of each cell's. sent: the requests of each cell that had a JSON body: path and body."""

    daemon_threads = True

    def __init__(self, servers: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.servers = servers
        self.sent: dict[str, list[dict[str, Any]]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def _pass_on(self) -> None:
        cell, _, path = self.path[1:].partition("/")
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if body:
            self.server.sent.setdefault(cell, []).append({"path": f"/{path}", "body": json.loads(body)})
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        lines = [f"{name}: {value}" for name, value in {**headers, "connection": "close"}.items()]
        head = "\r\n".join([f"{self.command} /{path} HTTP/1.1", *lines, "", ""])
        self.close_connection = True
        here, port = self.connection, int(self.server.servers[cell].rpartition(":")[2])
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as there:
            there.sendall(head.encode() + body)
            # Clients send nothing behind a request: what can be read here is that they have left.
            while here not in select([here, there], [], [])[0] and (piece := there.recv(1 << 16)):
                here.sendall(piece)

    def do_GET(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()


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
