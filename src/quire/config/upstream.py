"""Options of the other backends: who answers, where, and how vLLM is started."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from quire.config.option import option
from quire.errors import InvalidConfig
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """Answers from other servers, which Quire stands in front of: see docs/guides/upstream.md."""

    backend: Literal["native", "openai", "vllm"] = option(
        "native",
        "Who answers: native, our own engine; openai, servers that run already (--upstream); vllm, a private "
        "`vllm serve` that is started, watched and started again.",
    )
    upstream: tuple[str, ...] = option(
        (),
        "Address of a running server, http://HOST:PORT; several are allowed (repeat the flag, or use commas).",
        unset="none",
        metavar="URL",
    )
    upstream_api_key: str | None = option(
        None,
        "Key that is sent to the servers. Unset: the client's own, where this server wants none.",
        secret=True,
        unset="none",
    )
    upstream_affinity: bool = option(
        False, "Send requests that begin alike to the same server, while it is not much busier than the others."
    )
    upstream_start_timeout: float = option(
        600.0, "Seconds until a server must answer after the start.", low=0, high=86400
    )
    upstream_most: int = option(
        2048, "Requests that may be with the servers; one more is refused with 429.", low=1, high=UNLIMITED
    )
    vllm_command: str = option("vllm", "The command that is vLLM, with leading arguments if it needs some.")
    vllm_args: tuple[str, ...] = option(
        (),
        "Arguments of `vllm serve`, as they are; on the command line also whatever follows --.",
        unset="none",
        verbatim=True,
    )
    vllm_log: str | None = option(
        None, "File that what vLLM says is added to. Unset: a new one among the temporary files.", unset="none"
    )


def check(config: UpstreamConfig) -> None:
    """Raises InvalidConfig for options that do not go with the backend."""
    if config.backend == "openai" and not config.upstream:
        raise InvalidConfig("backend openai passes requests on: say where to, with upstream", param="upstream")
    for entry in fields(config):
        name = entry.name
        of_vllm, of_others = name.startswith("vllm_"), name == "upstream"
        wrong = {
            "native": name != "backend",
            "openai": of_vllm,
            "vllm": of_others,
        }[config.backend]
        if wrong and getattr(config, name) != entry.default:
            wants = "vllm" if of_vllm else "openai" if of_others else "openai or vllm"
            raise InvalidConfig(f"{name} is for backend {wants}, but backend is {config.backend}", param=name)
