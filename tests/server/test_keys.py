"""Keys of any characters, as clients send them: header fields are bytes."""

from __future__ import annotations

import httpx
import pytest

from quire.server.access import Keys
from tests.contract.wire import send
from tests.server.doubles import check_error, served
from tests.server.test_serve import running

pytestmark = pytest.mark.anyio

KEY = "clé-à"
"""In UTF-8 its last byte is a space to Latin-1, which must not be taken off."""

OTHER = "ключ€"
"""There is no Latin-1 of it."""


@pytest.mark.parametrize("field", [b"Authorization: Bearer ", b"X-API-Key: "])
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (KEY.encode(), 200),
        (KEY.encode("latin-1"), 200),
        (OTHER.encode(), 200),
        (OTHER.encode("cp1251", "replace"), 401),
        ("cle-à".encode(), 401),
        (KEY.encode()[:-1], 401),
    ],
)
async def test_keys_that_are_not_ascii_match_in_every_encoding_that_clients_use(
    field: bytes, sent: bytes, status: int
) -> None:
    async with running(api_keys=(KEY, OTHER)) as (_, where, _):
        port = int(where.rpartition(":")[2])
        head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + field + sent + b"\r\n\r\n"
        [answer] = await send(port, head, seconds=60)
    assert answer.status == status


@pytest.mark.parametrize("key", [KEY, OTHER])
async def test_a_browser_signs_in_with_a_key_that_is_not_ascii(key: str) -> None:
    async with served(admin_keys=(KEY, OTHER)) as server:
        assert (await server.client.post("/ui/session", json={"key": key})).status_code == 200
        check_error(await server.client.post("/ui/session", json={"key": key[:-1]}), 401)


def test_a_key_is_one_key_in_either_encoding() -> None:
    keys = Keys(("a", KEY), ("boss",))
    for encoding in ("utf-8", "latin-1"):
        headers = httpx.Headers([(b"authorization", b"Bearer " + KEY.encode(encoding))], encoding="latin-1")
        assert keys.check(headers) == 2
        assert keys.in_field(b"Token " + KEY.encode(encoding))


@pytest.mark.parametrize(
    ("field", "found"),
    [
        *(("sesame", True), ("Bearer sesame", True), ("open sesame", True), ("open  sesame ", True)),
        *(("token=sesame", True), ('Signature id="7", token="sesame"', True), ("a=b;key='open sesame'; c=d", True)),
        *(("", False), ("sesam", False), ("Bearer sesames", False), ("sesame=token", False), ("a=b, c=d", False)),
    ],
)
def test_a_key_is_found_in_a_field_after_any_scheme_or_name(field: str, found: bool) -> None:
    """Fields that a relay passes on carry none of its own keys."""
    for keys in (Keys(("sesame", "open sesame"), ("boss",)), Keys((), ("sesame", "open sesame"))):
        assert keys.in_field(field.encode()) is found
    assert not Keys().in_field(field.encode())
