"""An executor on ONNX Runtime from settings. Needs onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.assembly.host import on_host
from quire.assembly.limits import Made, choose_threads, refuse, resolve
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.executors.onnx import OnnxModel
from quire.model_runner.memory import layer_shapes
from quire.models.registry import parameters, read_spec
from quire.weights.files import read_config
from quire.weights.locate import locate

FIXED: Mapping[str, str] = MappingProxyType(
    {
        "load_format": "the weights are in the graph",
        "quantization": "it is decided by `quire export-onnx --int8`",
        "kv_cache_dtype": "K/V is float32 in the graph",
        "deterministic": "how ONNX Runtime sums depends on what else is in the batch",
    }
)


def make(settings: Settings) -> Made:
    """Raises InvalidModel for a folder that `quire export-onnx` did not write, InvalidConfig for what cannot be."""
    refuse(settings, "onnx", FIXED)
    if settings.model.dtype not in ("auto", "float32"):
        raise InvalidConfig("--executor onnx computes in float32: leave --dtype at auto", param="dtype")
    if settings.execution.device == "cuda":
        raise InvalidConfig("--executor onnx runs on a CPU: leave --device at auto", param="device")
    asked = settings.model
    folder = locate(asked.model, revision=asked.revision, cache=asked.download_dir)
    if not (folder / "body.onnx").is_file():
        raise InvalidConfig(
            f"{asked.model} has no graph: `quire export-onnx {asked.model} FOLDER` writes one, to serve instead",
            param="model",
        )
    spec = read_spec(read_config(folder))
    threads = settings.execution.threads or choose_threads(parameters(spec))
    torch.set_num_threads(threads)
    limits = resolve(settings, spec, torch.device("cpu"))
    model = OnnxModel(folder, spec, threads)
    return Made(on_host(settings, model, limits, layer_shapes(spec.kv_shapes, model.dtype)), limits, {})
