"""`python -m benchmarks.viewers` compares what it measured, and its viewers are of the kinds it says."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from benchmarks import viewers
from benchmarks.viewers import VIEWERS, compare, streaming


def test_ratios_are_of_medians_and_to_none() -> None:
    found = {
        "none": [{"tokens_per_s": rate, "cpu_ms": 0.5} for rate in (90.0, 100.0, 500.0)],
        "reading": [{"tokens_per_s": rate, "cpu_ms": 0.51} for rate in (99.0, 10.0, 120.0)],
    }
    compared = compare(found)
    assert compared["medians"]["none"]["tokens_per_s"] == 100.0
    assert compared["ratios"] == {"reading": {"tokens_per_s": 0.99, "cpu_ms": 1.02}}


def test_streams_ask_the_server_until_they_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "_ENOUGH", 1000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(200)
        with streaming(server.getsockname()[1], 1):
            one, _ = server.accept()
            with one:
                assert one.recv(5) == b"POST "


def test_viewers_come_and_go_as_standard_input_says() -> None:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(3):
                one, _ = server.accept()
                with one:
                    asked.append(one.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        arguments = [sys.executable, "-c", VIEWERS, str(server.getsockname()[1]), "3"]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write("none\nreading\n")
        process.stdin.flush()
        thread.join(200)
        process.stdin.close()
        assert process.wait(200) == 0
    assert [line.split(b"\r\n")[0] for line in asked] == [b"GET /ui/events HTTP/1.1"] * 3
