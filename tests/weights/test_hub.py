"""Hub ids end to end, with a little hub: downloaded once with progress, then found without the hub; GGUF files by tag,
by name and by address; what there is not is refused with what there is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from quire.errors import InvalidModel, Unavailable
from quire.weights import hub as hub_module
from quire.weights.hub import choose, label_of, split_of, variants_of
from quire.weights.locate import locate
from quire.weights.names import ModelName, mapped_names, on_hub, parse_name
from tests.checkpoints import make
from tests.forked import forking
from tests.hub_server import LittleHub, environment, hub, use
from tests.tokenization.vocabulary import CHATML, byte_level, save

NAME, FILES = "owner/tiny", "owner/files-GGUF"


def quire(cache: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    with forking():
        return subprocess.run(
            [sys.executable, "-m", "quire", *words],
            env=environment(cache, **more),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    make(folder, "llama-gqa-tied")
    save(folder, byte_level(), tokenizer_config={"eos_token": "<|end|>", "chat_template": CHATML})
    (folder / "modeling.py").write_text("raise SystemExit('this must not run')")
    (folder / "pytorch_model.bin").write_bytes(b"this must not be read")
    return folder


def test_a_hub_id_is_downloaded_once_with_its_progress_shown(repository: Path, tmp_path: Path) -> None:
    with hub({NAME: repository}) as little:
        first = quire(tmp_path / "cache", "inspect", NAME, HF_ENDPOINT=little.address)
    assert first.returncode == 0, first.stderr
    assert "LlamaForCausalLM" in first.stdout
    assert "100%" in first.stderr, "a bar is drawn while it downloads"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(little.asked)
    assert not {"modeling.py", "pytorch_model.bin"} & set(little.asked)
    again = quire(tmp_path / "cache", "inspect", NAME, HF_ENDPOINT=little.address, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert "%" not in again.stderr, "nothing is downloaded again"
    missing = quire(tmp_path / "other", "inspect", NAME, HF_ENDPOINT=little.address, HF_HUB_OFFLINE="1")
    assert missing.returncode == 1
    said = f"Error: {NAME} is not in the local hub cache, and HF_HUB_OFFLINE is set: unset it"
    assert missing.stderr.startswith(said)
    assert str(tmp_path / "other") in missing.stderr
    assert (
        f"HF_HOME names another). Where there is a network, `hf download {NAME} --local-dir FOLDER`" in missing.stderr
    )


def test_a_repository_of_pytorch_files_alone_is_downloaded_and_read_as_tensors(
    repository: Path, tmp_path: Path
) -> None:
    torch.save(load_file(repository / "model.safetensors"), repository / "pytorch_model.bin")
    (repository / "model.safetensors").unlink()
    with hub({NAME: repository}) as little:
        shown = quire(tmp_path / "cache", "inspect", NAME, HF_ENDPOINT=little.address)
    assert shown.returncode == 0, shown.stderr
    assert "pytorch_model.bin" in little.asked and "modeling.py" not in little.asked
    assert "every tensor has its place" in shown.stdout


@pytest.mark.parametrize("words", [("inspect", NAME), ("pull", NAME), ("serve", f"{NAME}:Q4_K_M")])
def test_without_a_network_the_error_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    """Whichever HTTP client huggingface_hub uses: its versions below 2 have httpx, later ones httpx2."""
    done = quire(tmp_path, *words, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"Error: {NAME} is not in the local hub cache, and the hub ")
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- which of a repository's GGUF files


HELD = (
    "README.md",
    "config.json",
    "tiny-Q4_K_M.gguf",
    "tiny-Q8_0.gguf",
    "tiny-f16.gguf",
    "UD-Q2_K_XL/tiny-UD-Q2_K_XL.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
    "a-IQ4_XS.gguf",
    "b-IQ4_XS.gguf",
    "big-Q6_K-00001-of-00003.gguf",
    "big-Q6_K-00003-of-00003.gguf",
    "mmproj-tiny-Q8_0.gguf",
    "tiny.imatrix.gguf",
)


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LittleHub]:
    """A hub with GGUF files; it is this process's hub, with a cache and no store of Ollama's."""
    folder = tmp_path / "files"
    for name in HELD:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF " + name.encode())
    with hub({FILES: folder, "owner/one": folder.parent / "one"}) as running:
        use(running, tmp_path, monkeypatch)
        yield running


MEANT = {
    FILES: "tiny-Q4_K_M.gguf",
    f"{FILES}:latest": "tiny-Q4_K_M.gguf",
    f"{FILES}:q8_0": "tiny-Q8_0.gguf",
    f"{FILES}:FP16": "tiny-f16.gguf",
    f"{FILES}:Q2_K_XL": "UD-Q2_K_XL/tiny-UD-Q2_K_XL.gguf",
    f"{FILES}:BF16": "BF16/tiny-BF16-00001-of-00002.gguf",
    f"{FILES}/a-IQ4_XS.gguf": "a-IQ4_XS.gguf",
    f"{FILES}/BF16/tiny-BF16-00002-of-00002.gguf": "BF16/tiny-BF16-00001-of-00002.gguf",
    f"hf.co/{FILES}": "tiny-Q4_K_M.gguf",
    f"hf.co/{FILES}:Q8_0": "tiny-Q8_0.gguf",
    f"https://huggingface.co/{FILES}": "tiny-Q4_K_M.gguf",
    f"https://huggingface.co/{FILES}/tree/main": "tiny-Q4_K_M.gguf",
    f"https://huggingface.co/{FILES}/blob/main/tiny-Q8_0.gguf": "tiny-Q8_0.gguf",
    f"https://huggingface.co/{FILES}/resolve/main/tiny-Q8_0.gguf?download=true": "tiny-Q8_0.gguf",
    f"https://huggingface.co/{FILES}?show_file_info=tiny-f16.gguf": "tiny-f16.gguf",
}


@pytest.mark.parametrize("model", MEANT)
def test_a_name_means_one_gguf_file_which_alone_is_downloaded(
    little: LittleHub, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = MEANT[model]
    found = locate(model)
    assert found.as_posix().endswith(f"/snapshots/{little.commit}/{wanted}")
    assert found.read_bytes() == b"GGUF " + wanted.encode()
    fetched = {name for name in little.asked if name.endswith(".gguf")}
    assert fetched == {name for name in HELD if split_of(name)[0] == split_of(wanted)[0] and name.endswith(".gguf")}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate(model) == found, "it is found without the hub"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            f"{FILES}:Q5_K_M",
            r"no GGUF file of type Q5_K_M: name one as owner/files-GGUF:TYPE, of BF16, F16, IQ4_XS, Q4_K",
        ),
        (
            f"{FILES}:IQ4_XS",
            r"2 models of type IQ4_XS: name one of owner/files-GGUF/a-IQ4_XS.gguf, owner/files-GGUF/b-IQ",
        ),
        (f"{FILES}:Q6_K", r"2 of 3 parts of big-Q6_K-00001-of-00003.gguf"),
        (f"{FILES}/none.gguf", r"has no file none.gguf: there are BF16/"),
        ("owner/nothing:Q8_0", r"the hub has no model 'owner/nothing', or it is private"),
        ("owner/one:Q8_0", r"owner/one has no GGUF files, and so no Q8_0: leave the tag out"),
    ],
)
def test_what_a_repository_lacks_is_refused_with_what_it_has(little: LittleHub, model: str, said: str) -> None:
    (little.repositories["owner/one"]).mkdir()
    ((little.repositories["owner/one"]) / "config.json").write_text("{}")
    with pytest.raises(InvalidModel, match=said):
        locate(model)


def test_gated_offline_revisions_and_full_disks_are_told(little: LittleHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidModel, match=r"has no such branch, tag or commit"):
        locate(f"https://huggingface.co/{FILES}/tree/elsewhere")
    little.gated.add("owner/closed")
    with pytest.raises(InvalidModel, match=r"owner/closed is gated: accept its terms .* \(`hf auth login`\)"):
        locate("owner/closed:Q4_K_M")
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3}))
    with pytest.raises(
        Unavailable, match=r"no room for owner/files-GGUF: 19 bytes to download, and 3 bytes free in .*quire rm"
    ):
        locate(f"{FILES}:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match=r"owner/files-GGUF is not in the local hub cache"):
        locate(f"{FILES}:Q8_0")


def test_offline_what_the_cache_lacks_of_a_repository_is_told(
    little: LittleHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    locate(f"{FILES}:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match=r"no GGUF file of type Q4_K_M: .* of Q8_0 \(of what is in the cache"):
        locate(f"{FILES}:Q4_K_M")
    assert locate(FILES).name == "tiny-Q8_0.gguf", "without a tag, the one that is there"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen3-0.6B-Q8_0", "Q8_0"),
        ("gemma-3-4b-it-q4_0", "Q4_0"),
        ("mistral-7b.Q5_K_S", "Q5_K_S"),
        ("model-UD-IQ2_XXS", "UD-IQ2_XXS"),
        ("qwen2.5-0.5b-instruct-fp16", "F16"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("Q4_K_M", "Q4_K_M"),
        ("x-Q4_K_M-imat", "Q4_K_M"),
        ("ggml-model", ""),
    ],
)
def test_the_type_is_what_a_files_name_says(name: str, label: str) -> None:
    assert label_of(name) == label


def test_projectors_and_importance_matrices_are_no_models() -> None:
    assert [each.label for each in variants_of(HELD)].count("Q8_0") == 1
    assert not any("imatrix" in file for each in variants_of(HELD) for file in each.files)


def test_one_file_without_a_type_is_the_model() -> None:
    assert choose(ModelName("hub", "owner/name"), ["README.md", "ggml-model.gguf"]).files == ("ggml-model.gguf",)
    with pytest.raises(InvalidModel, match=r"has 2 models: name one of owner/name/a.gguf, owner/name/b.gguf"):
        choose(ModelName("hub", "owner/name"), ["a.gguf", "b.gguf"])


# ---------------------------------------------------------------- names of Ollama's library


@pytest.mark.parametrize(
    ("name", "repository", "tag"),
    [
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF", ""),
        ("qwen3", "Qwen/Qwen3-8B-GGUF", ""),
        ("qwen2.5:7b-instruct-q4_K_M", "Qwen/Qwen2.5-7B-Instruct-GGUF", "Q4_K_M"),
        ("gemma3:1b-it-q8_0", "ggml-org/gemma-3-1b-it-GGUF", "Q8_0"),
        ("ollama.com/library/gpt-oss:latest", "ggml-org/gpt-oss-20b-GGUF", ""),
    ],
)
def test_a_name_of_ollamas_library_is_a_repository_by_rule(name: str, repository: str, tag: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert on_hub(parsed) == ModelName("hub", repository, tag)


@pytest.mark.parametrize("name", ["llama3.2", "qwen3:30b", "gemma3:4b-it-qat", "me/mine"])
def test_other_names_have_no_rule(name: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert on_hub(parsed) is None


def test_every_rule_names_a_repository_with_a_size() -> None:
    assert all("{size}" in repository and repository.count("/") == 1 for repository in mapped_names().values())


@pytest.mark.parametrize(
    "address",
    ["https://huggingface.co/datasets/owner/name", "https://huggingface.co/owner", "https://ollama.com/a/b/c/d"],
)
def test_addresses_of_other_things_are_refused(address: str) -> None:
    with pytest.raises(InvalidModel, match="is no address of a model: those are https://"):
        locate(address)
