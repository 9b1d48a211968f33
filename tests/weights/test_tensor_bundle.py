"""TensorFlow's checkpoints: GPT-2's own files are the same model, and damage is named and never followed."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.errors import InvalidModel
from quire.weights.files import SINGLE, Checkpoint
from quire.weights.load import load_model
from quire.weights.tensor_bundle import DTYPES, LARGEST_INDEX, _checksum, find_bundle, read_bundle
from tests.checkpoints import make
from tests.weights.test_files import as_openai
from tests.weights.test_load import answer, refused

KINDS = {dtype: number for number, dtype in DTYPES.items()}


def varint(number: int) -> bytes:
    """As protobuf and LevelDB write numbers: 7 bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def piece(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def block(entries: Mapping[bytes, bytes], trailer: Callable[[bytes], bytes] | None = None) -> bytes:
    """A block of a table: keys without the beginning that they share, where to restart, compression, checksum."""
    out, last = b"", b""
    for key, value in entries.items():
        shared = next((i for i, (a, b) in enumerate(zip(key, last, strict=False)) if a != b), min(len(key), len(last)))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    out += struct.pack("<II", 0, 1)
    return out + (trailer(out) if trailer else b"\0" + struct.pack("<I", _checksum(out + b"\0")))


def table(entries: Mapping[bytes, bytes], most: int = 16) -> bytes:
    """A whole index, with `most` entries in each block."""
    keys, out, index = sorted(entries), b"", {}
    for begin in range(0, len(keys), most):
        made = block({key: entries[key] for key in keys[begin : begin + most]})
        index[keys[min(begin + most, len(keys)) - 1]] = varint(len(out)) + varint(len(made) - 5)
        out += made
    handles = b""
    for made in (block({}), block(index)):
        handles += varint(len(out)) + varint(len(made) - 5)
        out += made
    return out + handles.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def described(tensor: torch.Tensor, shard: int, start: int, **more: int) -> bytes:
    """A BundleEntryProto."""
    facts = {"kind": KINDS[tensor.dtype], "size": tensor.nbytes} | more
    shape = b"".join(piece(2, number(1, size)) for size in tensor.shape)
    return (
        number(1, facts["kind"])
        + piece(2, shape)
        + number(3, shard)
        + number(4, start)
        + number(5, facts["size"])
        + varint(6 << 3 | 5)
        + struct.pack("<I", 0)
    )


def write(folder: Path, tensors: Mapping[str, torch.Tensor], name: str = "model.ckpt", shards: int = 1) -> Path:
    """Write a checkpoint; returns its index."""
    data = [b""] * shards
    entries = {b"": number(1, shards) + piece(3, number(1, 1))}
    for i, (key, tensor) in enumerate(sorted(tensors.items())):
        shard = i % shards
        entries[key.encode()] = described(tensor, shard, len(data[shard]))
        data[shard] += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    for shard, held in enumerate(data):
        (folder / f"{name}.data-{shard:05d}-of-{shards:05d}").write_bytes(held)
    path = folder / f"{name}.index"
    path.write_bytes(table(entries))
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 as its authors released theirs, `before.pt` being what it answers."""
    folder = tmp_path_factory.mktemp("gpt2")
    make(folder, "gpt2-odd-heads")
    torch.save(answer(load_model(folder)), folder / "before.pt")
    as_openai(folder)
    write(folder, load_file(folder / SINGLE))
    (folder / SINGLE).unlink()
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\n')
    return folder


def test_gpt2_as_it_was_released_is_the_same_model(gpt2: Path) -> None:
    assert sorted(path.suffix for path in gpt2.glob("model.ckpt.*")) == [".data-00000-of-00001", ".index"]
    assert torch.equal(answer(load_model(gpt2)), torch.load(gpt2 / "before.pt"))


def test_of_a_damaged_checkpoint_the_file_is_named(gpt2: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(gpt2, tmp_path / "m")
    data = folder / "model.ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    assert refused(folder).startswith("model.ckpt.data-00000-of-00001 is truncated: model/wte ends at byte ")
    data.rename(folder / "model.ckpt.data-00000-of-00002")
    assert (
        refused(folder)
        == "model.ckpt.index names model.ckpt.data-00000-of-00001, which is not in the folder: download it again"
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_every_type_and_shape_is_read_as_it_was_written(tmp_path: Path, shards: int) -> None:
    made = torch.Generator().manual_seed(1)
    shapes = ((), (5,), (0, 3), (4, 2, 3), (300,))
    tensors = {
        f"{dtype}/{len(shape)}/{shape}": (torch.rand(shape, generator=made) * 9).to(dtype)
        for dtype in KINDS
        for shape in shapes
    }
    entries = read_bundle(write(tmp_path, tensors, shards=shards))
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert entries[name].dtype == tensor.dtype and entries[name].shape == tensor.shape
        assert torch.equal(entries[name].read(()), tensor)


def test_a_table_with_every_byte_changed_is_refused_or_read_and_never_followed_elsewhere(tmp_path: Path) -> None:
    """One byte at a time, and the same with checksums made right, so that what is behind them is checked, too."""
    index = write(tmp_path, {"a/w": torch.ones(2, 3), "a/x": torch.ones(3), "b": torch.zeros(4, dtype=torch.int64)})
    sound, rng = index.read_bytes(), random.Random(1)
    refusals = set()
    for at in range(len(sound)):
        for repaired in (False, True):
            broken = bytearray(sound)
            broken[at] ^= rng.randrange(1, 256)
            if repaired:
                repair(broken, sound)
            index.write_bytes(broken)
            refusals.add(said(index))
    assert all(not each or each.startswith(("model.ckpt.index", "model.ckpt.data-")) for each in refusals)
    for cut in range(len(sound)):
        index.write_bytes(sound[:cut])
        with pytest.raises(InvalidModel, match="its end is not that of an index"):
            read_bundle(index)
    damage = {each.split("(")[1].split(")")[0] for each in refusals if "is damaged (" in each}
    assert {"the checksum of a block is wrong", "an entry ends behind its block", "a block has no end"} <= damage


def said(index: Path) -> str:
    """Why an index is refused; empty if every tensor in it can be read."""
    try:
        entries = read_bundle(index)
    except InvalidModel as error:
        return str(error)
    return "" if all(entry.read(()).shape == entry.shape for entry in entries.values()) else "a wrong shape"


def repair(broken: bytearray, sound: bytes) -> None:
    """Give each block of `sound`, where it lies, the checksum of what is there now."""
    begin = 0
    for end in range(5, len(sound) - 47):
        if _checksum(sound[begin : end - 4]) == struct.unpack("<I", sound[end - 4 : end])[0]:
            broken[end - 4 : end] = struct.pack("<I", _checksum(bytes(broken[begin : end - 4])))
            begin = end


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (described(torch.ones(2), 0, 0, size=9), "b has 9 bytes, which is not torch.float32 of shape [2]"),
        (described(torch.ones(2), 0, 0, kind=20), "b has TensorFlow's type 20, which is not supported"),
        (
            described(torch.ones(2), 0, 0) + piece(7, b""),
            "b is stored in slices, which is not supported: save it whole",
        ),
        (described(torch.ones(2), 1, 0), "names model.ckpt.data-00001-of-00001, which is not in the folder"),
        (described(torch.ones(2), 0, 1 << 40), "is truncated: b ends at byte 1,099,511,627,784"),
        (described(torch.ones(2), 0, (1 << 64) - 8), "is damaged (field 4 is no size)"),
        (number(1, 1) + number(2, 5), "is damaged (field 2 is no message)"),
        (piece(1, b"x"), "is damaged (field 1 is no size)"),
        (b"\x0b", "is damaged (a field of kind 3)"),
        (b"\x80" * 11, "is damaged (a number has more than 64 bits)"),
        (b"\x12\x7f", "is damaged (a field ends behind its message)"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_with_its_name(tmp_path: Path, entry: bytes, why: str) -> None:
    index = write(tmp_path, {"a": torch.ones(2)})
    index.write_bytes(table({b"": number(1, 1), b"b": entry}))
    with pytest.raises(InvalidModel) as refusal:
        read_bundle(index)
    assert why in str(refusal.value)


def test_what_is_no_number_is_left_out_and_a_foreign_table_refused(tmp_path: Path) -> None:
    index = write(tmp_path, {"a": torch.ones(2)})
    text = number(1, 7) + piece(2, b"") + number(5, 3)
    index.write_bytes(table({b"": number(1, 1), b"_CHECKPOINTABLE_OBJECT_GRAPH": text}))
    assert read_bundle(index) == {}
    index.write_bytes(table({b"": number(1, 1) + number(2, 1)}))
    with pytest.raises(InvalidModel, match="is big endian"):
        read_bundle(index)
    made = block({b"a": b"b"}, lambda held: b"\1" + struct.pack("<I", _checksum(held + b"\1")))
    index.write_bytes(
        made + (b"\0\0\0" + varint(len(made) - 5)).ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    )
    with pytest.raises(InvalidModel, match="compressed"):
        read_bundle(index)
    with index.open("wb") as file:
        file.truncate(LARGEST_INDEX + 1)
    with pytest.raises(InvalidModel, match="has more than 16 MiB"):
        read_bundle(index)


def test_of_several_checkpoints_the_one_that_was_saved_last_is_read(tmp_path: Path) -> None:
    (tmp_path / "lonely.index").touch()
    assert find_bundle(tmp_path) is None
    for step in (900, 1000):
        write(tmp_path, {"a": torch.full((2,), float(step))}, f"model-{step}")
    with pytest.raises(InvalidModel, match=r"several checkpoints \(model-1000, model-900\)"):
        Checkpoint(tmp_path)
    for said in ("model-900", "/content/run1/model-900", "C:\\\\run\\\\model-900"):
        (tmp_path / "checkpoint").write_text(
            f'model_checkpoint_path: "{said}"\nall_model_checkpoint_paths: "model-1000"\n'
        )
        assert Checkpoint(tmp_path).entries["a"].read(()).tolist() == [900, 900]
    (tmp_path / "checkpoint").write_text(json.dumps("nonsense"))
    with pytest.raises(InvalidModel, match="no file `checkpoint` that names one"):
        Checkpoint(tmp_path)
