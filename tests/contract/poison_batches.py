"""Hostile requests to the other endpoints: files, batches and embeddings; and batches of hostile lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.contract.poison import HUGE, LONG, Poison, post
from tests.contract.wire import request

FILES, BATCHES, VECTORS = "/v1/files", "/v1/batches", "/v1/embeddings"
CHAT = "/v1/chat/completions"
EITHER = (200, 400)
FORM = "multipart/form-data; boundary=xyz"
BOUND = b"--xyz\r\n"
NOWHERE = "file-" + "0" * 24


def part(name: str, data: bytes, rest: str = "") -> bytes:
    return BOUND + f'Content-Disposition: form-data; name="{name}"{rest}\r\n\r\n'.encode() + data + b"\r\n"


def form(data: bytes = b"{}", *more: bytes, name: str = "in.jsonl", purpose: bytes = b"batch") -> bytes:
    file = part("file", data, f'; filename="{name}"')
    return part("purpose", purpose) + file + b"".join(more) + b"--xyz--\r\n"


def uploads() -> Iterator[Poison]:
    """Bodies that mean one thing to one reader and another to the next."""
    for name, body in {
        "no part": b"--xyz--\r\n",
        "no body": b"",
        "a mark alone": b"--xyz",
        "no end": form()[:-12],
        "no file": part("purpose", b"batch") + b"--xyz--\r\n",
        "no purpose": part("file", b"{}", '; filename="a"') + b"--xyz--\r\n",
        "a purpose of others": form(purpose=b"fine-tune"),
        "a purpose of megabytes": form(purpose=b"p" * (3 << 20)),
        "a purpose of other bytes": form(purpose=b"\xff\xfe\0"),
        "two purposes": form(b"{}", part("purpose", b"assistants")),
        "two files": form(b"{}", part("file", b"{}", '; filename="b"')),
        "twenty parts": form(b"{}", *(part(f"p{i}", b"") for i in range(20))),
        "ten thousand parts": form(b"{}", *(part(f"p{i}", b"") for i in range(10_000))),
        "an unknown part": form(b"{}", part("expires_after[anchor]", b"created_at")),
        "a part without a name": form(b"{}", BOUND + b"Content-Disposition: form-data\r\n\r\nx\r\n"),
        "a part without a head": form(b"{}", BOUND + b"\r\nx\r\n"),
        "a head without end": BOUND + b"X: " + b"y" * (1 << 20),
        "a head of names": BOUND + b"Content-Disposition: form-data" + b';name="a' * 7000 + b"\r\n\r\nx\r\n--xyz--\r\n",
        "a name of quotes": BOUND + b'Content-Disposition: form-data; name="' + b'\\"' * 1900 + b'"\r\n\r\n\r\n--xyz--',
        "another upload within": form(form()),
        "another request within": form(b"--xyz--\r\n\r\n" + request("DELETE", FILES + "/" + NOWHERE)),
        "a mark in two": form(b"--xy\r\n--xyz\n\n\r\n--xy z--"),
        "line feeds for line ends": form().replace(b"\r\n", b"\n"),
        "a longer mark": form().replace(b"--xyz", b"--xyzxyz"),
        "a file past the limit of bodies": form(b"x" * LONG),
    }.items():
        sent = post(FILES, body, {"Content-Type": FORM})
        yield Poison(f"an upload of {name} at {FILES}", (sent,), (*EITHER, 413))
    for name in ("../../../etc/passwd", "..\\..\\x", "C:\\x", "/dev/null", "a\0b", "", ".", "\u202e\u2066", "n" * 5000):
        sent = post(FILES, form(name=name), {"Content-Type": FORM})
        yield Poison(f"a file called {name[:20]!r} at {FILES}", (sent,), EITHER)
    for kind in (
        *("multipart/form-data", "multipart/form-data; boundary=", 'multipart/form-data; boundary=""'),
        *("multipart/form-data; boundary=" + "b" * 20_000, "multipart/mixed; boundary=xyz", "application/json"),
        *("multipart/form-data; boundary*=utf-8''xyz", "multipart/form-data; boundary*0=x; boundary*1=yz"),
        *("multipart/form-data; boundary=x; boundary=xyz", "multipart/form-data; boundary=\xff\xfe", ";boundary=xyz"),
        *("multipart/form-data; boundary*99999999999=x", "multipart/form-data" + "; boundary*0*=%zz" * 900, "a" * 9000),
    ):
        yield Poison(f"a type of {kind[:60]!r}", (post(FILES, form(), {"Content-Type": kind}),), (*EITHER, 415))
    for name, length in {"more than there is": 1 << 20, "more than there can be": 10**15}.items():
        head = {"Content-Type": FORM, "Content-Length": str(length)}
        yield Poison(f"an upload that says it has {name}", (post(FILES, form(), head),), (0, 400, 413), hang_up=True)


def names() -> Iterator[Poison]:
    """Ids that are none, and lists that are not to be had."""
    for id in (
        *("x", NOWHERE, "..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "%ff%fe", "file-" + "0" * 20_000, "%0d%0aX:y"),
        *("file-" + "0" * 23 + "%2f", "batch_" + "0" * 24, "{{7*7}}", "file-*", "lock", "%e2%80%ae"),
    ):
        for path, methods in (
            (f"{FILES}/{id}", ("GET", "DELETE", "POST")),
            (f"{FILES}/{id}/content", ("GET", "DELETE")),
            (f"{BATCHES}/{id}", ("GET", "DELETE")),
            (f"{BATCHES}/{id}/cancel", ("POST",)),
        ):
            for method in methods:
                yield Poison(
                    f"{method} {path[:60]} of {len(path)}", (request(method, path),), (400, 404, 405, 414, 431)
                )
    for query in (
        *("limit=0", "limit=-1", f"limit={HUGE}", "limit=" + "9" * 5000, "limit=NaN", "limit=1e3", "limit=\u0663"),
        *("after=", "after=x", "after=%00", "after=" + "a" * 20_000, "order=up", "purpose=%ff", "limit=1&limit=x"),
    ):
        for path in (FILES, BATCHES):
            sent = request("GET", f"{path}?{query}".encode().decode("latin-1"))
            yield Poison(f"{path}?{query[:40]}", (sent,), (200, 400, 431))


def batches() -> Iterator[Poison]:
    """Batches that cannot be."""
    fine = {"input_file_id": NOWHERE, "endpoint": CHAT, "completion_window": "24h"}
    for name, change in {
        "no such file": {},
        "a file like a path": {"input_file_id": "../../../etc/passwd"},
        "a file of megabytes": {"input_file_id": "f" * (3 << 20)},
        "a file of no text": {"input_file_id": {"id": 1}},
        "a file of null": {"input_file_id": None},
        "an endpoint of elsewhere": {"endpoint": "http://127.0.0.1:1/v1/chat/completions"},
        "an endpoint of its own": {"endpoint": BATCHES},
        "an endpoint that is for admins": {"endpoint": "/stats"},
        "an endpoint of null": {"endpoint": None},
        "an endpoint of many": {"endpoint": [CHAT] * 1000},
        "a window of ages": {"completion_window": f"{HUGE}h"},
        "a window of NaN words": {"completion_window": "nan"},
        "a window of a number": {"completion_window": 24},
        "metadata of numbers": {"metadata": {"a": 1}},
        "metadata of megabytes": {"metadata": {"a": "x" * (3 << 20)}},
        "metadata without end": {"metadata": {str(i): "x" for i in range(10_000)}},
        "metadata of a deep kind": {"metadata": json.loads("[" * 30 + "]" * 30)},
        "a field of its own state": {"status": "completed", "output_file_id": "x"},
    }.items():
        yield Poison(f"a batch of {name} at {BATCHES}", (post(BATCHES, {**fine, **change}),), (400, 404))
    for name, text in {
        "nothing": b"",
        "NaN": b'{"completion_window": NaN}',
        "a list": b"[]",
        "deep lists": b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "five megabytes": b'{"endpoint": "' + b"x" * LONG + b'"}',
        "half a surrogate": b'{"input_file_id": "\\ud800", "endpoint": "\\udfff", "completion_window": "24h"}',
        "the same key twice": b'{"input_file_id": "a", "input_file_id": "b"}',
    }.items():
        yield Poison(f"a batch said as {name} at {BATCHES}", (post(BATCHES, text),), (400, 404, 413))
        yield Poison(f"vectors asked as {name} at {VECTORS}", (post(VECTORS, text),), (400, 413))


def vectors() -> Iterator[Poison]:
    """Texts that are none, and vectors that are not to be had."""
    for name, value in {
        "nothing": "",
        "an empty list": [],
        "an empty text among others": ["a", ""],
        "null": None,
        "true": True,
        "an object": {"text": "x"},
        "a number": 7,
        "numbers and texts": [1, "a"],
        "lists of lists": [[[1]]],
        "fractions": [0.5],
        "tokens below 0": [-1],
        "tokens of 100 bits": [1 << 100],
        "the last token and one more": [4095, 4096],
        "true tokens": [True],
        "a million tokens": [5] * 1_000_000,
        "ten thousand texts": ["x"] * 10_000,
        "hundreds of texts too long": ["a b c " * 1000] * 600,
        "a word of three megabytes": "a" * (3 << 20),
        "spaces of three megabytes": " " * (3 << 20),
        "accents without end": "e" + "\u0301" * 100_000,
        "one text past the context among fine ones": ["x", "a b c " * 3000, "y"],
        "NULs": "\0" * 1000,
        "tokens that end texts": "<|endoftext|><|im_end|>" * 50,
        "a thousand short texts": ["x"] * 1000,
    }.items():
        sent = post(VECTORS, {"input": value})
        yield Poison(f"the vector of {name} at {VECTORS}", (sent,), (*EITHER, 413, 429))
    for field, values in {
        "dimensions": (0, -1, HUGE, 0.5, "8", True, [], 1e308, 1 << 31),
        "encoding_format": ("hex", "", 1, ["float"], "x" * 100_000),
        "pooling": ("max", "", 0, {}, "mean" * 10_000),
        "normalize": ("yes", 2, []),
        "priority": (HUGE, -HUGE, 0.5, "first"),
        "timeout": (0, -1, 1e300, 5e-324, "soon", True),
        "cache_salt": ("s" * (3 << 20), 5, "\0" * 64),
        "model": ("../../x", "m" * 1_000_000, 0),
        "user": ("u" * (3 << 20), {"a": 1}),
        "truncate_prompt_tokens": (-HUGE, HUGE, 1),
        "stream": (True, "yes"),
        "n": (1 << 30,),
        "max_tokens": (HUGE,),
        "add_special_tokens": (0, "no"),
    }.items():
        for value in values:
            sent = post(VECTORS, {"input": "x", field: value})
            yield Poison(f"vectors with {field} {str(value)[:30]!r}", (sent,), (*EITHER, 404, 413, 504))
    for seconds in ("nan", "-inf", "inf", "soon", "1e-300"):
        sent = post(VECTORS, {"input": "x"}, {"X-Request-Timeout": seconds})
        yield Poison(f"vectors within {seconds} seconds", (sent,), (*EITHER, 504))


def file_poisons() -> list[Poison]:
    """All of them."""
    return [poison for kind in (uploads, names, batches, vectors) for poison in kind()]


class Errand(NamedTuple):
    """A file of lines, a batch of it, and how that may end. Whatever a line is, no answer in the files is a 5xx."""

    name: str
    data: bytes
    ends: str
    endpoint: str = CHAT


HI = [{"role": "user", "content": "hi"}]


def line(id: Any, body: Any = None, **rest: Any) -> bytes:
    asked = {"messages": HI, "max_tokens": 2} if body is None else body
    return json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": asked, **rest}).encode() + b"\n"


HOSTILE: Mapping[str, Any] = {
    "a stream": {"messages": HI, "stream": True},
    "n of a thousand": {"messages": HI, "n": 1000},
    "a length past all": {"messages": HI, "max_tokens": HUGE},
    "a seed past all": {"messages": HI, "max_tokens": 2, "seed": HUGE},
    "a priority before all": {"messages": HI, "max_tokens": 2, "priority": -HUGE},
    "no time": {"messages": HI, "max_tokens": 200, "timeout": 5e-324},
    "NaN for a temperature": {"messages": HI, "temperature": "nan"},
    "no messages": {"messages": []},
    "a role that is none": {"messages": [{"role": "root", "content": "x"}]},
    "a text": "hi",
    "null": None,
    "a list": [1],
    "deep lists": {"messages": HI, "metadata": json.loads("[" * 60 + "]" * 60)},
    "an unknown model": {"model": "../../x", "messages": HI},
    "an expression that bombs": {"messages": HI, "guided_regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    "a schema that names itself": {"messages": HI, "guided_json": {"$ref": "#"}},
    "nothing allowed": {"messages": HI, "allowed_token_ids": []},
    "a thousand tools": {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 1000},
}


def errands() -> list[Errand]:
    """Files that were taken, and what is in them."""
    hostile = b"".join(
        json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"
        for id, body in HOSTILE.items()
    )
    embed = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": VECTORS, "body": body}).encode() + b"\n"
        for i, body in enumerate(({"input": ""}, {"input": ["x"] * 10_000}, {"input": "x", "dimensions": HUGE}, "x"))
    ]
    return [
        Errand("hostile lines beside a fine one", line("fine") + hostile, "completed"),
        Errand("hostile texts", b"".join(embed), "completed", VECTORS),
        Errand("an empty file", b"", "failed"),
        Errand("a file of empty lines", b"\n \r\n\t\n" * 1000, "failed"),
        Errand("lines that are not JSON", b"hello\n\xff\xfe\n{}\n[]\nnull\n" * 100, "failed"),
        Errand("NaN in a line", line("a").replace(b'"max_tokens": 2', b'"max_tokens": NaN'), "failed"),
        Errand("a line of a deep kind", b'{"custom_id":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "failed"),
        Errand(
            "a body of a deep kind",
            b'{"custom_id":"a","method":"POST","url":"'
            + CHAT.encode()
            + b'","body":'
            + b"[" * 100_000
            + b"]" * 100_000
            + b"}\n",
            # CPython 3.14 reads so many levels, and refuses that line alone.
            "completed" if sys.version_info >= (3, 14) else "failed",
        ),
        Errand("the same custom_id twice", line("a") + line("a"), "failed"),
        Errand("custom_ids that are none", line(None) + line(5) + line({}), "failed"),
        Errand("a custom_id of a megabyte", line("i" * (1 << 20)), "failed"),
        Errand("a line of five megabytes", line("a", {"messages": HI, "user": "x" * LONG}), "failed"),
        Errand("one endless line", b"x" * (3 * LONG), "failed"),
        Errand("another endpoint than its lines'", line("a"), "failed", "/v1/completions"),
        Errand("lines for another server", line("a", url="http://127.0.0.1:1/v1/chat/completions"), "failed"),
        Errand("lines for admins", line("a", url="/stats") + line("b", method="GET"), "failed"),
        Errand("sixty thousand lines", b"".join(line(f"{i}") for i in range(60_000)), "failed"),
    ]
