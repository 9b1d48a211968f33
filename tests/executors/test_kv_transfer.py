"""The connection between a prefill and a decode engine: what a peer that fails, lies or attacks can do."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.executors import kv_link, kv_transfer
from quire.executors.kv_link import Kind, Link, LinkLost, accept, connect
from quire.executors.kv_transfer import Address, TcpPrefillClient, TcpPrefillServer, Wanted
from quire.scheduler.kv_offload import CopyDone, Prefill

SECRET, ABOUT, SIZE, BYTES = b"a secret of both sides", {"weights": "a", "dtype": "b"}, 4, 96
LOOPBACK = ("127.0.0.1", 0)
KEYS = [bytes([number]) * 32 for number in range(4)]
PROMPT = Prefill("an id", list(range(13)), 0, "", 0)
COPIES = [(key, slot) for slot, key in enumerate(KEYS[:3])]


@contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[Address]:
    """An address where each connection is served by `serve`."""
    listener = socket.create_server(LOOPBACK)

    def run() -> None:
        with suppress(OSError, LinkLost):
            while True:
                sock, _ = listener.accept()
                with sock, suppress(OSError, LinkLost):
                    serve(sock)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield Address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


class Asking:
    """A client, the lines that it fills, and the copies that have ended."""

    def __init__(self, address: Address, timeout: float = 5.0, **changed: Any) -> None:
        self.lines = np.zeros((8, BYTES), np.uint8)
        self.done: SimpleQueue[CopyDone] = SimpleQueue()
        given = {"secret": SECRET, "about": ABOUT, **changed}
        self.client = TcpPrefillClient(
            *([address], given["secret"], given["about"], self.lines, self.done.put), min_tokens=1, timeout=timeout
        )

    def reason(self, wanted: str) -> None:
        """Wait until this is why it cannot be asked."""
        deadline = time.monotonic() + 20
        while self.client.unavailable() != wanted:
            assert time.monotonic() < deadline, self.client.unavailable()
            time.sleep(0.005)

    def ask(self, ticket: int = 1) -> CopyDone:
        self.client.receive(ticket, PROMPT, COPIES)
        return self.done.get(timeout=20)


@contextmanager
def asking(serve: Callable[[socket.socket], None], timeout: float = 5.0, **changed: Any) -> Iterator[Asking]:
    with peer(serve) as address:
        asker = Asking(address, timeout, **changed)
        try:
            yield asker
        finally:
            asker.client.close()


def met(serve: Callable[[Link, int], None]) -> Callable[[socket.socket], None]:
    """Serve each prompt of a connection, whose handshake is as it should be: the link, and the prompt's number."""

    def run(sock: socket.socket) -> None:
        with closing(accept(sock, SECRET, ABOUT, 5.0)) as link:
            while True:
                head = link.head()
                link.payload(head, 1 << 20)
                if head.kind == Kind.PREFILL:
                    serve(link, head.number)

    return run


def block(number: int) -> bytes:
    return bytes([40 + number]) * BYTES


def send_all(link: Link, prompt: int) -> None:
    for number in (2, 0, 1):
        link.send(Kind.BLOCK, prompt, number, block(number))


def test_blocks_come_in_any_order_into_their_slots() -> None:
    with asking(met(send_all)) as asker:
        asker.reason("")
        done = asker.ask()
        assert (done.kind, done.ticket, done.failed) == ("receive", 1, {}) and done.peer.startswith("127.0.0.1:")
        assert asker.lines[:3].tobytes() == b"".join(map(block, range(3))) and not asker.lines[3:].any()


def forged(
    link: Link, kind: int, prompt: int, number: int, size: int, payload: bytes = b"", digest: bytes = b""
) -> None:
    """A frame of any contents."""
    head = kv_link._HEAD.pack(kind, prompt, number, size)
    pieces = hashlib.sha256(payload).digest() if payload else b""
    made = hmac.digest(link._keys[0], struct.pack("<Q", link._sent) + head + pieces, "sha256")
    link._sent += 1
    link._out.sendall(head + payload + (digest or made))


def flipped(link: Link, prompt: int) -> None:
    forged(link, Kind.BLOCK, prompt, 1, BYTES, block(1), digest=bytes(32))


def cut(link: Link, prompt: int) -> None:
    link._out.sendall(kv_link._HEAD.pack(Kind.BLOCK, prompt, 1, BYTES) + block(1)[:50])
    link.shutdown()
    raise LinkLost("closed")


def replayed(link: Link, prompt: int) -> None:
    link._sent -= 1
    link.send(Kind.BLOCK, prompt, 1, block(1))


LIES: dict[str, tuple[Callable[[Link, int], None], str]] = {
    "a wrong checksum": (flipped, "checksum"),
    "a frame sent again": (replayed, "checksum"),
    "a block that is cut": (cut, "closed"),
    "a block of another size": (lambda link, prompt: link.send(Kind.BLOCK, prompt, 1, block(1)[:-8]), "format"),
    "a block of four gigabytes": (lambda link, prompt: forged(link, Kind.BLOCK, prompt, 1, (1 << 32) - 1), "format"),
    "a block twice": (lambda link, prompt: link.send(Kind.BLOCK, prompt, 0, block(0)), "format"),
    "a block that was not asked for": (lambda link, prompt: link.send(Kind.BLOCK, prompt, 3, block(3)), "format"),
    "a frame of no kind": (lambda link, prompt: forged(link, 77, prompt, 0, 0), "format"),
    "a prompt": (lambda link, prompt: link.send(Kind.PREFILL, prompt, 0, b"x"), "format"),
    "a long reason": (lambda link, prompt: link.send(Kind.FAILED, prompt, 0, b"x" * 1000), "format"),
    "a reason of its own": (lambda link, prompt: link.send(Kind.FAILED, prompt, 0, b"\xff<script>"), "failed"),
    "a refusal": (lambda link, prompt: link.send(Kind.FAILED, prompt, 0, b"refused"), "refused"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_costs_the_blocks_that_have_not_come(name: str) -> None:
    lie, reason = LIES[name]

    def serve(link: Link, prompt: int) -> None:
        link.send(Kind.BLOCK, prompt, 0, block(0))
        lie(link, prompt)

    with asking(met(serve)) as asker:
        asker.reason("")
        done = asker.ask()
        assert done.failed == {KEYS[1]: reason, KEYS[2]: reason}
        assert asker.lines[0].tobytes() == block(0) and not asker.lines[2:].any()
        asker.reason("")  # connected again, or still


def test_blocks_of_prompts_that_were_never_asked_for_are_thrown_away() -> None:
    def serve(link: Link, prompt: int) -> None:
        link.send(Kind.BLOCK, prompt + 7, 0, block(9))
        send_all(link, prompt)

    with asking(met(serve)) as asker:
        asker.reason("")
        assert asker.ask().failed == {}


def silent(link: Link, prompt: int) -> None:
    link.send(Kind.BLOCK, prompt, 0, block(0))


def trickling(link: Link, prompt: int) -> None:
    link.send(Kind.BLOCK, prompt, 0, block(0))
    for byte in kv_link._HEAD.pack(Kind.BLOCK, prompt, 1, BYTES) + block(1):
        link._out.sendall(bytes([byte]))
        time.sleep(0.05)


@pytest.mark.parametrize("serve", [silent, trickling])
def test_one_that_stops_or_trickles_costs_its_timeout(serve: Callable[[Link, int], None]) -> None:
    with asking(met(serve), timeout=0.3) as asker:
        asker.reason("")
        assert asker.ask().failed == {KEYS[1]: "timeout", KEYS[2]: "timeout"}


def test_what_is_cancelled_ends_and_the_other_side_hears_of_it() -> None:
    heard: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def serve(sock: socket.socket) -> None:
        with closing(accept(sock, SECRET, ABOUT, 5.0)) as link:
            while True:
                head = link.head()
                link.payload(head, 1 << 20)
                heard.put((head.kind, head.number))

    with asking(serve) as asker:
        asker.reason("")
        asker.client.receive(5, PROMPT, COPIES)
        assert heard.get(timeout=20) == (Kind.PREFILL, 5)
        asker.client.cancel(5)
        asker.client.cancel(5)
        assert asker.done.get(timeout=20).failed == dict.fromkeys(KEYS[:3], "cancelled")
        assert heard.get(timeout=20) == (Kind.CANCEL, 5)


def impostor(sock: socket.socket) -> None:
    """Knows the protocol, and not the secret: it says what proves nothing."""
    sock.sendall(kv_link._HELLO.pack(kv_link.MAGIC, kv_link.VERSION, bytes(32)))
    sock.recv(1000)
    sock.sendall(bytes(32))
    sock.recv(1000)


def newer(sock: socket.socket) -> None:
    sock.sendall(kv_link._HELLO.pack(kv_link.MAGIC, kv_link.VERSION + 1, bytes(32)))
    sock.recv(1000)


def huge(sock: socket.socket) -> None:
    """Says that it will say four gigabytes of what its blocks are of."""
    nonce = bytes(32)
    sock.sendall(kv_link._HELLO.pack(kv_link.MAGIC, kv_link.VERSION, nonce))
    nonces = nonce + kv_link._hello(sock, time.monotonic() + 5)
    sock.recv(32)
    sock.sendall(kv_link._proof(SECRET, b"server", nonces))
    keys = kv_link._proof(SECRET, b"to client", nonces), kv_link._proof(SECRET, b"to server", nonces)
    with closing(Link(sock, *keys, 5.0, secret=True)) as link:
        forged(link, Kind.ABOUT, 0, 0, (1 << 32) - 1)
        link.payload(link.head(), 1 << 16)
        link.head()


UNUSABLE: dict[str, tuple[Callable[[socket.socket], None], dict[str, Any], str]] = {
    "another secret": (lambda sock: accept(sock, SECRET, ABOUT, 5.0).close(), {"secret": b"another"}, "secret"),
    "no secret": (lambda sock: accept(sock, SECRET, ABOUT, 5.0).close(), {"secret": b""}, "secret"),
    "an impostor": (impostor, {}, "secret"),
    "another version": (newer, {}, "version"),
    "other weights": (
        lambda sock: accept(sock, SECRET, ABOUT, 5.0),
        {"about": {**ABOUT, "weights": "c"}},
        "fingerprint",
    ),
    "a web server": (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4), {}, "format"),
    "one that says too much": (huge, {}, "format"),
    "one that hangs up": (lambda sock: None, {}, "closed"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_is_not_the_right_engine_is_not_asked_and_the_log_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    serve, changed, reason = UNUSABLE[name]
    with asking(serve, **changed) as asker:
        asker.reason(reason)
        assert asker.ask().failed == dict.fromkeys(KEYS[:3], reason)
    if reason == "fingerprint":
        assert "weights: 'a' there, 'c' here" in caplog.text


def test_a_prompt_that_is_sent_after_the_peer_has_gone_does_not_end_the_thread_that_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_link, "PIECE", 8)  # a prompt of several, whose digests threads make
    monkeypatch.setattr(kv_transfer, "FIRST_RETRY", 0.01)
    leaves, held = threading.Event(), threading.Event()

    def serve(sock: socket.socket) -> None:
        if leaves.is_set():
            met(send_all)(sock)
        with closing(accept(sock, SECRET, ABOUT, 5.0)):
            leaves.wait()

    with asking(serve) as asker:
        asker.reason("")
        [peer] = asker.client._peers
        peer._sender.put(lambda: assert_true(held.wait(60)))
        asker.client.receive(1, PROMPT, COPIES)
        leaves.set()
        assert set(asker.done.get(timeout=60).failed.values()) == {"closed"}
        held.set()  # only now it sends, by a connection that is closed
        asker.reason("")
        assert asker.ask(2).failed == {}


def assert_true(value: bool) -> None:
    assert value


def test_a_connection_is_not_closed_under_a_thread_that_sends() -> None:
    here, there = socket.socketpair()
    link = Link(here, b"a", b"b", 60.0, secret=True)
    began, out, owned = threading.Event(), link._out, list[bool]()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(out, name)

        def sendall(self, data: bytes) -> None:
            began.set()
            try:
                out.sendall(data)
            except OSError:
                owned.append(out.fileno() >= 0)
                raise

    def send() -> None:
        with pytest.raises(LinkLost):
            link.send(Kind.BLOCK, 1, 0, bytes(8 << 20))

    link._out = Watched()  # type: ignore[assignment]
    thread = threading.Thread(target=send)
    thread.start()
    assert began.wait(60)
    link.close()
    thread.join()
    assert owned == [True] and out.fileno() < 0
    with pytest.raises(LinkLost):
        link.send(Kind.CANCEL, 1)
    there.close()


def test_a_connection_that_fails_while_it_is_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(24, "Too many open files")]

    def connected(*args: Any) -> Link:
        if failures:
            raise failures.pop()
        return connect(*args)

    monkeypatch.setattr(kv_transfer, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(kv_transfer, "connect", connected)
    with asking(met(send_all)) as asker:
        asker.reason("")
        assert not failures and asker.ask().failed == {}


def test_a_client_that_is_closed_leaves_no_descriptor() -> None:
    def held() -> set[int]:
        found = set[int]()
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the folder's own
                found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
        return found

    with asking(met(send_all)) as asker:
        asker.reason("")
        [peer] = asker.client._peers
        pipe = os.fstat(peer._wake).st_ino
        assert pipe in held()
        for _ in range(2):
            asker.client.close()
        assert pipe not in held()


# -------------------------------------------------------------------- the prefill engine's side


class Serving:
    """A server, and what an engine would hear of it."""

    def __init__(self) -> None:
        listener = socket.create_server(LOOPBACK)
        self.address = Address(*listener.getsockname())
        self.lines = np.zeros((8, BYTES), np.uint8)
        self.done: SimpleQueue[CopyDone] = SimpleQueue()
        self.woken = threading.Event()
        self.server = TcpPrefillServer(*(listener, SECRET, ABOUT, self.lines, self.done.put, self.woken.set), SIZE, 1.0)

    def link(self) -> Link:
        sock = socket.create_connection(self.address, timeout=5.0)
        with ExitStack() as undo:
            undo.callback(sock.close)
            made = connect(sock, SECRET, ABOUT, 5.0)
            undo.pop_all()
        return made

    def heard(self) -> Prefill | str:
        deadline = time.monotonic() + 20
        while not (found := self.server.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert len(found) == 1
        return found[0]


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.server.close()


def wanted(**changed: Any) -> bytes:
    values = {"id": "an id", "tokens": list(range(13)), "first": 0, "salt": "", "priority": 0, **changed}
    return msgspec.msgpack.encode(Wanted(**values))


def works(serving: Serving) -> None:
    """A prompt of a new connection is heard of, and its blocks arrive."""
    link = serving.link()
    link.send(Kind.PREFILL, 3, 0, wanted())
    prefill = serving.heard()
    assert isinstance(prefill, Prefill) and prefill.id.endswith("-3-an id") and list(prefill.tokens) == [*range(13)]
    serving.lines[5] = 7
    serving.server.send(9, prefill.id, 2, KEYS[0], 5)
    head = link.head()
    assert head == (Kind.BLOCK, 3, 2, BYTES) and link.payload(head, BYTES) == bytes([7]) * BYTES
    assert serving.done.get(timeout=20)[:3] == ("send", 9, {})
    link.close()
    assert serving.heard() == prefill.id, "the engine hears that it is not wanted any more"


ATTACKS: dict[str, Callable[[Link], None]] = {
    "no msgpack": lambda link: link.send(Kind.PREFILL, 1, 0, b"\xc1\xc1"),
    "another type": lambda link: link.send(Kind.PREFILL, 1, 0, msgspec.msgpack.encode(["a", ["b"], 0, "", 0])),
    "too few tokens": lambda link: link.send(Kind.PREFILL, 1, 0, wanted(tokens=[1, 2, 3])),
    "no block wanted": lambda link: link.send(Kind.PREFILL, 1, 0, wanted(first=3)),
    "a block before the first": lambda link: link.send(Kind.PREFILL, 1, 0, wanted(first=-1)),
    "a long id": lambda link: link.send(Kind.PREFILL, 1, 0, wanted(id="x" * 200)),
    "a long salt": lambda link: link.send(Kind.PREFILL, 1, 0, wanted(salt="x" * 5000)),
    "a prompt of four gigabytes": lambda link: forged(link, Kind.PREFILL, 1, 0, (1 << 32) - 1),
    "a block": lambda link: link.send(Kind.BLOCK, 1, 0, block(0)),
    "a cancellation with contents": lambda link: link.send(Kind.CANCEL, 1, 0, b"x"),
    "a wrong checksum": lambda link: forged(link, Kind.PREFILL, 1, 0, 3, b"abc", bytes(32)),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_decode_engine_that_breaks_the_protocol_is_disconnected_alone(name: str, serving: Serving) -> None:
    link = serving.link()
    ATTACKS[name](link)
    with pytest.raises(LinkLost):
        link.head()
    link.close()
    assert serving.server.poll() == []
    works(serving)


def test_the_same_prompt_twice_is_refused(serving: Serving) -> None:
    link = serving.link()
    for _ in range(2):
        link.send(Kind.PREFILL, 1, 0, wanted())
    with pytest.raises(LinkLost):
        link.head()
    link.close()


def test_more_prompts_than_a_connection_may_have_are_refused_as_busy(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "MAX_PROMPTS", 2)
    link = serving.link()
    for number in range(3):
        link.send(Kind.PREFILL, number, 0, wanted())
    head = link.head()
    assert head[:2] == (Kind.FAILED, 2) and link.payload(head, 32) == b"busy"
    monkeypatch.setattr(kv_transfer, "MAX_TOKENS", 30)
    link.send(Kind.CANCEL, 0)
    link.send(Kind.PREFILL, 4, 0, wanted(tokens=[0] * 18))
    head = link.head()
    assert head[:2] == (Kind.FAILED, 4) and link.payload(head, 32) == b"busy"
    link.close()


def test_strangers_do_not_keep_others_out_for_long(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (b"GET / HTTP/1.1\r\n\r\n", bytes(200), b""):
        with socket.create_connection(serving.address, timeout=5) as sock:
            sock.sendall(text)
    monkeypatch.setattr(kv_transfer, "MAX_HANDSHAKES", 2)
    idle = [socket.create_connection(serving.address, timeout=5) for _ in range(4)]
    for sock in idle:
        sock.recv(100)
        sock.close()
    deadline = time.monotonic() + 20
    while True:
        with suppress(LinkLost):
            serving.link().close()
            break
        assert time.monotonic() < deadline


def test_a_decode_engine_that_takes_nothing_is_disconnected(serving: Serving) -> None:
    link = serving.link()
    link.send(Kind.PREFILL, 1, 0, wanted())
    prefill = serving.heard()
    assert isinstance(prefill, Prefill)
    serving.server.lines = np.zeros((1, 64 << 20), np.uint8)
    for ticket in range(3):
        serving.server.send(ticket, prefill.id, ticket, KEYS[ticket], 0)
    ended = [serving.done.get(timeout=20) for _ in range(3)]
    assert [list(done.failed.values()) for done in ended] == [["timeout"], ["closed"], ["closed"]]
    assert serving.heard() == prefill.id
    serving.server.send(8, prefill.id, 0, KEYS[0], 0)
    assert serving.done.get(timeout=20).failed == {KEYS[0]: "closed"}
    link.close()


def test_a_prompt_that_is_cancelled_while_it_fails_here_fails_no_other(serving: Serving) -> None:
    link = serving.link()
    link.send(Kind.PREFILL, 7, 0, wanted())
    failing = serving.heard()
    assert isinstance(failing, Prefill)

    class Cancelling(dict[str, Any]):
        def get(self, id: str, default: Any = None) -> Any:
            found = super().get(id, default)
            if id == failing.id:
                link.send(Kind.CANCEL, 7)
                assert serving.heard() == failing.id, "it is dropped between the look and what follows"
            return found

    serving.server._by_id = Cancelling(serving.server._by_id)
    serving.server.fail(failing.id, "failed")
    link.send(Kind.PREFILL, 8, 0, wanted())
    prefill = serving.heard()
    assert isinstance(prefill, Prefill)
    serving.server.send(1, prefill.id, 0, KEYS[0], 0)
    assert link.head()[:2] == (Kind.BLOCK, 8)
    link.close()


def test_a_send_that_fails_in_an_unexpected_way_ends(serving: Serving) -> None:
    link = serving.link()
    link.send(Kind.PREFILL, 1, 0, wanted())
    prefill = serving.heard()
    assert isinstance(prefill, Prefill)
    for ticket, slot in enumerate((99, 0)):  # there are fewer lines
        serving.server.send(ticket, prefill.id, ticket, KEYS[ticket], slot)
    ended = [serving.done.get(timeout=60) for _ in range(2)]
    assert [(done.ticket, done.failed) for done in ended] == [(0, {KEYS[0]: "closed"}), (1, {KEYS[1]: "closed"})]
    assert serving.heard() == prefill.id
    link.close()


def test_a_server_that_is_closed_has_ended_its_connections_whatever_they_wait_for(serving: Serving) -> None:
    met, strange = serving.link(), socket.create_connection(serving.address, timeout=5.0)
    strange.recv(1)  # its thread waits for the rest of a handshake
    server = serving.server
    threads = list(server._threads)
    assert len(threads) == 2 and server._meeting
    server.close()
    assert not any(thread.is_alive() for thread in threads) and not server._threads
    with pytest.raises(LinkLost):
        met.head()
    met.close()
    strange.close()


def test_a_machine_that_is_out_of_threads_serves_again_later(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            if refusals and self.name == "quire-kv-serve":
                raise RuntimeError(refusals.pop())
            super().start()

    refusals = ["can't start new thread"]
    monkeypatch.setattr(kv_transfer.threading, "Thread", Refused)
    with pytest.raises(LinkLost):
        serving.link()
    works(serving)
    assert not refusals and not serving.server._meeting


def test_no_token_of_a_prompt_is_logged(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    link = serving.link()
    link.send(Kind.PREFILL, 1, 0, wanted(tokens=[987654321] * 13, salt="a salt"))
    prefill = serving.heard()
    assert isinstance(prefill, Prefill)
    serving.server.fail(prefill.id, "refused")
    link.head()
    link.close()
    assert "987654321" not in caplog.text and "a salt" not in caplog.text
