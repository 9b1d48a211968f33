"""`python -m benchmarks.kv_link`: what a connection between a prefill and a decode engine carries.

Two processes of this host, one of which sends blocks to the other, with a secret and without, in turns. What is printed
are, of each, the median of the gigabytes a second, and the processor seconds a gigabyte of both sides together.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection

import click
import numpy as np

from quire.executors.kv_link import Kind, accept, connect

ABOUT = {"blocks": "of a benchmark"}
SECRETS = {"secret": b"known to both sides alone", "no secret": b""}
TIMEOUT = 60.0
Measured = tuple[float, float]
"""Seconds on the clock and of the processor."""


def sent(listener: socket.socket, secret: bytes, size: int, count: int, answer: Connection) -> None:
    """Send `count` blocks of `size` bytes to who connects, and say what that took."""
    data = np.random.default_rng(1).integers(0, 256, (4, size), np.uint8)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = accept(sock, secret, ABOUT, TIMEOUT)
    link.timeout = TIMEOUT
    began, used = time.perf_counter(), time.process_time()
    for number in range(count):
        link.send(Kind.BLOCK, 1, number, memoryview(data[number % 4]))
    answer.send((time.perf_counter() - began, time.process_time() - used))
    link.wait(TIMEOUT)  # until the other side has read all, and closes
    link.close()


def received(address: tuple[str, int], secret: bytes, size: int, count: int) -> Measured:
    """Receive the blocks."""
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = connect(sock, secret, ABOUT, TIMEOUT)
    link.timeout = TIMEOUT
    lines = np.zeros((4, size), np.uint8)
    began, used = time.perf_counter(), time.process_time()
    for number in range(count):
        link.head()
        link.payload_into(memoryview(lines[number % 4]))
    took = time.perf_counter() - began, time.process_time() - used
    link.close()
    return took


def measure(secret: bytes, size: int, count: int) -> Measured:
    """Gigabytes a second, and processor seconds a gigabyte."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = context.Process(target=sent, args=(listener, secret, size, count, theirs))
        child.start()
        seconds, used = received(listener.getsockname(), secret, size, count)
        _, others = mine.recv()
        child.join()
    return size * count / seconds / 1e9, (used + others) / (size * count / 1e9)


@click.command()
@click.option("--size", default=7 << 20, show_default=True, help="Bytes of a block.")
@click.option("--blocks", default=64, show_default=True, help="Blocks that are sent.")
@click.option("--rounds", default=5, show_default=True, help="Of each kind.")
def command(size: int, blocks: int, rounds: int) -> None:
    """Measure a connection over loopback."""
    found: dict[str, list[Measured]] = {name: [] for name in SECRETS}
    for _ in range(rounds):
        for name, secret in SECRETS.items():
            found[name].append(measure(secret, size, blocks))
    for name, each in found.items():
        speeds, costs = zip(*each, strict=True)
        made = {"gb_per_s": statistics.median(speeds), "processor_s_per_gb": statistics.median(costs)}
        click.echo(json.dumps({"keys": name, **{key: round(value, 2) for key, value in made.items()}}))


if __name__ == "__main__":
    command()
