"""A decoder as ONNX graphs over a flat K/V pool: `body.onnx`, tokens to hidden states, and `head.onnx`, to logits.

The pool of a layer is [rows, D], one row a (block, K/V head, position): the same memory as the CPU executor's blocks. A
step scatters new K/V into its rows and gathers those it attends to. Standard operators (opset 23), nothing traced.

Letters: S spans of n tokens each, L positions attended to, G key/value heads, D head dim.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from quire.errors import InvalidModel
from quire.layers.basic import frequencies
from quire.layers.quantization.base import Plain
from quire.models.registry import read_spec
from quire.models.spec import ModelSpec
from quire.types import UNLIMITED
from quire.weights.files import ONNX_FORMAT, Checkpoint, read_config
from quire.weights.schemes import AUTO, CheckpointFormat, choose_format

OPSET, IR = 23, 10
BODY, HEAD = "body.onnx", "head.onnx"
SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Floats = npt.NDArray[np.float32]
Weight = Callable[[str], Floats]


def export(source: Path, target: Path, *, int8: bool = False) -> None:
    """Write the graphs with float32 weights, and the other files of `source` that serving needs, to `target`.

    int8: matrices in int8, by dynamic quantization. Raises InvalidModel for a model that these
    graphs cannot express.
    """
    config = read_config(source)
    spec = read_spec(config)
    checkpoint = Checkpoint(source)
    check(spec, isinstance(choose_format(config, AUTO, Plain, checkpoint.entries), CheckpointFormat))

    def weight(name: str) -> Floats:
        if name not in checkpoint.entries:
            raise InvalidModel(f"{source.name} lacks {name}")
        read: Floats = checkpoint.entries[name].read(()).to(torch.float32).numpy()
        return read

    missing = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=".", dir=target) as folder:
            made = Path(folder)
            for name, graph in ((BODY, body(spec, weight)), (HEAD, head(spec, weight))):
                save(graph, made / name, int8)
            for beside in source.glob("*"):
                if beside.is_file() and beside.suffix in (".json", ".jinja", ".model") and beside.name != "config.json":
                    shutil.copy(beside, made / beside.name)
            written = [*made.iterdir()]
            config_file = made / "config.json"
            config_file.write_text(json.dumps(config | {"quire_onnx_format": ONNX_FORMAT}, indent=2))
            for file in (*written, config_file):  # a folder without config.json is no model
                file.replace(target / file.name)
    except BaseException:
        if missing:
            target.rmdir()
        raise


def check(spec: ModelSpec, quantised: bool) -> None:
    """Raise InvalidModel for a model that these graphs cannot express."""
    name = spec.architecture
    if name not in SUPPORTED:
        raise InvalidModel(f"export-onnx does not support {name} (known: {', '.join(SUPPORTED)}): use --executor local")
    if quantised:
        raise InvalidModel("export-onnx takes plain weights only, and this checkpoint is quantized")
    if min(spec.windows) < min(spec.context, UNLIMITED):
        raise InvalidModel(
            f"export-onnx does not support sliding windows, and {name} here has one of {min(spec.windows)}"
        )
    if spec.ropes or spec.chunks or spec.experts or spec.score_cap or spec.logit_cap or spec.activation != "silu":
        raise InvalidModel(f"export-onnx does not support a feature of this {name}: use --executor local")


class Graph:
    """A graph being built. Methods append nodes and return the names of their results."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def op(self, kind: str, *inputs: str, outputs: int = 1, to: str = "", **attributes: Any) -> Any:
        """A node; returns the name of its output, or a list of them. to: a name of one's own."""
        at = len(self.nodes)
        names = [to] if to else [f"{kind}.{at}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def const(self, value: npt.NDArray[Any]) -> str:
        """A constant."""
        name = f"const.{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def ints(self, *values: int) -> str:
        """A constant of int64."""
        return self.const(np.array(values, dtype=np.int64))

    def linear(self, x: str, *names: str, bias: bool = False) -> str:
        """A product with the matrices `names`, concatenated."""
        y = self.op("MatMul", x, self.const(np.concatenate([self.weight(f"{n}.weight") for n in names]).T))
        if not bias:
            return str(y)
        return str(self.op("Add", y, self.const(np.concatenate([self.weight(f"{n}.bias") for n in names]))))

    def norm(self, x: str, name: str, eps: float) -> str:
        """An RMS norm."""
        return str(self.op("RMSNormalization", x, self.const(self.weight(f"{name}.weight")), axis=-1, epsilon=eps))

    def model(self, inputs: list[Any], outputs: list[Any]) -> Any:
        """The graph as an ONNX model."""
        graph = helper.make_graph(self.nodes, "quire", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)


def body(spec: ModelSpec, weight: Weight) -> Any:
    """tokens and positions [S, n], rows [S * n * G, 1] to write, keys [S, G, L] rows to read, mask [S, 1, R * n, L].

    Each layer's pool is an input and an output; bound to the same memory, only the new rows are written.
    """
    g = Graph(weight)
    angles = g.op(
        "Mul", g.op("Unsqueeze", g.op("Cast", "positions", to=""), g.ints(2)), g.const(frequencies(spec.rope).numpy())
    )
    g.nodes[0].attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    gain = g.const(np.array(spec.rope.gain, dtype=np.float32))
    turn = tuple(g.op("Mul", g.op(kind, angles), gain) for kind in ("Cos", "Sin"))
    x = g.op("Gather", g.const(weight("model.embed_tokens.weight")), "tokens")
    for i in range(spec.layers):
        at = f"model.layers.{i}"
        x = g.op("Add", x, attention(g, spec, g.norm(x, f"{at}.input_layernorm", spec.norm_eps), turn, i))
        y = g.norm(x, f"{at}.post_attention_layernorm", spec.norm_eps)
        gate, up = (g.linear(y, f"{at}.mlp.{n}", bias=spec.mlp_bias) for n in ("gate_proj", "up_proj"))
        acted = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        x = g.op("Add", x, g.linear(acted, f"{at}.mlp.down_proj", bias=spec.mlp_bias))
    normed = g.norm(x, "model.norm", spec.norm_eps)
    g.op("Identity", normed, to="hidden")
    info, groups, dim = helper.make_tensor_value_info, spec.kv_heads, spec.head_dim
    pools = [f"{kind}.{i}" for i in range(spec.layers) for kind in "kv"]
    whole, number = TensorProto.INT64, TensorProto.FLOAT
    inputs = [
        info("tokens", whole, ["S", "n"]),
        info("positions", whole, ["S", "n"]),
        info("rows", whole, ["W", 1]),
        info("keys", whole, ["S", groups, "L"]),
        info("mask", number, ["S", 1, "Rn", "L"]),
        *(info(name, number, ["rows", dim]) for name in pools),
    ]
    outputs = [info("hidden", number, ["S", "n", spec.hidden])]
    return g.model(inputs, outputs + [info(f"{name}.out", number, ["rows", dim]) for name in pools])


def attention(g: Graph, spec: ModelSpec, x: str, turn: tuple[str, ...], i: int) -> str:
    """Attention of one layer; x [S, n, hidden] is normed. Query heads that share a K/V head count as more queries."""
    at, heads, groups, dim = f"model.layers.{i}.self_attn", spec.heads, spec.kv_heads, spec.head_dim
    each = heads // groups
    qkv = g.linear(x, *(f"{at}.{n}" for n in ("q_proj", "k_proj", "v_proj")), bias=spec.qkv_bias)
    q, k, v = g.op("Split", qkv, g.ints(heads * dim, groups * dim, groups * dim), axis=-1, outputs=3)
    if spec.qk_norm:
        q, k = (
            g.op(
                "Reshape",
                g.norm(g.op("Reshape", y, g.ints(0, 0, h, dim)), f"{at}.{n}", spec.norm_eps),
                g.ints(0, 0, -1),
            )
            for y, h, n in ((q, heads, "q_norm"), (k, groups, "k_norm"))
        )
    part: dict[str, Any] = {} if spec.rope.dim == dim else {"rotary_embedding_dim": spec.rope.dim}
    q, k = (g.op("RotaryEmbedding", y, *turn, num_heads=h, **part) for y, h in ((q, heads), (k, groups)))
    keys, values = (
        g.op(
            "Gather",
            g.op("ScatterND", f"{n}.{i}", "rows", g.op("Reshape", y, g.ints(-1, dim)), to=f"{n}.{i}.out"),
            "keys",
        )
        for n, y in (("k", k), ("v", v))
    )
    q = g.op("Mul", q, g.const(np.array(spec.scale or dim**-0.5, dtype=np.float32)))
    q = g.op("Transpose", g.op("Reshape", q, g.ints(0, 0, groups, each, dim)), perm=[0, 2, 3, 1, 4])
    q = g.op("Reshape", q, g.ints(0, 0, -1, dim))
    scores = g.op("MatMul", q, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
    seen = g.op("MatMul", g.op("Softmax", g.op("Add", scores, "mask"), axis=-1), values)
    seen = g.op("Transpose", g.op("Reshape", seen, g.ints(0, 0, each, -1, dim)), perm=[0, 3, 1, 2, 4])
    return g.linear(g.op("Reshape", seen, g.ints(0, 0, -1)), f"{at}.o_proj", bias=spec.out_bias)


def head(spec: ModelSpec, weight: Weight) -> Any:
    """hidden [R, hidden] -> logits [R, V]."""
    g = Graph(weight)
    table = weight("model.embed_tokens.weight" if spec.tie else "lm_head.weight")
    g.op("MatMul", "hidden", g.const(table.T), to="logits")
    info = helper.make_tensor_value_info
    hidden = info("hidden", TensorProto.FLOAT, ["R", spec.hidden])
    return g.model([hidden], [info("logits", TensorProto.FLOAT, ["R", spec.vocab])])


def save(model: Any, path: Path, int8: bool) -> None:
    """Save a model with its weights in a file of their own: a graph cannot hold 2 GiB."""
    data = path.with_suffix(".onnx.data")
    data.unlink(missing_ok=True)
    if not int8:
        onnx.save(model, str(path), save_as_external_data=True, location=data.name, size_threshold=1024)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = path.with_suffix(".plain.onnx")
    onnx.save(model, str(plain))
    quantize_dynamic(plain, path, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8)
    plain.unlink()
