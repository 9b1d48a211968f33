"""The engine's side of an executor elsewhere, from settings; and the server's side. Needs grpcio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from quire.assembly.engine import make_executor
from quire.assembly.limits import Limits, Made, choose_device
from quire.config import OPTIONS, Settings
from quire.engine.executor import Description
from quire.errors import InvalidConfig
from quire.executors.grpc_client import RemoteExecutor, TlsConfig
from quire.executors.grpc_server import Credentials, ExecutorServer
from quire.types import UNLIMITED

THEIRS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "execution": ("deterministic", "device", "threads", "enforce_eager"),
        "model": (
            *("dtype", "load_format", "quantization", "max_model_len"),
            *("canary", "canary_min_agreement", "canary_max_kl"),
        ),
        "cache": (
            *("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization"),
            "kv_cache_dtype",
        ),
        "scheduler": ("lookahead",),
    }
)
"""Options, by section, of whoever runs the steps: here they would do nothing."""


def make(settings: Settings) -> Made:
    """A connection. Raises InvalidConfig when nobody answers, or for an option that belongs to the other side."""
    for name in (name for names in THEIRS.values() for name in names):
        if settings.get(name) != OPTIONS[name].default:
            raise InvalidConfig(
                f"{OPTIONS[name].flag} is for whoever runs the steps: give it to `quire executor`", param=name
            )
    asked = settings.executor
    executor = RemoteExecutor(
        str(asked.executor_address),
        trust=_trust(settings),
        patience=asked.executor_start_timeout,
        deadline=asked.executor_step_timeout,
    )
    try:
        return Made(executor, limits_of(settings, executor.describe()), {})
    except InvalidConfig:
        executor.close()
        raise


def limits_of(settings: Settings, about: Description) -> Limits:
    """What an executor that says this of itself leaves to choose. Raises InvalidConfig for more than it can do."""
    scheduler = settings.scheduler
    most = about.num_rows // (1 + about.lookahead)
    cap = scheduler.max_num_seqs or most
    usual = 512 if about.device == "cpu" else 8192
    budget = max(cap, scheduler.max_num_batched_tokens or min(usual, about.max_step_tokens))
    if not scheduler.enable_chunked_prefill:
        budget = max(budget, about.max_model_len)
    for name, value, bound in (("max_num_seqs", cap, most), ("max_num_batched_tokens", budget, about.max_step_tokens)):
        if value > bound:
            raise InvalidConfig(
                f"the executor was started for {name} {bound}, and here it would be {value}: lower it here, or raise "
                "it there",
                param=name,
            )
    chunked = scheduler.enable_chunked_prefill
    return Limits(
        max_model_len=about.max_model_len,
        page_size=about.block_size,
        cap=cap,
        rows=about.num_rows,
        depth=about.lookahead,
        budget=budget,
        chunk=(scheduler.long_prefill_token_threshold or budget) if chunked else UNLIMITED,
    )


def host(settings: Settings, address: str, credentials: Credentials | None = None) -> ExecutorServer:
    """The executor these settings describe, for engines elsewhere.

    One step more than usual is launched ahead of results: the one that travels.
    """
    if settings.scheduler.lookahead is None:
        ahead = 1 if choose_device(settings.execution.device).type == "cpu" else 2
        settings = replace(settings, scheduler=replace(settings.scheduler, lookahead=ahead))
    return ExecutorServer(make_executor(settings).executor, address, credentials)


def read(path: str, param: str) -> bytes:
    """A file that an option names. Raises InvalidConfig."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{param}: {path} cannot be read: {error.strerror}", param=param) from error


def _trust(settings: Settings) -> TlsConfig | None:
    asked = settings.executor
    if asked.executor_tls_ca is None:
        return None
    own = {
        "certificate": (asked.executor_tls_cert, "executor_tls_cert"),
        "key": (asked.executor_tls_key, "executor_tls_key"),
    }
    brought = {name: read(path, param) for name, (path, param) in own.items() if path is not None}
    return TlsConfig(read(asked.executor_tls_ca, "executor_tls_ca"), **brought)
