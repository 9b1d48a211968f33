"""Uploads, however they are cut into pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequest, TooLarge
from quire.server.batch_api.files import Form, boundary

KIND = "multipart/form-data; boundary=xyz"


def upload(data: bytes, **fields: str) -> bytes:
    parts = [f'--xyz\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    head = (
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    )
    return b"".join(parts) + head + data + b"\r\n--xyz--\r\n"


def read(body: bytes, sizes: list[int], most: int = 1 << 20) -> tuple[dict[str, str], bytes]:
    file = BytesIO()
    form = Form(boundary(KIND), lambda: file.write, most)

    async def pieces() -> AsyncIterator[bytes]:
        rest = body
        for size in sizes:
            yield rest[:size]
            rest = rest[size:]
        yield rest

    asyncio.run(form.read(pieces()))
    return form.fields, file.getvalue()


nearly = st.lists(st.sampled_from([b"\r\n", b"--", b"xyz", b"\r\n--xy", b"\r\n-", b"a", b"\n"]), max_size=12).map(
    b"".join
)


@settings(max_examples=150, deadline=None)
@given(
    data=nearly.filter(lambda x: b"--xyz" not in x) | st.binary(max_size=40),
    sizes=st.lists(st.integers(1, 9), max_size=60),
)
def test_a_file_arrives_whole_however_it_is_cut(data: bytes, sizes: list[int]) -> None:
    fields, got = read(upload(data, purpose="batch"), sizes)
    assert got == data
    assert fields == {"purpose": "batch", "file": "a.jsonl"}


def test_a_file_too_large_is_refused_before_its_end() -> None:
    with pytest.raises(TooLarge, match="larger"):
        read(upload(b"x" * 5000)[:3000], [100] * 20, most=1000)


def test_a_file_of_exactly_the_largest_size_is_taken_and_one_byte_more_is_not() -> None:
    assert read(upload(b"x" * 1000), [100] * 9, most=1000)[1] == b"x" * 1000
    with pytest.raises(TooLarge, match="larger"):
        read(upload(b"x" * 1001), [100] * 9, most=1000)


def test_a_field_of_exactly_the_longest_size_is_taken_and_one_byte_more_is_not() -> None:
    assert read(upload(b"", purpose="x" * 4096), [])[0]["purpose"] == "x" * 4096
    with pytest.raises(TooLarge, match="purpose"):
        read(upload(b"", purpose="x" * 4097), [])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (upload(b"abc")[:-12], "ends before the closing boundary"),
        (b"nothing", "ends before the closing boundary"),
        (b"--xyz\r\nX: y\r\n\r\nabc\r\n--xyz--", "names"),
        (upload(b"", a="1").replace(b'"a"', b'"file"'), "names"),
        (b"--xyz\r\n" + b"h" * 5000, "headers"),
    ],
)
def test_a_broken_upload_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read(body, [])


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 99]
)
def test_what_is_no_upload_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="multipart/form-data"):
        boundary(kind)
