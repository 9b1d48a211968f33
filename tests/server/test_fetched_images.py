"""Images at addresses of other servers, in whole requests of each API: fetched, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.frontend.media import MediaFetcher
from quire.multimodal.inputs import Decoder, ImageReader, MediaPolicy
from quire.multimodal.pixels import opened, resized
from quire.multimodal.processor import ImageProcessor
from quire.server.limits import Limits
from quire.types import Request
from tests.frontend.test_media import fetcher, ok, site, to
from tests.server.doubles import TOKENIZER, says, served
from tests.vision import picture, png

pytestmark = pytest.mark.anyio

PLACE = "Z"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}Z{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
[TOKEN] = TOKENIZER.encode(PLACE)
PROCESSOR = ImageProcessor(factor=8, min_pixels=64, max_pixels=64 * 12, image_token=TOKEN)


def limits(fetch: MediaFetcher) -> Limits:
    reader = ImageReader(PROCESSOR, Decoder(opened, resized), MediaPolicy(domains=tuple(fetch.domains)))
    return Limits(images=reader, fetch_media=fetch.fetch)


def bodies(url: str) -> dict[str, dict[str, Any]]:
    """A request with an image, and the same image again, by API."""
    part, text = {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "the dog"}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"type": "input_image", "image_url": url}
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [part, part, text]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [item, item, {**text, "type": "input_text"}]}]},
        "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": [block, block, text]}]},
    }


@pytest.mark.parametrize("path", bodies(""))
async def test_an_image_is_fetched_once_for_a_request_and_redirects_are_followed(path: str) -> None:
    image, asked = picture(30, 20), list[Request]()

    def script(request: Request) -> list[int]:
        asked.append(request)
        return says("a dog")

    async with (
        site({"/a.png": to("/b.png"), "/b.png": ok(png(image))}) as web,
        served(script, limits=limits(fetcher(max_bytes=9999)), template=TEMPLATE) as server,
    ):
        answer = await server.post(path, model="tiny", **bodies(web.url("/a.png"))[path])
        assert answer.status_code == 200, answer.text
        assert [head.split()[1] for head in web.asked] == ["/a.png", "/b.png"]
    wanted = resized(image, PROCESSOR, "", 1 << 20)
    assert [each.digest for each in asked[0].images] == [wanted.digest] * 2
    assert asked[0].prompt.count(TOKEN) == 2 * wanted.length


@pytest.mark.parametrize(
    ("host", "redirect", "why"),
    [
        ("127.0.0.1", "", "are not fetched from '127.0.0.1'"),
        ("localhost", "", "are not fetched from 'localhost'"),
        ("pictures.test", "http://127.0.0.1:{port}/secret", "are not fetched from '127.0.0.1'"),
        ("pictures.test", "http://inner.cdn.test:{port}/secret", "an address that is not public"),
        ("pictures.test", "file:///etc/passwd", "not http or https"),
        ("pictures.test", "/secret", "this is no image"),
    ],
)
@pytest.mark.parametrize("path", bodies(""))
async def test_addresses_lead_to_nothing_else(path: str, host: str, redirect: str, why: str) -> None:
    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.1"] if name == "pictures.test" else ["10.0.0.1"]

    async with (
        site({"/": ok(png(picture(8, 8))), "/secret": ok(b"secret")}) as web,
        served(limits=limits(fetcher(resolve=resolve)), template=TEMPLATE) as server,
    ):
        if redirect:
            web.answers["/"] = to(redirect.format(port=web.port))
        answer = await server.post(path, model="tiny", **bodies(web.url("/", host))[path])
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]
        assert "secret" not in answer.text
        assert ("/secret" in [head.split()[1] for head in web.asked]) == (redirect == "/secret")
