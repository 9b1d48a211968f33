"""Options of what runs the steps: this process's own layers, ONNX Runtime, transformers, or another machine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from quire.config.option import option
from quire.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """What runs the steps."""

    executor: Literal["local", "grpc", "onnx", "hf"] = option(
        "local",
        "What runs the steps: local, our own layers; onnx, ONNX Runtime on a folder that `quire export-onnx` wrote; "
        "hf, Hugging Face transformers, slowly, for models we have no layers for; grpc, a `quire executor` elsewhere.",
    )
    executor_address: str | None = option(
        None, "HOST:PORT of the `quire executor` that runs the steps, for --executor grpc.", unset="none"
    )
    executor_start_timeout: float = option(
        60.0, "Seconds until the executor at --executor-address must answer after the start.", low=0.1, high=86400
    )
    executor_step_timeout: float = option(
        60.0, "Seconds that a step may take there before the executor counts as lost.", low=0.1, high=86400
    )
    executor_tls_ca: str | None = option(
        None,
        "File with the certificate (PEM) of who signed the executor's. Unset: the connection is in the clear.",
        unset="none",
    )
    executor_tls_cert: str | None = option(
        None, "File with this engine's own certificate (PEM), if the executor asks for one.", unset="none"
    )
    executor_tls_key: str | None = option(None, "File with the key (PEM) of that certificate.", unset="none")


def check(config: ExecutorConfig) -> None:
    """Raises InvalidConfig for options that do not go with the executor, or with each other."""
    if config.executor == "grpc" and config.executor_address is None:
        raise InvalidConfig(
            "executor grpc runs steps elsewhere: say where, with executor_address HOST:PORT", param="executor_address"
        )
    for entry in fields(config):
        if config.executor != "grpc" and entry.name != "executor" and getattr(config, entry.name) != entry.default:
            raise InvalidConfig(
                f"{entry.name} is for executor grpc, but executor is {config.executor}", param=entry.name
            )
    if (config.executor_tls_cert is None) != (config.executor_tls_key is None):
        raise InvalidConfig("executor_tls_cert and executor_tls_key go together", param="executor_tls_cert")
    if config.executor_tls_cert is not None and config.executor_tls_ca is None:
        raise InvalidConfig(
            "executor_tls_cert needs executor_tls_ca: without it the connection is in the clear",
            param="executor_tls_ca",
        )
