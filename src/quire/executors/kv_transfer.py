"""K/V of a prefill/decode split over TCP: `PrefillClient` of `scheduler/kv_offload.py`, and `PrefillServer` of
`scheduler/kv_transfer.py`.

A decode engine keeps a connection to each of its prefill engines; a prefill engine takes connections of any number of
decode engines. Blocks are sent from the lines of one side's host memory into the lines of the other's. Threads do all
of it; the engine's own thread is woken by the store as for every copy.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quire.executors.block_store import Workers
from quire.executors.kv_link import MAX_PREFILL, MAX_REASON, Head, Kind, Link, LinkLost, accept, connect
from quire.scheduler.kv_offload import CopyDone, Prefill
from quire.scheduler.kv_transfer import choose_engine

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 5.0
"""Seconds."""
FIRST_RETRY, LAST_RETRY = 0.25, 8.0
"""Seconds until a lost connection is tried again: twice as many each time."""
MAX_CONNECTIONS, MAX_HANDSHAKES = 64, 16
MAX_PROMPTS, MAX_TOKENS = 1024, 4 << 20
"""Of a connection: prompts that a prefill engine has not ended, and their tokens. More are refused as busy."""
REASONS = frozenset({"refused", "failed", "busy"})
"""What a prefill engine may say of a prompt."""

Lines = npt.NDArray[np.uint8]
Report = Callable[[CopyDone], None]


class Wanted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The payload of a PREFILL frame: `Prefill`."""

    id: str
    tokens: list[int]
    first: int
    salt: str
    priority: int


class Address(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(eq=False, slots=True)
class Ticket:
    """A prompt that was asked for. slots: (key, slot) of its blocks, by number. progress: when the last one came."""

    number: int
    slots: dict[int, tuple[bytes, int]]
    tokens: int
    began: float
    progress: float
    missing: set[int] = field(init=False)
    receiving: bool = False
    ended: str | None = None
    """Why it is to end as soon as nothing is written into its slots."""

    def __post_init__(self) -> None:
        self.missing = set(self.slots)


class _Peer:
    """A prefill engine: one thread connects, and receives; another sends."""

    def __init__(self, client: TcpPrefillClient, address: Address) -> None:
        self.client, self.address = client, address
        self.link: Link | None = None
        self.reason = "down"
        self.tickets: dict[int, Ticket] = {}
        self._lock = threading.Lock()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._stop = threading.Event()
        self._sender = Workers("kv-asks", 1)
        self._thread = threading.Thread(target=self._run, name="quire-kv-receive", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """Tokens that it has been asked for."""
        return sum(each.tokens for each in list(self.tickets.values()))

    # ---------------------------------------------------------------- the engine's thread

    def ask(self, ticket: int, prefill: Prefill, copies: Seq[tuple[bytes, int]]) -> None:
        """Ask for blocks."""
        now = time.monotonic()
        slots = dict(enumerate(copies, prefill.first))
        with self._lock:
            link = self.link
            if link is not None:
                self.tickets[ticket] = Ticket(ticket, slots, len(prefill.tokens), now, now)
                # Here, so that nothing that ends it can be sent before.
                self._sender.put(lambda: self._ask(link, ticket, prefill))
        if link is None:
            self.client.report(CopyDone("receive", ticket, {key: self.reason for key, _ in copies}, 0.0, ""))
            return
        self._notify()

    def _ask(self, link: Link, ticket: int, prefill: Prefill) -> None:
        id, tokens, *rest = prefill
        payload = msgspec.msgpack.encode((id[:128], list(tokens), *rest))
        if len(payload) > MAX_PREFILL:
            self.end(ticket, "refused")
            return
        with suppress(LinkLost):  # the thread that receives hears of it
            link.send(Kind.PREFILL, ticket, 0, payload)

    def end(self, number: int, reason: str) -> None:
        """End a prompt, at once unless a block of it is just being received."""
        with self._lock:
            if (ticket := self.tickets.get(number)) is None:
                return
            ticket.ended = ticket.ended or reason
            if ticket.receiving:
                return
            del self.tickets[number]
            link = self.link
        if ticket.missing and link is not None and reason not in REASONS:
            self._sender.put(lambda: self._cancel(link, number))
        seconds, failed = time.monotonic() - ticket.began, dict[bytes, str]()
        if ticket.missing:
            failed = {ticket.slots[block][0]: ticket.ended for block in ticket.missing}
        self.client.report(CopyDone("receive", number, failed, seconds, str(self.address)))

    def _cancel(self, link: Link, number: int) -> None:
        with suppress(LinkLost):
            link.send(Kind.CANCEL, number)

    def _notify(self) -> None:
        with suppress(OSError):
            os.write(self._waker, b"\0")

    def stop(self) -> None:
        """End it soon; what it was asked for has failed."""
        self._stop.set()
        self._notify()
        if (link := self.link) is not None:
            link.shutdown()

    def join(self) -> None:
        """Wait until it has ended; a handshake that takes longer is left behind. Once, after `stop`."""
        self._thread.join(timeout=1.0)
        self._sender.close(timeout=1.0)
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self._waker)

    # ---------------------------------------------------------------- its own thread

    def _run(self) -> None:
        delay = FIRST_RETRY
        while not self._stop.is_set():
            try:
                link = self._connect()
            except LinkLost as lost:
                if lost.reason != self.reason:
                    log.warning("prefill engine %s: %s", self.address, lost)
                self.reason = lost.reason
            else:
                log.warning("prefill engine %s: connected", self.address)
                self.reason = self._serve(link)
                log.warning("prefill engine %s: the connection ended (%s)", self.address, self.reason)
                delay = FIRST_RETRY
            self._stop.wait(delay)
            delay = min(2 * delay, LAST_RETRY)

    def _connect(self) -> Link:
        try:
            sock = socket.create_connection(self.address, timeout=HANDSHAKE_TIMEOUT)
        except OSError as error:
            raise LinkLost(
                "down", f"it cannot be reached ({error.strerror or error}); prompts are computed here"
            ) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = connect(sock, self.client.secret, self.client.about, HANDSHAKE_TIMEOUT)
        except LinkLost:
            sock.close()
            raise
        except OSError as error:  # out of descriptors, for example
            sock.close()
            raise LinkLost("down", f"the connection failed ({error.strerror or error})") from error
        link.timeout = self.client.timeout
        return link

    def _serve(self, link: Link) -> str:
        """Receive until the connection ends. Returns why."""
        self.link, heard, reason = link, time.monotonic(), "closed"
        try:
            while not self._stop.is_set():
                with suppress(BlockingIOError):
                    os.read(self._wake, 1 << 10)
                if link.wait(self._until_due(), self._wake):
                    self._take(link)
                    heard = time.monotonic()
                self._expire(heard)
        except LinkLost as lost:
            reason = lost.reason
        except Exception:  # of whatever class: the prompts are computed here
            log.exception("prefill engine %s", self.address)
            reason = "format"
        with self._lock:
            self.link = None
            for ticket in self.tickets.values():
                ticket.receiving = False
        link.close()
        for number in list(self.tickets):
            self.end(number, reason)
        return reason

    def _until_due(self) -> float | None:
        due = min((each.progress for each in list(self.tickets.values())), default=None)
        return None if due is None else due + self.client.timeout - time.monotonic()

    def _expire(self, heard: float) -> None:
        """End prompts of which no block has come for too long; all of them, if nothing else has come either."""
        now, timeout = time.monotonic(), self.client.timeout
        late = [number for number, each in list(self.tickets.items()) if each.progress + timeout <= now]
        if late and heard + timeout <= now:
            raise LinkLost("timeout")
        for number in late:
            self.end(number, "timeout")

    def _take(self, link: Link) -> None:
        head = link.head()
        if head.kind == Kind.BLOCK:
            self._take_block(link, head)
        elif head.kind == Kind.FAILED:
            reason = link.payload(head, MAX_REASON).decode("ascii", "replace")
            self.end(head.number, reason if reason in REASONS else "failed")
        else:
            raise LinkLost("format")

    def _take_block(self, link: Link, head: Head) -> None:
        if head.size != self.client.lines.shape[1]:
            raise LinkLost("format")
        with self._lock:
            ticket = self.tickets.get(head.number)
            if ticket is not None:
                if head.block not in ticket.missing:
                    raise LinkLost("format")
                ticket.receiving = True
        if ticket is None:
            link.discard(head)
            return
        link.payload_into(memoryview(self.client.lines[ticket.slots[head.block][1]]))
        with self._lock:
            ticket.receiving = False
            ticket.missing.discard(head.block)
            ticket.progress = time.monotonic()
        if ticket.ended is not None or not ticket.missing:
            self.end(head.number, ticket.ended or "")


class TcpPrefillClient:
    """A decode engine's connections. lines [slots, bytes]: host memory. report: takes copies that have ended. about:
    what both sides' blocks must have in common. timeout: seconds to wait for the next block of a prompt."""

    def __init__(
        self,
        addresses: Seq[Address],
        secret: bytes,
        about: dict[str, str],
        lines: Lines,
        report: Report,
        *,
        min_tokens: int,
        timeout: float,
    ) -> None:
        self.secret, self.about, self.lines, self.report = secret, about, lines, report
        self.min_tokens, self.timeout = min_tokens, timeout
        self._asked = dict[int, _Peer]()
        self._closed = False
        self._peers = [_Peer(self, address) for address in addresses]

    def unavailable(self) -> str:
        """Why the first one cannot be asked, if none can."""
        return "" if any(peer.link is not None for peer in self._peers) else self._peers[0].reason

    def receive(self, ticket: int, prefill: Prefill, copies: Seq[tuple[bytes, int]]) -> None:
        """Of the prefill engine that `choose_engine` names."""
        loads = [math.inf if peer.link is None else peer.load for peer in self._peers]
        chosen = self._peers[choose_engine(loads, copies[0][0])]
        self._asked = {number: peer for number, peer in self._asked.items() if number in peer.tickets}
        self._asked[ticket] = chosen
        chosen.ask(ticket, prefill, copies)

    def cancel(self, ticket: int) -> None:
        """Have the prefill engine forget it."""
        if (peer := self._asked.get(ticket)) is not None:
            peer.end(ticket, "cancelled")

    def close(self) -> None:
        """End all connections; again: nothing happens."""
        if self._closed:
            return
        self._closed = True
        for peer in self._peers:
            peer.stop()
        for peer in self._peers:
            peer.join()


# -------------------------------------------------------------------- the prefill engine's side


class _Caller:
    """A decode engine that is connected. prompts: number and tokens of those not ended, by their ids here."""

    def __init__(self, number: int, link: Link) -> None:
        self.number, self.link = number, link
        self.prompts: dict[str, tuple[int, int]] = {}
        self.sender = Workers("kv-sends", 1)
        self.lost = False


class TcpPrefillServer:
    """Takes prompts of decode engines, and sends blocks. listener: bound and listening. wake: makes the engine's thread
    call `poll`. Otherwise as TcpPrefillClient. timeout: seconds for a frame."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        about: dict[str, str],
        lines: Lines,
        report: Report,
        wake: Callable[[], None],
        block_size: int,
        timeout: float,
    ) -> None:
        self.secret, self.about, self.lines, self.report, self.wake = secret, about, lines, report, wake
        self.block_size, self.timeout = block_size, timeout
        self._listener = listener
        self._lock = threading.Lock()
        self._events: deque[Prefill | str] = deque()
        self._callers: dict[int, _Caller] = {}
        self._by_id: dict[str, _Caller] = {}
        self._num_callers = 0
        self._threads = set[threading.Thread]()
        """Those of connections."""
        self._meeting = set[socket.socket]()
        """Connections whose other side is not known yet."""
        self._closed = self._draining = False
        self._thread = threading.Thread(target=self._accept, name="quire-kv-accept", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the engine's thread

    def poll(self) -> Seq[Prefill | str]:
        """What has come."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def send(self, ticket: int, id: str, number: int, key: bytes, slot: int) -> None:
        """In the order of calls."""
        with self._lock:
            if (caller := self._by_id.get(id)) is not None:
                # Before its connection is forgotten, so that every send ends.
                prompt = caller.prompts[id][0]
                caller.sender.put(lambda: self._send(caller, ticket, prompt, number, key, slot))
                return
        self.report(CopyDone("send", ticket, {key: "closed"}))

    def _send(self, caller: _Caller, ticket: int, prompt: int, number: int, key: bytes, slot: int) -> None:
        began, failed = time.monotonic(), dict[bytes, str]()
        try:
            if caller.lost:
                raise LinkLost("closed")
            caller.link.send(Kind.BLOCK, prompt, number, memoryview(self.lines[slot]))
        except Exception as error:  # of whatever class: every send ends, or its slot would never be free
            failed = {key: error.reason if isinstance(error, LinkLost) else "closed"}
            caller.lost = True
            caller.link.shutdown()
        self.report(CopyDone("send", ticket, failed, time.monotonic() - began))

    def fail(self, id: str, reason: str) -> None:
        """The decode engine computes what it has not got."""
        # Its own thread may have dropped it meanwhile: then it is not waited for.
        if (caller := self._by_id.get(id)) is not None and (prompt := self._drop(caller, id)) is not None:
            self._say(caller, prompt[0], reason)

    def done(self, id: str) -> None:
        """All its blocks were given to `send`."""
        if (caller := self._by_id.get(id)) is not None:
            self._drop(caller, id)

    def _say(self, caller: _Caller, number: int, reason: str) -> None:
        def work() -> None:
            with suppress(LinkLost):
                caller.link.send(Kind.FAILED, number, 0, reason.encode())

        caller.sender.put(work)

    def _drop(self, caller: _Caller, id: str) -> tuple[int, int] | None:
        with self._lock:
            self._by_id.pop(id, None)
            return caller.prompts.pop(id, None)

    def drain(self) -> None:
        """Refuse further prompts as busy."""
        self._draining = True

    def close(self) -> None:
        """End all connections, and wait a second for their threads: they read lines, and wake the engine."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=1.0)
        with self._lock:
            callers, threads = list(self._callers.values()), list(self._threads)
            for sock in self._meeting:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for caller in callers:
            caller.lost = True
            caller.link.shutdown()
        deadline = time.monotonic() + 1.0
        for thread in threads:
            with suppress(RuntimeError):  # it has not been started yet
                thread.join(max(0.0, deadline - time.monotonic()))

    # ---------------------------------------------------------------- threads of its own

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors, for example
                continue
            thread = threading.Thread(target=self._meet, args=(sock, address[0]), name="quire-kv-serve", daemon=True)
            with self._lock:
                full = len(self._callers) >= MAX_CONNECTIONS or len(self._meeting) >= MAX_HANDSHAKES
                if not full:
                    self._threads.add(thread)
                    self._meeting.add(sock)
            if full:
                sock.close()
                continue
            try:
                thread.start()
            except RuntimeError as error:  # out of threads
                log.warning("a decode engine at %s was refused: %s", address[0], error)
                with self._lock:
                    self._meeting.discard(sock)
                    self._threads.discard(thread)
                sock.close()

    def _meet(self, sock: socket.socket, host: str) -> None:
        try:
            self._meet_and_serve(sock, host)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _meet_and_serve(self, sock: socket.socket, host: str) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = accept(sock, self.secret, self.about, HANDSHAKE_TIMEOUT)
        except (LinkLost, OSError) as error:
            log.warning("a decode engine at %s was refused: %s", host, error)
            self._met(sock)
            sock.close()
            return
        self._met(sock)
        link.timeout = self.timeout
        with self._lock:
            self._num_callers += 1
            caller = self._callers[self._num_callers] = _Caller(self._num_callers, link)
        log.warning("decode engine %d at %s: connected", caller.number, host)
        reason = self._serve(caller)
        log.warning("decode engine %d at %s: the connection ended (%s)", caller.number, host, reason)

    def _met(self, sock: socket.socket) -> None:
        """From now on it is not shut down while it may be closed."""
        with self._lock:
            self._meeting.discard(sock)

    def _serve(self, caller: _Caller) -> str:
        """Take prompts until the connection ends. Returns why."""
        try:
            while not self._closed:
                if caller.link.wait(None):
                    self._take(caller)
            return "closed"
        except LinkLost as lost:
            return lost.reason
        except Exception:  # of whatever class: the decode engine computes its prompts
            log.exception("decode engine %d", caller.number)
            return "format"
        finally:
            caller.lost = True
            caller.link.shutdown()
            for id in list(caller.prompts):
                self._drop(caller, id)
                self._events.append(id)
            self.wake()
            with self._lock:
                self._callers.pop(caller.number, None)
            caller.sender.close(timeout=self.timeout)
            caller.link.close()

    def _take(self, caller: _Caller) -> None:
        head = caller.link.head()
        if head.kind == Kind.PREFILL:
            self._take_prompt(caller, head.number, caller.link.payload(head, MAX_PREFILL))
        elif head.kind == Kind.CANCEL:
            caller.link.payload(head, 0)
            id = next((id for id, (number, _) in list(caller.prompts.items()) if number == head.number), None)
            if id is not None:
                self._drop(caller, id)
                self._events.append(id)
                self.wake()
        else:
            raise LinkLost("format")

    def _take_prompt(self, caller: _Caller, number: int, payload: bytes) -> None:
        try:
            wanted = msgspec.msgpack.decode(payload, type=Wanted)
        except msgspec.MsgspecError as error:
            raise LinkLost("format") from error
        count, prompts = len(wanted.tokens), list(caller.prompts.values())
        if not 0 <= wanted.first < (count - 1) // self.block_size or len(wanted.id) > 128 or len(wanted.salt) > 1024:
            raise LinkLost("format")
        if self._draining or len(prompts) >= MAX_PROMPTS or sum(tokens for _, tokens in prompts) + count > MAX_TOKENS:
            self._say(caller, number, "busy")
            return
        id = f"prefill-{caller.number}-{number}-{wanted.id}"
        with self._lock:
            if id in self._by_id:
                raise LinkLost("format")
            self._by_id[id] = caller
            caller.prompts[id] = number, count
        self._events.append(Prefill(id, wanted.tokens, wanted.first, wanted.salt, wanted.priority))
        self.wake()
