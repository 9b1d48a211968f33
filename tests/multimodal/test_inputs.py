"""Images of messages: what is taken, what is fetched first, and what is refused by name."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidRequest, TooLarge
from quire.multimodal.inputs import Decoder, ImageReader, MediaNeeded, MediaPolicy, NoImages
from quire.multimodal.pixels import opened, resized
from quire.multimodal.processor import ImageProcessor
from tests.vision import picture, png

PROCESSOR = ImageProcessor(factor=8, max_pixels=64 * 12, image_token=7)
DATA = png(picture(30, 20))
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()
HOSTS = ("a.test", "*.b.test")


def reader(**policy: Any) -> ImageReader:
    fields: dict[str, Any] = {"domains": HOSTS, **policy}
    return ImageReader(PROCESSOR, Decoder(opened, resized), MediaPolicy(**fields))


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def url(given: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": given, **fields}


@pytest.mark.parametrize(
    "part",
    [
        url({"url": URL}),
        url({"url": URL, "detail": "auto"}),
        url(URL),
        {"type": "image", "image": URL},
        {"type": "input_image", "image_url": URL, "detail": "high"},
        url("DATA:image/png;charset=x;BASE64," + URL.partition(",")[2]),
        url("data:;base64," + "\n".join(URL.partition(",")[2])),
        url("data:image/gif," + "".join(f"%{byte:02x}" for byte in DATA)),
    ],
)
def test_images_come_in_many_forms(part: dict[str, Any]) -> None:
    shown, [image] = reader().begin().read(message({"type": "text", "text": "a"}, part))
    assert shown == message({"type": "text", "text": "a"}, {"type": "image"})
    assert image == resized(picture(30, 20), PROCESSOR, "", 1 << 20)


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (url({"url": URL, "size": 3}), "unknown fields: size"),
        (url({"url": URL, "detail": "low"}), "detail must be one of auto, high, original"),
        (url({}), "a url is needed"),
        (url(5), "a url is needed"),
        (url(""), "a url is needed"),
        ({"type": "image_url"}, "a url is needed"),
        ({"type": "image"}, r"content\[0\].image: it is required"),
        ({"type": "image", "image": {"a": 1}}, "must be an image of pillow, not dict"),
        (url("data:image/png;base64"), "must look like data:"),
        (url("data:image/png;base64,!!"), "not base64"),
        (url("data:image/png;base64,abc"), "not base64"),
        (url("data:image/png,"), "no image of a known format"),
        (url("ftp://a.test/x"), "must begin with data:, http: or https:, not 'ftp"),
        (url("javascript:alert(1)"), "must begin with"),
        (url("/etc/passwd"), "must begin with"),
        (url("file:///etc/passwd"), "--allowed-local-media-path"),
        (url("http://c.test/x"), "--allowed-media-domains"),
        (url("http://b.test/x"), "--allowed-media-domains"),
        (url("http://a.test@c.test/x"), "it names a user"),
        (url("http://c.test#@a.test/"), "--allowed-media-domains"),
        (url("http://[::1/x"), "damaged"),
        (url("http://a.test:99999/x"), "damaged"),
        (url("http:///x"), "nowhere"),
    ],
)
def test_what_cannot_be_read_is_refused(part: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error) as caught:
        reader().begin().read(message(part))
    assert caught.value.status in (400, 413)


def test_other_servers_are_asked_for_first_and_once() -> None:
    parts = [url("https://a.test/1"), url("http://x.b.test:81/2"), url("https://A.test./1"), url("https://a.test/1")]
    with pytest.raises(MediaNeeded) as needed:
        reader().begin().read(message(*parts))
    assert tuple(needed.value.urls) == ("https://a.test/1", "http://x.b.test:81/2", "https://A.test./1")
    _, images = reader().begin(dict.fromkeys(needed.value.urls, DATA)).read(message(*parts))
    assert len(images) == 4 and len(set(images)) == 1


def test_files_of_one_folder_may_be_named_and_no_others(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "out.png"
    folder.mkdir()
    outside.write_bytes(DATA)
    (folder / "a b.png").write_bytes(DATA)
    (folder / "link.png").symlink_to(outside)
    own = reader(folder=folder).begin()
    _, [image] = own.read(message(url(f"file://{folder}/a%20b.png")))
    assert image.length == PROCESSOR.num_tokens(image.height, image.width)
    for other in (f"{outside}", f"{folder}/../out.png", f"{folder}/link.png", f"{folder}", f"{folder}/none", "/x%00y"):
        with pytest.raises(InvalidRequest, match="no such file in the folder"):
            own.read(message(url(f"file://{other}")))
    with pytest.raises(InvalidRequest, match="no such file"):
        own.read(message(url(f"file://elsewhere{folder}/a%20b.png")))


def test_limits_are_those_of_the_policy() -> None:
    with pytest.raises(InvalidRequest, match="3 images, and at most 2"):
        reader(max_images=2).begin().read(message(*[url(URL)] * 3))
    with pytest.raises(TooLarge, match="more than 99 bytes"):
        reader(max_bytes=99).begin().read(message(url(URL)))
    with pytest.raises(TooLarge, match="30 x 20 pixels are more than the 599"):
        reader(max_pixels=599).begin().read(message(url(URL)))


def test_places_and_images_must_be_as_many() -> None:
    own = reader()
    _, images = own.begin().read(message(url(URL), url(URL)))
    length = images[0].length
    tokens, placed = own.place((1, 7, 2, 7), images)
    assert tokens == (1, *[7] * length, 2, *[7] * length)
    assert [each.start for each in placed] == [1, 2 + length] and placed[0].end == 1 + length
    for wrong in ((1, 7), (7, 7, 7)):
        with pytest.raises(InvalidRequest, match=f"{len([t for t in wrong if t == 7])} places for 2 images"):
            own.place(wrong, images)
    assert own.place((7, 7), ()) == ((7, 7), ())


def test_without_an_encoder_the_first_image_is_refused_with_the_reason() -> None:
    own = NoImages("why not")
    assert own.begin().read(message({"type": "text", "text": "a"})) == (message({"type": "text", "text": "a"}), ())
    with pytest.raises(
        InvalidRequest, match=r"messages\[0\].content\[1\]: images are not read here: why not"
    ) as caught:
        own.read(message({"type": "text", "text": "a"}, url(URL)))
    assert caught.value.code == "no_images" and not own.reads


def test_an_image_that_is_too_narrow_is_named() -> None:
    narrow = "data:," + "".join(f"%{byte:02x}" for byte in png(picture(1, 400)))
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\]: 1 x 400 pixels are too narrow"):
        reader().begin().read(message(url(URL), url(narrow)))
