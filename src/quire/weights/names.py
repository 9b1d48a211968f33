"""What users call models: hub repositories with a tag or a file, addresses copied from a browser, Ollama's names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from quire.errors import InvalidModel

HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co")
OLLAMA_HOSTS = ("ollama.com", "www.ollama.com", "registry.ollama.ai", "ollama.ai")
OLLAMA_REGISTRY = "registry.ollama.ai"

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OLLAMA = re.compile(r"(?:[\w.-]+/)?[A-Za-z0-9][\w.-]*")
_TAG = re.compile(r"[A-Za-z0-9][\w.-]*")
_NOT_MODELS = ("datasets", "spaces", "docs", "collections", "models", "papers")


class ModelName(NamedTuple):
    """A name that is no path.

    source: hub, or Ollama's store on this machine. name: "owner/name". tag: which of a repository's GGUF files, or
    Ollama's tag; '' for the default. file: a GGUF file of the repository, '' for none. revision: branch, tag or commit
    of an address, None where it has none.
    """

    source: Literal["hub", "ollama"]
    name: str
    tag: str = ""
    file: str = ""
    revision: str | None = None


def parse_name(model: str) -> ModelName | None:
    """The name that `model` is; None for what is none of the forms. Raises InvalidModel for an address that is none
    of a model."""
    scheme, separator, rest = model.partition("://")
    if not separator:
        rest = model
    elif scheme not in ("http", "https", "hf"):
        return None
    host, _, path = rest.partition("/")
    if scheme == "hf" and separator:
        return _of_hub(rest, model)
    if host in HUB_HOSTS or (separator and host == _endpoint()):
        return _of_hub(path, model)
    if host in OLLAMA_HOSTS:
        return _of_ollama(_without_query(path), model)
    if separator:
        raise InvalidModel(_foreign(model))
    return _plain(model)


def _plain(model: str) -> ModelName | None:
    if model.startswith((".", "/", "~")) or "\\" in model:
        return None
    name, _, tag = model.partition(":")
    if tag and not _TAG.fullmatch(tag):
        return None
    if model.endswith(":"):
        return None
    if name.endswith(".gguf"):
        return _with_file(name)
    if _REPOSITORY.fullmatch(name):
        return ModelName("hub", name, tag)
    if "/" not in name and _OLLAMA.fullmatch(name):
        return ModelName("ollama", f"library/{name}", tag)
    return None


def _with_file(path: str) -> ModelName | None:
    """owner/name/folder/FILE.gguf."""
    parts = path.split("/")
    repository = "/".join(parts[:2])
    if len(parts) < 3 or ".." in parts or not all(parts) or not _REPOSITORY.fullmatch(repository):
        return None
    return ModelName("hub", repository, file="/".join(parts[2:]))


def _of_hub(path: str, model: str) -> ModelName:
    """Of what follows the hub's host in an address."""
    asked = urlsplit("//host/" + path)
    parts = [unquote(part) for part in asked.path.split("/") if part]
    if not parts or parts[0] in _NOT_MODELS:
        raise InvalidModel(f"{model!r} is no address of a model: those are https://huggingface.co/OWNER/NAME")
    shown = parse_qs(asked.query).get("show_file_info", [""])[0]
    revision = None
    if len(parts) > 3 and parts[2] in ("blob", "resolve", "raw", "tree"):
        revision = None if parts[3] == "main" else parts[3]
        parts = [*parts[:2], *parts[4:]]
    whole = "/".join(parts if parts[-1].endswith(".gguf") else [*parts[:2], *filter(None, [shown])])
    found = _plain(whole)
    found = found and found._replace(revision=revision)
    if found is None or found.source != "hub":
        raise InvalidModel(f"{model!r} is no address of a model: those are https://huggingface.co/OWNER/NAME")
    return found


def _of_ollama(path: str, model: str) -> ModelName:
    """Of what follows Ollama's host in an address."""
    name, _, tag = path.removesuffix("/tags").strip("/").partition(":")
    if not _OLLAMA.fullmatch(name) or (tag and not _TAG.fullmatch(tag)):
        raise InvalidModel(f"{model!r} is no address of a model: those are https://ollama.com/library/NAME:TAG")
    return ModelName("ollama", name if "/" in name else f"library/{name}", tag)


def _without_query(path: str) -> str:
    return unquote(urlsplit("//host/" + path).path).strip("/")


def _endpoint() -> str:
    """The host of the hub that the environment names."""
    return urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc


def _foreign(model: str) -> str:
    """Why an address is refused."""
    if urlsplit(model).path.endswith(".gguf"):
        return f"model {model!r} is an address of neither the hub nor Ollama: download the file, and name its path here"
    return (
        f"model {model!r} is an address: name a folder or a hub id such as 'owner/name'; a server that runs is "
        "talked to with `quire chat --url ADDRESS`"
    )


# ---------------------------------------------------------------- Ollama's names on the hub


class Publisher(NamedTuple):
    """Where the GGUF files of a name of Ollama's library are: the repository of a size, the sizes, the one without a
    tag first."""

    repository: str
    sizes: tuple[str, ...]


_PUBLISHERS: Mapping[str, Publisher] = MappingProxyType(
    {
        "qwen3": Publisher("Qwen/Qwen3-{size}-GGUF", ("8B", "0.6B", "1.7B", "4B", "14B", "32B")),
        "qwen2.5": Publisher("Qwen/Qwen2.5-{size}-Instruct-GGUF", ("7B", "0.5B", "1.5B", "3B", "14B", "32B", "72B")),
        "qwen2.5-coder": Publisher(
            "Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF", ("7B", "0.5B", "1.5B", "3B", "14B", "32B")
        ),
        "smollm2": Publisher("HuggingFaceTB/SmolLM2-{size}-Instruct-GGUF", ("1.7B", "360M")),
        "gpt-oss": Publisher("ggml-org/gpt-oss-{size}-GGUF", ("20b", "120b")),
        "gemma3": Publisher("ggml-org/gemma-3-{size}-it-GGUF", ("4b", "1b", "12b", "27b")),
    }
)
"""Names of Ollama's library of which the publisher, or llama.cpp's organization, has GGUF files on the hub under one
rule. They are other files than Ollama's of the same model."""

_QUANT = re.compile(r"i?q\d\w*|[bf]p?\d+")


def on_hub(name: ModelName) -> ModelName | None:
    """The hub's repository of a name of Ollama's library; None where no rule is known.

    `qwen3:0.6b` is Qwen/Qwen3-0.6B-GGUF, and `qwen3:0.6b-q8_0` its file of that type.
    """
    known = _PUBLISHERS.get(name.name.removeprefix("library/"))
    asked, _, rest = ("" if name.tag == "latest" else name.tag).partition("-")
    quant = rest.removeprefix("instruct").removeprefix("it").strip("-")
    if known is None or (quant and not _QUANT.fullmatch(quant)):
        return None
    sizes = {size.lower(): size for size in known.sizes}
    size = sizes.get(asked) if asked else known.sizes[0]
    return None if size is None else ModelName("hub", known.repository.format(size=size), quant.upper())


def mapped_names() -> Mapping[str, str]:
    """The names of Ollama's library that `on_hub` knows, with their repositories, {size} in place of the size."""
    return {name: known.repository for name, known in _PUBLISHERS.items()}
