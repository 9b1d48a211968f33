"""An executor on ONNX Runtime, from settings. Needs onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.assembly.engine import on_host
from quire.assembly.limits import BuiltExecutor, choose_threads, reject_options, resolve
from quire.assembly.place import place_of
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.executors.onnx import OnnxModel
from quire.model_runner.memory import layer_shapes
from quire.models.registry import parameters, read_spec
from quire.weights.files import ONNX_FORMAT, read_config

FIXED: Mapping[str, str] = MappingProxyType(
    {
        "load_format": "the weights are in the graph",
        "quantization": "it is decided by `quire export-onnx --int8`",
        "kv_cache_dtype": "K/V is float32 in the graph",
        "deterministic": "how ONNX Runtime sums depends on what else is in the batch",
    }
)
"""Options that have no effect with this executor, and why."""


def make(settings: Settings) -> BuiltExecutor:
    """Load the model and build its executor.

    Raises InvalidConfig for a folder that `quire export-onnx` did not write, or in another format version, and for
    options of `FIXED`.
    """
    reject_options(settings, "onnx", FIXED)
    if settings.model.dtype not in ("auto", "float32"):
        raise InvalidConfig("--executor onnx computes in float32: leave --dtype at auto", param="dtype")
    if settings.execution.device == "cuda":
        raise InvalidConfig("--executor onnx runs on a CPU: leave --device at auto", param="device")
    config = settings.model
    folder = place_of(settings)
    if not (folder / "body.onnx").is_file():
        raise InvalidConfig(
            f"{config.model} has no graph: `quire export-onnx {config.model} FOLDER` writes one, to serve instead",
            param="model",
        )
    model_config = read_config(folder)
    if (found := model_config.get("quire_onnx_format")) != ONNX_FORMAT:
        written = "without a format version" if found is None else f"of format {found}"
        raise InvalidConfig(
            f"{config.model} holds graphs {written}, and this version of Quire reads format {ONNX_FORMAT}: export the "
            "model again, with `quire export-onnx MODEL FOLDER`",
            param="model",
        )
    spec = read_spec(model_config)
    threads = settings.execution.threads or choose_threads(parameters(spec))
    torch.set_num_threads(threads)
    limits = resolve(settings, spec, torch.device("cpu"))
    model = OnnxModel(folder, spec, threads)
    return BuiltExecutor(on_host(settings, model, limits, layer_shapes(spec.kv_shapes, model.dtype)), limits, {})
