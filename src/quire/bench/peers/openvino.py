"""OpenVINO: a stateful Llama built here of its operations, which its CPU plugin runs in bfloat16. See `service.py`.

The graph has the form that exporters give it (K/V in variables, heads repeated by a broadcast,
scaled_dot_product_attention), so that the plugin's own fusions apply. The sequences of a request are all of one length.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

np: Any = import_module("numpy")
ov: Any = import_module("openvino")
op: Any = import_module("openvino.opset13")
Constant: Any = import_module("openvino.op").Constant
util: Any = import_module("openvino.op.util")

Node = Any


class Checkpoint:
    """config.json and the bfloat16 tensors of one safetensors file."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.file = np.memmap(folder / "model.safetensors", dtype=np.uint8, mode="r")
        length = int(self.file[:8].view(np.uint64)[0])
        self.header = json.loads(bytes(self.file[8 : 8 + length]))
        self.begin = 8 + length

    def weight(self, name: str) -> Node:
        """A constant in bfloat16, converted to float32."""
        entry = self.header[name]
        first, last = entry["data_offsets"]
        numbers = np.ascontiguousarray(self.file[self.begin + first : self.begin + last]).view(np.uint16)
        held = ov.Tensor(numbers.reshape(entry["shape"]), ov.Shape(entry["shape"]), ov.Type.bf16)
        constant = Constant(held, shared_memory=False)
        return op.convert(constant, "f32")


def number(value: Any, dtype: str = "f32") -> Node:
    """A constant."""
    return op.constant(np.array(value, dtype={"f32": np.float32, "i64": np.int64, "i32": np.int32}[dtype]))


class Builder:
    """Builds the graph of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.heads, self.groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.dim = self.config["hidden_size"] // self.heads
        self.ids = op.parameter([-1, -1], np.int64, "input_ids")
        self.positions = op.parameter([-1, -1], np.int64, "position_ids")
        self.beams = op.parameter([-1], np.int32, "beam_idx")
        self.mask = op.parameter([1, 1, -1, -1], np.float32, "mask")
        self.sinks: list[Node] = []
        self.batch = op.gather(op.shape_of(self.ids), number([0], "i64"), number(0, "i64"))

    def linear(self, x: Node, name: str) -> Node:
        """x times a matrix of the checkpoint."""
        return op.matmul(x, self.checkpoint.weight(f"{name}.weight"), False, True)

    def norm(self, x: Node, name: str) -> Node:
        """RMS norm."""
        mean = op.reduce_mean(op.power(x, number(2.0)), number([-1], "i64"), True)
        inverse = op.divide(number(1.0), op.sqrt(op.add(mean, number(self.config["rms_norm_eps"]))))
        return op.multiply(self.checkpoint.weight(f"{name}.weight"), op.multiply(x, inverse))

    def angles(self) -> tuple[Node, Node]:
        """cos and sin [B, 1, T, D]."""
        steps = np.arange(0, self.dim, 2, dtype=np.float32) / self.dim
        inverse = (1.0 / self.config["rope_theta"] ** steps).reshape(1, -1, 1)
        turns = op.matmul(
            number(inverse), op.unsqueeze(op.convert(self.positions, "f32"), number(1, "i64")), False, False
        )
        turned = op.transpose(turns, number([0, 2, 1], "i64"))
        both = op.unsqueeze(op.concat([turned, turned], -1), number(1, "i64"))
        return op.cos(both), op.sin(both)

    def rotate(self, x: Node, cos: Node, sin: Node) -> Node:
        """Rotary embedding of x [B, H, T, D]."""
        half, one, axis = number([self.dim // 2], "i64"), number([1], "i64"), number([3], "i64")
        first = op.slice(x, number([0], "i64"), half, one, axis)
        second = op.slice(x, half, number([2**31], "i64"), one, axis)
        turned = op.concat([op.multiply(second, number(-1.0)), first], -1)
        return op.add(op.multiply(x, cos), op.multiply(turned, sin))

    def by_heads(self, x: Node, heads: int) -> Node:
        """[B, T, H D] -> [B, H, T, D]."""
        return op.transpose(op.reshape(x, number([0, 0, heads, self.dim], "i64"), True), number([0, 2, 1, 3], "i64"))

    def cached(self, new: Node, name: str) -> Node:
        """Keys or values [B, G, T, D] after those of the state, each for all its heads of queries."""
        shape = ov.PartialShape([-1, self.groups, -1, self.dim])
        info = util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = shape, ov.Type.f32, name
        variable = util.Variable(info)
        size = op.concat([self.batch, number([self.groups, 0, self.dim], "i64")], 0)
        empty = op.broadcast(number(0.0), size)
        past = op.gather(op.read_value(empty, variable), self.beams, number(0, "i64"))
        whole = op.concat([past, new], -2)
        self.sinks.append(op.assign(whole, variable))
        repeat = self.heads // self.groups
        if repeat == 1:
            return whole
        apart = op.unsqueeze(whole, number(2, "i64"))
        shape_now = op.shape_of(whole)
        front = op.gather(shape_now, number([0, 1], "i64"), number(0, "i64"))
        back = op.gather(shape_now, number([2, 3], "i64"), number(0, "i64"))
        many = op.broadcast(apart, op.concat([front, number([repeat], "i64"), back], 0), "BIDIRECTIONAL")
        return op.reshape(many, number([0, self.heads, -1, self.dim], "i64"), True)

    def layer(self, x: Node, index: int, cos: Node, sin: Node) -> Node:
        """One layer."""
        scope = f"model.layers.{index}."
        normed = self.norm(x, f"{scope}input_layernorm")
        q, k, v = (self.linear(normed, f"{scope}self_attn.{each}_proj") for each in "qkv")
        q = self.rotate(self.by_heads(q, self.heads), cos, sin)
        k = self.cached(self.rotate(self.by_heads(k, self.groups), cos, sin), f"k{index}")
        v = self.cached(self.by_heads(v, self.groups), f"v{index}")
        mixed = op.scaled_dot_product_attention(q, k, v, self.mask, causal=False)
        joined = op.transpose(mixed, number([0, 2, 1, 3], "i64"))
        flat = op.reshape(joined, number([0, 0, self.heads * self.dim], "i64"), True)
        x = op.add(x, self.linear(flat, f"{scope}self_attn.o_proj"))
        normed = self.norm(x, f"{scope}post_attention_layernorm")
        gate, up = (self.linear(normed, f"{scope}mlp.{each}_proj") for each in ("gate", "up"))
        return op.add(x, self.linear(op.multiply(op.swish(gate), up), f"{scope}mlp.down_proj"))

    def model(self) -> ov.Model:
        """The whole: logits of the last position of each sequence."""
        table = self.checkpoint.weight("model.embed_tokens.weight")
        x = op.gather(table, self.ids, number(0, "i64"))
        cos, sin = self.angles()
        for index in range(self.config["num_hidden_layers"]):
            x = self.layer(x, index, cos, sin)
        last = op.slice(x, number([-1], "i64"), number([2**31], "i64"), number([1], "i64"), number([1], "i64"))
        logits = op.matmul(self.norm(last, "model.norm"), table, False, True)
        return ov.Model([op.result(logits)], self.sinks, [self.ids, self.positions, self.beams, self.mask], "llama")


class Generator:
    """Greedy answers of one model."""

    def __init__(self, folder: str, threads: int) -> None:
        how = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "PERFORMANCE_HINT": "LATENCY",
        }
        model = Builder(Checkpoint(Path(folder))).model()
        self.request = ov.Core().compile_model(model, "CPU", how).create_infer_request()

    def step(self, ids: Any, first: int) -> Any:
        """ids [B, T] at positions from `first` on -> the likeliest next tokens [B]."""
        count, length = ids.shape
        rows, columns = np.arange(first, first + length)[:, None], np.arange(first + length)[None, :]
        mask = np.where(columns <= rows, 0.0, -65504.0).astype(np.float32)[None, None]
        positions = np.tile(rows.T, (count, 1)).astype(np.int64)
        self.request.infer({0: ids, 1: positions, 2: np.arange(count, dtype=np.int32), 3: mask})
        return np.argmax(self.request.get_output_tensor(0).data[:, -1], -1)

    def __call__(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Answers of `new` tokens each."""
        self.request.reset_state()
        ids = np.array(prompts, dtype=np.int64)
        made = [self.step(ids, 0)]
        for turn in range(1, new):
            made.append(self.step(made[-1][:, None], ids.shape[1] + turn - 1))
        found: list[list[int]] = np.stack(made, 1).tolist()
        return found


def load(model: str, threads: int, sequences: int, context: int) -> tuple[Generator, str]:
    """A checkpoint's folder, and the version of the package. States grow as they are needed."""
    return Generator(model, threads), str(ov.__version__).split("-")[0]
