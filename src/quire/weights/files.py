"""A checkpoint on disk: a folder of safetensors, PyTorch or TensorFlow files, single or sharded, or a GGUF file.

Only headers are read at first. Tensors of safetensors and GGUF are read from the file into their final memory; the file
is not mapped.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.checks import instead
from quire.errors import InvalidModel
from quire.weights.entries import TensorEntry, file_entry
from quire.weights.gguf import find_gguf, read_gguf
from quire.weights.gguf_model import gguf_config, gguf_entries
from quire.weights.tensor_bundle import find_bundle, read_bundle

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

ZIP = b"PK\x03\x04"

LARGEST_HEADER = 100 << 20
"""Bytes: the format's own limit."""

ONNX_FORMAT = 1
"""The version of the folders of `quire export-onnx`: `quire_onnx_format` in their config.json."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Checkpoint:
    """The tensors of a model folder or file by name, from headers. Raises InvalidModel, in one line, for damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir() and find_gguf(folder) is None:
            raise InvalidModel(f"{folder} is not a model folder")
        self.entries: Mapping[str, TensorEntry] = transformers_names(self._entries())

    def _entries(self) -> Mapping[str, TensorEntry]:
        if (gguf := find_gguf(self.folder)) is not None:
            return gguf_entries(read_gguf(gguf))
        for single, index, read in ((SINGLE, INDEX, read_header), (PICKLE, PICKLE_INDEX, read_pickle)):
            if (self.folder / index).is_file():
                return self._sharded(index, read)
            if (self.folder / single).is_file():
                return read(self.folder / single)
        if (bundle := find_bundle(self.folder)) is not None:
            return read_bundle(bundle)
        found = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        only = f" (it has {', '.join(found[:3])})" if found else ""
        raise InvalidModel(f"{self.folder.name} has neither {SINGLE} nor {INDEX}{only}")

    def _sharded(self, index: str, read: Callable[[Path], dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
        weights = read_json(self.folder / index).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(f, str) for f in weights.values()):
            raise InvalidModel(f"{index} has no weight_map of tensor names to files")
        shards: dict[str, dict[str, TensorEntry]] = {}
        for file in sorted(set(weights.values())):
            path = self.folder / file
            if Path(file).name != file:
                raise InvalidModel(f"{index} names {file!r}, which is outside the model folder")
            if not path.is_file():
                raise InvalidModel(f"{index} names {file}, which is not in the folder: download it again")
            shards[file] = read(path)
        absent = sorted(name for name, file in weights.items() if name not in shards[file])
        if absent:
            raise InvalidModel(f"{index} places {listed(absent)} in {weights[absent[0]]}, which does not hold it")
        return {name: entry for shard in shards.values() for name, entry in shard.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Fields of config.json, or of what a GGUF file or OpenAI's GPT-2 has instead. Raises InvalidModel."""
    if (gguf := find_gguf(folder)) is not None:
        return gguf_config(read_gguf(gguf))
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise InvalidModel(
                f"{folder.name} is a LoRA adapter: adapters are not applied at run time; merge it into its model first"
            )
        if (folder / "hparams.json").is_file():
            return openai_config(read_json(folder / "hparams.json"))
    return read_json(folder / "config.json")


def openai_config(hparams: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's hparams.json with config.json's names."""
    named = {"n_vocab": "vocab_size", "n_ctx": "n_positions"}
    return {"model_type": "gpt2", **{named.get(name, name): value for name, value in hparams.items()}}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises InvalidModel."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidModel(f"{path.parent} has no {path.name}: is it a model folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise InvalidModel(f"{path.name} must hold a JSON object, not {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file: 8 bytes of header length, the header as JSON, the data.

    Raises InvalidModel for a file that is cut short or whose header contradicts it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > LARGEST_HEADER:
            raise InvalidModel(instead(path, "a safetensors file"))
        if 8 + length > size:
            raise InvalidModel(f"{path.name} ends within its header: it is truncated, download it again")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise InvalidModel(f"{path.name} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise InvalidModel(f"{path.name} is not a safetensors file: its header is not an object")
    return {
        name: entry(path, name, facts, 8 + length, size) for name, facts in header.items() if name != "__metadata__"
    }


def entry(path: Path, name: str, facts: Any, data: int, size: int) -> TensorEntry:
    """A tensor of a safetensors header. data: where tensors begin. Raises InvalidModel where the header is wrong."""
    try:
        kind, shape, (start, stop) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        sound, kind, shape, start, stop = False, "", (), 0, 0
    if not sound:
        raise InvalidModel(f"{path.name}: the header's entry for {name} is malformed")
    if kind not in DTYPES:
        raise InvalidModel(
            f"{path.name}: {name} has dtype {kind!r}, which is not supported (known: {', '.join(DTYPES)})"
        )
    dtype = DTYPES[kind]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise InvalidModel(f"{path.name}: {name} has {stop - start} bytes, which is not {kind} of shape {list(shape)}")
    if data + stop > size:
        raise InvalidModel(
            f"{path.name} is truncated: {name} ends at byte {data + stop:,} of {size:,}; download it again"
        )
    return file_entry(path, data + start, dtype, shape, kind)


def listed(names: Sequence[str], most: int = 3) -> str:
    """'a, b, c and 5 more'."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def read_pickle(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a PyTorch file. Raises InvalidModel where it is broken or holds anything but tensors.

    It is read as data only: code in it is never run.
    """
    try:
        with path.open("rb") as file:
            # Older files are one stream, which cannot be mapped.
            mapped = file.read(4) == ZIP
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        if ":" in (why := instead(path, "a PyTorch file")):
            raise InvalidModel(why) from None
        raise InvalidModel(
            f"{path.name} holds more than tensors, code perhaps, which is never run: ask for safetensors, or save the "
            "state_dict alone"
        ) from None
    except (RuntimeError, ValueError, OSError, EOFError, KeyError) as error:
        if ":" in (why := instead(path, "a PyTorch file")):
            raise InvalidModel(why) from None
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InvalidModel(f"{path.name} cannot be read, truncated perhaps: {reason}") from None
    if isinstance(held, dict) and set(held) == {"state_dict"}:
        held = held["state_dict"]
    if not isinstance(held, dict) or not all(isinstance(each, Tensor) for each in held.values()):
        raise InvalidModel(f"{path.name} is not a dictionary of tensors")
    return {str(name): mapped_entry(path.name, i, tensor) for i, (name, tensor) in enumerate(held.items())}


def mapped_entry(file: str, number: int, tensor: Tensor) -> TensorEntry:
    """A tensor of a memory-mapped file: it takes memory when it is copied."""
    kind = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return TensorEntry(
        tensor.dtype, shape, (file, number), kind, tensor.nbytes, lambda cut: tensor[cut] if cut else tensor
    )


# ---------------------------------------------------------------- names

OPENAI = re.compile(r"(?:model/)?(?:h(\d+)/(?:(attn|mlp)/)?(\w+)|(ln_f))/(w|b|g)|(?:model/)?(wte|wpe)")
"""GPT-2's variables as its authors named them: 'model/h0/attn/c_attn/w'."""

SUFFIX: Mapping[str, str] = {"w": "weight", "b": "bias", "g": "weight"}


def transformers_names(entries: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """The tensors under transformers' names. Raises InvalidModel for LoRA adapters."""
    adapters = sorted(name for name in entries if ".lora_" in name or name.startswith("base_model.model."))
    if adapters:
        raise InvalidModel(
            f"this is a LoRA adapter, or a model with one inside ({adapters[0]}): adapters are not applied at run "
            "time; merge it into its model first"
        )
    if not any("/" in name for name in entries):
        return entries
    return {
        openai_name(name): entry.part() if is_convolution(name, entry) else entry for name, entry in entries.items()
    }


def openai_name(name: str) -> str:
    """'model/h0/attn/c_attn/w' -> 'transformer.h.0.attn.c_attn.weight'; any other name is itself."""
    found = OPENAI.fullmatch(name)
    if not found:
        return name
    layer, half, part, last, kind, table = found.groups()
    if table:
        return f"transformer.{table}.weight"
    if last:
        return f"transformer.{last}.{SUFFIX[kind]}"
    return ".".join(("transformer.h", layer, *([half] if half else []), part, SUFFIX[kind]))


def is_convolution(name: str, entry: TensorEntry) -> bool:
    """Whether this is a matrix [1, in, out] of a convolution; its layer's matrix is [in, out]."""
    return name.endswith("/w") and len(entry.shape) == 3 and entry.shape[0] == 1
