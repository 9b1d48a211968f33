"""`quire doctor`: what this machine has for Quire, what it lacks, and how to mend it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import click
import torch
from rich.table import Table
from rich.text import Text

import quire
from quire.assembly.limits import host_bytes
from quire.cli.tables import print_table
from quire.config.option import amount
from quire.ops.matmul import can_pack
from quire.ops.native.library import best_level

if sys.platform != "win32":
    import resource

Verdict = Literal["ok", "slow", "missing"]
"""slow: it works, and not as well as it could. missing: something will fail."""


class Finding(NamedTuple):
    """One thing that was looked at. mend: what to do, where something is wrong."""

    name: str
    verdict: Verdict
    says: str
    mend: str = ""


def run(port: int, as_json: bool) -> None:
    """`quire doctor`, see `quire.cli.late`."""
    found = list(findings(port))
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found], indent=1))
    else:
        show(found)
    if any(each.verdict == "missing" for each in found):
        raise click.exceptions.Exit(1)


def findings(port: int) -> Iterator[Finding]:
    """Everything that is looked at. port: of a server."""
    yield python()
    yield installed_torch()
    yield from gpus()
    yield processor()
    yield memory()
    for name, folder in caches().items():
        yield disk(name, folder)
    yield descriptors()
    yield listening(port)
    yield extras()


def show(found: list[Finding]) -> None:
    """A line each, and beneath it how to mend what is wrong."""
    colours = {"ok": "green", "slow": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for style in ("bold", "", ""):
        table.add_column(style=style, no_wrap=style == "bold", overflow="fold")
    for each in found:
        mend = f"\n{each.mend}" if each.mend else ""
        table.add_row(each.name, Text(each.verdict, colours[each.verdict]), f"{each.says}{mend}")
    print_table(table)


def python() -> Finding:
    """Quire's and Python's versions, and the system."""
    says = f"quire {quire.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Finding("quire", "ok", says)
    return Finding("quire", "slow", says, "Linux on x86-64 is what Quire is tested on: elsewhere it may fail, by name.")


def installed_torch() -> Finding:
    """torch's version, and what it was built for."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    threads = torch.get_num_threads()
    says = f"torch {torch.__version__}, {built}, {threads} thread{'s' * (threads != 1)}"
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        mend = "There is an NVIDIA driver here and no CUDA in torch: install torch from pytorch.org's index for it."
        return Finding("torch", "slow", says, mend)
    return Finding("torch", "ok", says)


def gpus() -> Iterator[Finding]:
    """Each GPU, and what compiles kernels for them."""
    if not torch.cuda.is_available():
        yield Finding("gpu", "ok", "torch sees none: models run on the processor")
        return
    for i in range(torch.cuda.device_count()):
        about, (free, whole) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        says = f"{about.name}, compute capability {about.major}.{about.minor}, {amount(free)} of {amount(whole)} free"
        if about.major < 8:
            mend = "Quire's kernels are for compute capability 8.0 and later: use --device cpu."
            yield Finding(f"gpu {i}", "missing", says, mend)
        elif free < 0.5 * whole:
            yield Finding(f"gpu {i}", "slow", says, "Another process has half of it: `nvidia-smi` names it.")
        else:
            yield Finding(f"gpu {i}", "ok", says)
    yield compiler()


def compiler(search: Callable[[str], str | None] = shutil.which) -> Finding:
    """Triton, and the C compiler that it starts kernels with."""
    if find_spec("triton") is None:
        return Finding("kernels", "missing", "Triton is not installed", "pip install triton")
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    found = next((path for name in names if name and (path := search(name))), None)
    if found is None:
        mend = "Install one (Debian: apt-get install gcc libc6-dev), or set CC."
        return Finding("kernels", "missing", "there is no C compiler, without which Triton cannot start", mend)
    return Finding("kernels", "ok", f"Triton {version('triton')}, {found}")


def processor() -> Finding:
    """Cores, and what torch multiplies with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    says = f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}, {best_level() or 'torch'} kernels"
    if can_pack(torch.bfloat16, torch.device("cpu")):
        return Finding("processor", "ok", f"{says}, bfloat16 in hardware")
    mend = "bfloat16 is emulated: float32 or GGUF files are faster here."
    return Finding("processor", "slow", f"{says}, no bfloat16 in hardware", mend)


def memory() -> Finding:
    """What is free."""
    free = host_bytes()
    if free >= 2 << 30:
        return Finding("memory", "ok", f"{amount(free)} free")
    mend = "`quire plan MODEL` says what fits; the embedded model does."
    return Finding("memory", "slow", f"{amount(free)} free", mend)


def caches() -> Mapping[str, Path]:
    """Where models and compiled kernels are kept."""
    home = Path.home()
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME", home / ".cache/huggingface"), "hub")
    kernels = os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"
    return MappingProxyType({"models": Path(hub), "kernel cache": Path(kernels)})


def disk(name: str, folder: Path) -> Finding:
    """Whether a folder can be written to, or made, and what is free there."""
    there = folder
    while not there.exists():
        there = there.parent
    usage = shutil.disk_usage(there)
    says, variable = f"{folder}: {amount(usage.free)} free", "HF_HOME" if name == "models" else "TRITON_CACHE_DIR"
    # Root may write everywhere but to file systems that hold nothing, such as /proc.
    if not (os.access(there, os.W_OK) and usage.total):
        return Finding(name, "missing", f"{folder}: {there} is not writable", f"Set {variable} to a folder that is.")
    if usage.free < 1 << 30:
        what = "Models take gigabytes" if name == "models" else "Compiled kernels take some hundred megabytes"
        return Finding(name, "slow", says, f"{what}: make room, or set {variable} to another disk.")
    return Finding(name, "ok", says)


def descriptors() -> Finding:
    """How many connections and files a process may have."""
    if sys.platform == "win32":
        return Finding("descriptors", "ok", "no limit is known on this system")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= 4096:
        says = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} at most"
        return Finding("descriptors", "ok", says)
    mend = "A server has fewer connections than that: raise it (ulimit -Hn, or LimitNOFILE= in a systemd unit)."
    return Finding("descriptors", "slow", f"{hard:,} at most", mend)


def listening(port: int) -> Finding:
    """Whether a server could listen."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding("port", "slow", f"{port}: {error.strerror}", "Something listens there: use --port.")
    return Finding("port", "ok", f"{port} is free")


PROBES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "hf": ("transformers", "--executor hf, and models that Quire's own layers do not run"),
        "grpc": ("grpc", "--executor grpc"),
        "onnx": ("onnxruntime", "--executor onnx and `quire export-onnx`"),
        "otel": ("opentelemetry.sdk", "--otlp-traces-endpoint"),
        "ray": ("ray", "--replicas and --distributed-executor-backend ray"),
        "report": ("matplotlib", "`quire bench report`"),
        "vision": ("PIL", "images in requests"),
    }
)
"""Of extras: a module that is there where they are installed, and what they are for."""


def extras() -> Finding:
    """Which optional parts are installed."""
    missing = {}
    for extra, (module, purpose) in PROBES.items():
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            missing[extra] = purpose
    here = ", ".join(name for name in PROBES if name not in missing) or "none"
    says = f"installed: {here}"
    if missing:
        names = ",".join(missing)
        says += (
            f". Missing (pip install 'quire-llm[{names}]', in a clone pip install -e '.[{names}]', or some of them):"
        )
    return Finding("extras", "ok", "\n".join([says, *(f"  {name}: {purpose}" for name, purpose in missing.items())]))
