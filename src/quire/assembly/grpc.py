"""An executor in another process or on another machine: the engine's side and the server's. Needs grpcio."""

from __future__ import annotations

from pathlib import Path

from quire.assembly.engine import make_executor
from quire.assembly.limits import BuiltExecutor, Limits, choose_device, sized
from quire.assembly.tiers import refuse_tiers
from quire.config import OPTIONS, Settings
from quire.engine.executor import Description
from quire.errors import InvalidConfig
from quire.executors.grpc_client import RemoteExecutor, TlsConfig
from quire.executors.grpc_server import Credentials, ExecutorServer

SERVER_OPTIONS = (
    *("deterministic", "device", "threads", "enforce_eager", "tensor_parallel_size"),
    *("pipeline_parallel_size", "enable_expert_parallel", "distributed_executor_backend"),
    *("dtype", "load_format", "quantization", "fp8_activations", "max_model_len"),
    *("canary", "canary_min_agreement", "canary_max_kl"),
    *("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "kv_cache_dtype"),
    "lookahead",
)
"""Options of the process that runs the steps: they have no effect in the engine's."""


def make(settings: Settings) -> BuiltExecutor:
    """Connect to an executor. Raises InvalidConfig if it does not answer, and for options of `SERVER_OPTIONS`."""
    for name in SERVER_OPTIONS:
        if settings.get(name) != OPTIONS[name].default:
            raise InvalidConfig(
                f"{OPTIONS[name].flag} is an option of the process that runs the steps: give it to `quire executor`",
                param=name,
            )
    config = settings.executor
    executor = RemoteExecutor(
        str(config.executor_address),
        trust=_tls_config(settings),
        connect_timeout=config.executor_start_timeout,
        deadline=config.executor_step_timeout,
    )
    try:
        return BuiltExecutor(executor, limits_of(settings, executor.describe()), {})
    except InvalidConfig:
        executor.close()
        raise


def limits_of(settings: Settings, description: Description) -> Limits:
    """The limits of an engine for an executor of this description. Raises InvalidConfig where settings exceed them."""
    max_rows = description.num_rows // (1 + description.lookahead)
    limits = sized(
        settings,
        default_tokens=min(512 if description.device == "cpu" else 8192, description.max_step_tokens),
        max_model_len=description.max_model_len,
        whole_prompts=description.bidirectional,
        block_size=description.block_size,
        max_num_seqs=settings.scheduler.max_num_seqs or max_rows,
        num_rows=description.num_rows,
        lookahead=description.lookahead,
    )
    for name, bound in (("max_num_seqs", max_rows), ("max_num_batched_tokens", description.max_step_tokens)):
        if (value := getattr(limits, name)) > bound:
            raise InvalidConfig(
                f"the executor was started with {name} {bound}, and here it is {value}: lower it here, or raise "
                "it there",
                param=name,
            )
    return limits


def host(settings: Settings, address: str, credentials: Credentials | None = None) -> ExecutorServer:
    """Serve the executor that these settings describe, for engines elsewhere.

    One step more than locally is launched ahead of results, to hide the way there and back.
    """
    refuse_tiers(settings, "`quire executor`")
    if settings.execution.pipeline_parallel_size > 1:
        raise InvalidConfig(
            "--pipeline-parallel-size does not go with `quire executor`: use --executor local, or "
            "--tensor-parallel-size",
            param="pipeline_parallel_size",
        )
    if settings.scheduler.lookahead is None:
        lookahead = 1 if choose_device(settings.execution.device).type == "cpu" else 2
        settings = settings.changed(lookahead=lookahead)
    built = make_executor(settings)
    executor = built.executor
    if executor.describe().recurrent:
        executor.close()
        raise InvalidConfig(
            "a model with recurrent layers cannot be run for engines elsewhere yet: serve it with --executor local"
        )
    return ExecutorServer(executor, address, credentials, built.prepare)


def read(path: str, param: str) -> bytes:
    """The content of a file that an option names. Raises InvalidConfig if it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{param}: {path} cannot be read: {error.strerror}", param=param) from error


def _tls_config(settings: Settings) -> TlsConfig | None:
    config = settings.executor
    if config.executor_tls_ca is None:
        return None
    files = {
        "certificate": (config.executor_tls_cert, "executor_tls_cert"),
        "key": (config.executor_tls_key, "executor_tls_key"),
    }
    own = {name: read(path, param) for name, (path, param) in files.items() if path is not None}
    return TlsConfig(read(config.executor_tls_ca, "executor_tls_ca"), **own)
