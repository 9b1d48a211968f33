"""K/V tiers from settings: host memory, a directory, other engines, and what says whose blocks they have."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from collections.abc import Iterator, Sequence
from importlib import import_module
from io import FileIO
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from quire import __version__
from quire.assembly.tiers import option_of
from quire.config import OPTIONS, Settings
from quire.engine.executor import Executor
from quire.errors import InvalidConfig
from quire.executors.block_files import VERSION, BlockFiles
from quire.executors.block_store import (
    BlockMover,
    DeviceCopies,
    HostCopies,
    PoolCopies,
    TieredBlockStore,
    TorchMover,
    block_bytes,
    digest_of,
    host_lines,
    pool_tensors,
)
from quire.executors.kv_transfer import Address, TcpPrefillClient, TcpPrefillServer
from quire.executors.local import LocalExecutor
from quire.model_runner.lookahead_runner import LookaheadRunner
from quire.model_runner.memory import GIB
from quire.models.registry import Model
from quire.ops.ragged import LayerKV
from quire.scheduler.kv_offload import KVOffload, Offload
from quire.scheduler.kv_transfer import PrefillOffload
from quire.server.folder import lock, make_private, replace_file, usable
from quire.server.hosts import loopback

log = logging.getLogger(__name__)

OPTION = "--kv-offloading-dir"
ABOUT = "fingerprint.json"
DEFAULT_ADDRESS = "127.0.0.1:8998"
MIN_SECRET = 16
SEND_TIMEOUT = 10.0
"""Seconds in which a decode engine must take a block."""


def build_offload(settings: Settings, executor: Executor) -> Offload:
    """The tiers that the options describe.

    Raises InvalidConfig for a model or options that they do not go with, for a directory of other blocks, where there
    is not enough room, and where a prefill engine cannot listen.
    """
    mode = settings.disaggregation.disaggregation_mode
    assert isinstance(executor, LocalExecutor), "other executors refuse these options"
    _check(settings, executor)
    about = _about(settings, executor)
    secret = read_secret(settings)
    listener = listen(settings) if mode == "prefill" else None
    store, block_size = _store(settings, executor, about), executor.describe().block_size
    shared = secret, about, store.memory, store.report
    config = settings.disaggregation
    if mode == "decode":
        least, timeout = config.disaggregation_min_tokens, config.disaggregation_timeout
        client = TcpPrefillClient(addresses(settings), *shared, min_tokens=least, timeout=timeout)
        return KVOffload(store, block_size, client, config.disaggregation_max_slowdown)
    if listener is not None:
        server = TcpPrefillServer(listener, *shared, store.wake, block_size, SEND_TIMEOUT)
        return PrefillOffload(store, block_size, server)
    return KVOffload(store, block_size)


def _num_slots(settings: Settings, executor: LocalExecutor, size: int) -> int:
    """Blocks of host memory. With other engines at least enough for two of the longest prompts."""
    cache, about = settings.cache, executor.describe()
    num_slots = int(cache.kv_offloading_size * GIB) // size
    if not cache.kv_offloading_size:
        return 2 * min(-(-about.max_model_len // about.block_size), about.num_blocks)
    if not num_slots:
        raise InvalidConfig(
            f"--kv-offloading-size {cache.kv_offloading_size:g} GiB does not hold one KV block of {size:,} bytes: "
            "raise it, or lower --block-size",
            param="kv_offloading_size",
        )
    return num_slots


def _store(settings: Settings, executor: LocalExecutor, about: dict[str, str]) -> TieredBlockStore:
    """Host memory, and the directory if there is one."""
    cache, runner = settings.cache, executor.runner
    size = block_bytes(runner.kv)
    device = torch.device(executor.describe().device)
    lines = host_lines(_num_slots(settings, executor, size), size, pinned=device.type == "cuda")
    copies: PoolCopies = (
        DeviceCopies(lines, block_mover(runner.kv, device), runner.queue, device)
        if isinstance(runner, LookaheadRunner)
        else HostCopies(runner.kv, lines)
    )
    if cache.kv_offloading_dir is None:
        return TieredBlockStore(copies, lines)
    folder = Path(cache.kv_offloading_dir)
    held, files = open_folder(folder, about, size)
    max_files = int(cache.kv_offloading_dir_size * GIB) // files.file_bytes
    if not max_files:
        held.close()
        raise InvalidConfig(
            f"--kv-offloading-dir-size {cache.kv_offloading_dir_size:g} GiB does not hold one file of "
            f"{files.file_bytes:,} bytes: raise it",
            param="kv_offloading_dir_size",
        )
    return TieredBlockStore(copies, lines, files, max_files, held.close)


def block_mover(kv: Sequence[LayerKV], device: torch.device) -> BlockMover:
    """On a GPU one kernel for all layers; a block of 28 layers takes 112 launches otherwise."""
    tensors = pool_tensors(kv)
    if device.type != "cuda":
        return TorchMover(tensors)
    made: BlockMover = import_module("quire.ops.triton.blocks").BlockCopies(tensors)
    return made


# -------------------------------------------------------------------- other engines


def addresses(settings: Settings) -> list[Address]:
    """Where prefill engines listen. Raises InvalidConfig for one that others can reach, without a secret."""
    config, found = settings.disaggregation, list[Address]()
    for text in config.disaggregation_address or (DEFAULT_ADDRESS,):
        host, _, port = text.rpartition(":")
        found.append(Address(host.strip("[]"), int(port)))
        if config.disaggregation_secret_file is None and not loopback(found[-1].host):
            raise InvalidConfig(
                f"--disaggregation-address {text} is not a loopback address: name a file with a secret that both sides "
                "share, with --disaggregation-secret-file",
                param="disaggregation_secret_file",
            )
    return found


def read_secret(settings: Settings) -> bytes:
    """The secret of both sides; empty without one. Raises InvalidConfig for a file that has none."""
    name = settings.disaggregation.disaggregation_secret_file
    if name is None:
        return b""
    try:
        secret = Path(name).read_bytes().strip()
    except OSError as error:
        raise InvalidConfig(
            f"--disaggregation-secret-file {name}: {error.strerror or error}", param="disaggregation_secret_file"
        ) from error
    if len(secret) < MIN_SECRET:
        raise InvalidConfig(
            f"--disaggregation-secret-file {name} has {len(secret)} bytes: a secret needs {MIN_SECRET} or more, of "
            "`openssl rand -hex 32` for example",
            param="disaggregation_secret_file",
        )
    return secret


def listen(settings: Settings) -> socket.socket:
    """A socket that decode engines can connect to. Raises InvalidConfig where that is not possible."""
    (address,) = addresses(settings)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=64)
    except OSError as error:
        raise InvalidConfig(
            f"--disaggregation-address {address}: cannot listen there: {error.strerror or error}",
            param="disaggregation_address",
        ) from error


def _check(settings: Settings, executor: LocalExecutor) -> None:
    """Raise InvalidConfig for what K/V tiers do not go with."""
    about, cache = executor.describe(), settings.cache
    reason, option = "", option_of(settings)
    if not cache.enable_prefix_caching:
        reason = "evicted blocks are found by the prefix cache, which is off: turn --enable-prefix-caching on"
    elif about.recurrent:
        reason = "this model has recurrent layers, whose states are kept on the device alone"
    elif about.bidirectional:
        reason = "this model attends in both directions, so that no prefix is kept"
    if reason:
        raise InvalidConfig(f"{OPTIONS[option].flag}: {reason}", param=option)


def open_folder(folder: Path, about: dict[str, str], size: int) -> tuple[FileIO, BlockFiles]:
    """The folder's blocks, and its lock. about: what all its blocks must have in common. size: bytes of a block.

    Raises InvalidConfig for a folder that has something else, or blocks of something else; and names it.
    """
    with usable(folder, OPTION):
        names = {each.name for each in folder.iterdir()} if folder.is_dir() else set[str]()
        if names and "lock" not in names:
            raise InvalidConfig(
                f"{OPTION}: {folder} is not empty, and no server has kept K/V there: name a folder of its own",
                param="kv_offloading_dir",
            )
        make_private(folder)
    held = lock(folder, "kv", VERSION, OPTION)
    try:
        with usable(folder, OPTION):
            _check_about(folder, about)
    except BaseException:
        held.close()
        raise
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
    return held, BlockFiles(folder, digest, size)


def _check_about(folder: Path, about: dict[str, str]) -> None:
    path = folder / ABOUT
    if not path.exists():
        replace_file(path, json.dumps(about, indent=1, sort_keys=True).encode(), sync=False)
        return
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = {}
    differing = [name for name in sorted({*about, *found}) if about.get(name) != found.get(name)]
    if differing:
        what = "; ".join(f"{name}: {found.get(name)} there, {about.get(name)} here" for name in differing[:3])
        raise InvalidConfig(
            f"{OPTION}: the blocks in {folder} are of another {', '.join(differing)} ({what}): name another folder, "
            "or remove this one",
            param="kv_offloading_dir",
        )


def _about(settings: Settings, executor: LocalExecutor) -> dict[str, str]:
    """What the bits of K/V depend on."""
    about, model = executor.describe(), cast(Model, executor.runner.model)
    shapes = [
        f"{' '.join(str(tuple(pool.shape[1:])) for pool in each.pools)} {each.k.dtype} {each.k_scale} {each.v_scale}"
        for each in executor.runner.kv
    ]
    found, ops = list(tensors_of(model)), sorted(ops_of(model))
    device = torch.device(about.device)
    return {
        "quire": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "kernels": ", ".join(ops),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(settings.execution.deterministic),
        "fp8_activations": settings.model.fp8_activations,
        "architecture": model.spec.architecture,
        "weights": hashlib.sha256(digest_of(found)).hexdigest(),
        "dtype": about.dtype,
        "block_size": str(about.block_size),
        "layers": hashlib.sha256("\n".join(shapes).encode()).hexdigest(),
    }


def tensors_of(model: Any) -> Iterator[Tensor]:
    """Every tensor of a model: weights, and what was made of them while loading."""
    return (each for each in _reachable(model) if isinstance(each, Tensor))


def ops_of(model: Any) -> set[str]:
    """The operations that a model computes with: their classes and settings."""
    found = (each for each in _reachable(model) if _is_ops(each))
    plain = (str, int, float, bool)
    return {
        f"{type(each).__name__}{sorted((k, v) for k, v in vars(each).items() if isinstance(v, plain))}"
        if hasattr(each, "__dict__")
        else type(each).__name__
        for each in found
    }


def _reachable(root: Any) -> Iterator[Any]:
    """Objects that attributes and collections lead to, in an order that follows from the structure; of operations,
    which may have buffers, themselves alone."""
    seen, left = set[int](), [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, str | bytes | int | float | type | ModuleType | torch.dtype | None):
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, Tensor) or _is_ops(each):
            continue
        left += reversed(_parts_of(each))


def _is_ops(each: Any) -> bool:
    return type(each).__module__.startswith("quire.ops.") and type(each).__name__.endswith("Ops")


def _parts_of(each: Any) -> list[Any]:
    if isinstance(each, dict):
        return list(each.values())
    if isinstance(each, list | tuple):
        return list(each)
    if isinstance(each, MethodType):
        return [each.__self__]
    if isinstance(each, FunctionType):
        return [cell.cell_contents for cell in each.__closure__ or ()]
    slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
    held = list(vars(each).values()) if hasattr(each, "__dict__") else []
    return held + [getattr(each, name) for name in slots if hasattr(each, name)]
