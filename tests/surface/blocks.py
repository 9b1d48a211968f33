"""Every block of code of the README, of CONTRIBUTING and of docs/: as printed, but for addresses and lengths."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from quire.frontend.supervisor import free_port
from tests.live import ROOT, Live, environment, serving
from tests.surface.commands import alone, ready, serve
from tests.surface.deployment import Deployment
from tests.surface.items import Item, Named

PAGES = (
    *sorted(ROOT.glob("*.md")),
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if "benchmarks" not in page.parts),
)
MOST = 6
"""Tokens an answer has at most, of those that say a number: interpreted kernels are slow."""


class Block(NamedTuple):
    """name: its page, and the comment above it or how its first line begins."""

    name: str
    text: str

    def words(self, command: str) -> Iterator[list[str]]:
        """What follows `quire COMMAND` in each line that is one, with the embedded model for others."""
        for line in self.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["quire", command]:
                yield [re.sub(r"^(MODEL|\w+/[\w.-]+)$", "embedded", word) for word in words[2:]]


def blocks() -> Iterator[Block]:
    for page in PAGES:
        found = re.findall(
            r"^(?:<!-- (\w+) -->\n)?```\w+\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
        for comment, text in found:
            yield Block(f"{page.relative_to(ROOT)}: {comment or text.splitlines()[0].split('#')[0][:60].strip()}", text)


FOUND = {block.name: block for block in blocks()}


def short(code: str) -> str:
    return re.sub(r'(max_(?:output_)?tokens"?[:=] ?)(\d+)', lambda m: f"{m[1]}{min(int(m[2]), MOST)}", code)


def python(name: str, after: str = "", common: Callable[[str], Any] = str) -> Item:
    """Run in this process. after: what is run behind it. common: what of its output all settings have in common."""

    def run(deployment: Deployment) -> Any:
        deployment.rest()
        with deployment.assumed(), contextlib.redirect_stdout(io.StringIO()) as said:
            scope: dict[str, Any] = {}
            exec(compile(short(FOUND[name].text) + after, name, "exec"), scope)
            if "llm" in scope:
                scope["llm"].close()
        return common(said.getvalue())

    return Item(name, run)


def client(name: str, needs: tuple[str, ...] = (), ci: tuple[str, ...] = ("grpc",)) -> Item:
    """Run in a process of its own against a server."""

    def run(deployment: Deployment) -> Any:
        code = short(FOUND[name].text)
        code = code.replace("http://127.0.0.1:8000", deployment.server.url)
        shell = ["bash", "-euc"] if code.startswith("curl") else [sys.executable, "-c"]
        done = subprocess.run(
            [*shell, code], capture_output=True, text=True, env=environment(), cwd=deployment.folder, check=False
        )
        assert done.returncode == 0, done.stderr + deployment.server.log
        return answer(done.stdout)

    return Item(name, run, part="server", ci=ci, needs=needs)


def answer(said: str) -> Any:
    """Of a response its choices; of other words all."""
    try:
        body = json.loads(said)
    except ValueError:
        return said
    assert "choices" in body, body
    return body["choices"]


def settings(name: str) -> Item:
    """A file of settings."""

    def run(deployment: Deployment) -> Any:
        file = deployment.folder / "settings.yaml"
        ours = deployment.environ()
        given = yaml.safe_load(FOUND[name].text)
        assert len(given) > 2
        theirs = {key: value for key, value in given.items() if f"QUIRE_{key.upper().replace('-', '_')}" not in ours}
        file.write_text(yaml.safe_dump(theirs | {"model": "embedded"}))
        few = ("--max-tokens", 6, "--temperature", 0)
        return deployment.quire("generate", "The little dog", "--config", file, *few)

    return Item(name, run, executors=("local", "ahead"))  # sizes are options of the process that runs the steps


@contextlib.contextmanager
def started(deployment: Deployment, *words: str, environ: Mapping[str, str] = MappingProxyType({})) -> Iterator[Live]:
    """`quire serve WORDS` under the deployment's setting, as far as the words leave it open."""
    deployment.rest()
    folder = deployment.folder / f"served-{free_port()}"
    folder.mkdir()
    ours = {name: value for name, value in deployment.environ().items() if flag(name) not in words}
    with serving(folder, *words, module=deployment.module, environ=ours | dict(environ)) as live:
        yield live


def flag(variable: str) -> str:
    return "--" + variable.removeprefix("QUIRE_").lower().replace("_", "-")


def asked(live: Live) -> Any:
    ask = {"prompt": ["Once upon a time", "The little dog"], "max_tokens": 6, "temperature": 0}
    response = live.http.post("/v1/completions", json=ask)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def served(name: str, **more: Any) -> Item:
    """Each server that is shown answers."""

    def run(deployment: Deployment) -> Any:
        answers = []
        for words in FOUND[name].words("serve"):
            with started(deployment, *words) as live:
                answers.append(asked(live))
        assert answers
        return answers

    return Item(name, run, ci=(), **more)


def deterministic(deployment: Deployment) -> Any:
    [words] = FOUND[DETERMINISTIC].words("serve")
    with started(deployment, *words) as live:
        answers = asked(live)
    [words] = FOUND[DETERMINISTIC].words("verify")
    deployment.quire("verify", *words, "--requests", 2, "--new", 3, "--repeat", 0)
    return answers


def onnx(deployment: Deployment) -> Any:
    """Exported, and served from there."""
    deployment.rest()
    [(model, _)], [words] = FOUND[ONNX].words("export-onnx"), FOUND[ONNX].words("serve")
    graphs = deployment.folder / f"graphs-{free_port()}"
    alone("export-onnx", model, graphs)
    folder = deployment.folder / f"served-{free_port()}"
    folder.mkdir()
    with serving(folder, str(graphs), *words[1:]) as live:
        return asked(live)


def hf(deployment: Deployment) -> Any:
    deployment.rest()
    [words] = FOUND[HF].words("serve")
    folder = deployment.folder / f"served-{free_port()}"
    folder.mkdir()
    with serving(folder, *words, "--dtype", "float32") as live:
        return asked(live)


def elsewhere(deployment: Deployment) -> Any:
    """`quire executor`, and a server whose steps it runs, as the page has them one after the other."""
    [words] = FOUND[EXECUTOR].words("executor")
    with deployment.process("executor", *(word.replace("50051", "0") for word in words)) as process:
        port = ready(process)
        [words] = FOUND[CLIENT].words("serve")
        folder = deployment.folder / f"served-{free_port()}"
        folder.mkdir()
        few = {"QUIRE_MAX_NUM_SEQS": "8", "QUIRE_MAX_NUM_BATCHED_TOKENS": "64"}
        with serving(folder, *(word.replace("50051", port) for word in words), environ=few) as live:
            return asked(live)


def recording(deployment: Deployment) -> Any:
    """Of a server that ran ahead, or did not: every decision is made again."""
    [words], where = FOUND[RECORDING].words("serve"), deployment.folder / f"recordings-{free_port()}"
    with started(deployment, words[0], str(where)) as live:
        answers = asked(live)
    assert "every decision is the same" in alone("replay", where)
    return answers


def looked_at(deployment: Deployment) -> Any:
    [(first,)], [(second,)] = FOUND[LOOK].words("inspect"), FOUND[LOOK].words("plan")
    assert "weights" in deployment.quire("plan", second, codes=(0, 1))
    return deployment.quire("inspect", first)


def planned(deployment: Deployment) -> Any:
    [words] = FOUND[f"{MANY}: quire plan Qwen/Qwen3-32B --device cuda --memory 80GiB --ten"].words("plan")
    said = deployment.quire("plan", *words)
    assert "GPUs" in said and "ranks" in said
    return said


def speculative(deployment: Deployment) -> Any:
    """The one line of docs/guides/speculative-decoding.md, and an answer."""
    deployment.rest()
    code = "from quire import LLM, SamplingParams\n" + FOUND[SPECULATIVE].text
    more = "print(llm.generate('Once upon a time', SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)"
    scope: dict[str, Any] = {}
    with deployment.assumed(), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(code + more, SPECULATIVE, "exec"), scope)
        scope["llm"].close()
    return said.getvalue()


def batch(deployment: Deployment) -> Any:
    """docs/guides/batches.md's, waited for, and what came out."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": "embedded", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}  # type: ignore[assignment]
    (deployment.folder / "requests.jsonl").write_text(json.dumps(line) + "\n")
    server = deployment.server
    scope: dict[str, Any] = {"client": server.openai}
    with contextlib.chdir(deployment.folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the page leaves its file to the end of the process
        exec(compile(FOUND[BATCH].text, BATCH, "exec"), scope)
    while (found := server.openai.batches.retrieve(scope["batch"].id)).status in (
        "validating",
        "in_progress",
        "finalizing",
    ):
        assert server.process.poll() is None, server.log
    assert found.status == "completed" and found.output_file_id is not None, found
    [row] = [json.loads(each) for each in server.openai.files.content(found.output_file_id).text.splitlines()]
    return row["response"]["body"]["choices"]


def connected(name: str) -> Item:
    """Run in this process, with `client` an OpenAI client of the server."""

    def run(deployment: Deployment) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(FOUND[name].text, name, "exec"), {"client": deployment.server.openai})
        assert said.getvalue()
        return said.getvalue()

    return Item(name, run, part="server", ci=("grpc",), needs=("openai",))


TOOLS = "docs/guides/tool-calling.md: weather = {"
EMBEDDINGS = 'docs/guides/embeddings.md: answer = client.embeddings.create(model="embedded", input=["'
CONTINUED = 'docs/guides/responses.md: ask = {"model": "embedded", "temperature": 0, "max_output_to'
BACKGROUND = "docs/guides/responses.md: job = client.responses.create("
BATCH = "docs/guides/batches.md: from pathlib import Path"
SPECULATIVE = 'docs/guides/speculative-decoding.md: llm = LLM(speculative_config={"method": "ngram", "num_specul'
DRAFT = 'docs/guides/speculative-decoding.md: quire serve --speculative-config \'{"method": "draft_model"}\''
DETERMINISTIC = "docs/guides/deterministic.md: quire serve --deterministic"
ONNX = "docs/guides/executors.md: quire export-onnx embedded my-graphs"
HF = "docs/guides/executors.md: quire serve EleutherAI/pythia-70m --executor hf"
EXECUTOR = "docs/guides/executors.md: quire executor MODEL --listen 127.0.0.1:50051"
CLIENT = "docs/guides/executors.md: quire serve MODEL --executor grpc --executor-address 127.0.0"
RECORDING = "docs/guides/recording.md: quire serve --recording-dir /var/lib/quire/recordings"
HEADER = "docs/guides/prefix-caching.md: quire serve --prompt-header 'x-anthropic-billing-header: .*'"
MANY = "docs/guides/many-gpus.md"
RANKS = f"{MANY}: quire serve MODEL --tensor-parallel-size 2"
LOOK = "docs/guides/models.md: quire inspect Qwen/Qwen3-0.6B"
PARSED = "tests/test_docs.py::test_every_command_shown_is_one_there_is"
SCHEMA = "docs/guides/structured-outputs.md: schema"

BLOCKS = (
    python("README.md: offline"),
    python(
        "docs/guides/offline-inference.md: from quire import LLM, SamplingParams",
        common=lambda said: re.sub(r"\.\d{3,}", "", said),
    ),
    python(
        "docs/guides/engine.md: from quire.assembly.engine import build_engine",
        common=lambda said: re.findall(r"^\((?:\d+, )+\d+\)", said, re.MULTILINE),
    ),
    python("docs/guides/offline-inference.md: enqueue", common=lambda said: re.sub(r"llm-\d+", "", said)),
    python("docs/guides/offline-inference.md: beams", common=lambda said: re.sub(r"-\d+\.\d+", "", said)),
    python("docs/guides/offline-inference.md: ids"),
    python("docs/guides/from-vllm.md: vllm", common=lambda said: re.sub(r"-?\d+\.\d+\S*", "", said)),
    python("docs/guides/structured-outputs.md: offline"),
    Item(SPECULATIVE, speculative),
    settings("docs/reference/configuration.md: model: embedded"),
    Item(
        "docs/guides/engine.md: from quire.sim.run import SimConfig, simulate",
        lambda deployment: exec(FOUND["docs/guides/engine.md: from quire.sim.run import SimConfig, simulate"].text, {}),
        executors=(),
        elsewhere="tests/test_docs.py::test_each_example_in_python_runs",
    ),
    Item(LOOK, looked_at, executors=("local",)),
    served(RANKS, executors=("local",)),
    served(f"{MANY}: quire serve MODEL --pipeline-parallel-size 2 --tensor-parall", executors=("local",)),
    Item(f"{MANY}: ranks", python(f"{MANY}: ranks").run, executors=("local",), ci=()),
    Item(f"{MANY}: quire plan Qwen/Qwen3-32B --device cuda --memory 80GiB --ten", planned, executors=("local",)),
    Item("README.md: serve", serve, part="server", ci=("grpc",)),
    client("README.md: curl", ci=("ahead", "grpc")),
    client("README.md: openai", needs=("openai",)),
    client("docs/clients.md: extra", needs=("openai",), ci=()),
    client("docs/clients.md: responses", needs=("openai",), ci=()),
    client("docs/clients.md: messages", needs=("anthropic",)),
    client("docs/guides/ollama.md: ollama", needs=("ollama",), ci=()),
    connected(TOOLS),
    connected(EMBEDDINGS),
    connected(CONTINUED),
    connected(BACKGROUND),
    *(client(f"docs/guides/structured-outputs.md: {name}") for name in ("schema", "choice", "regex", "grammar")),
    Item(BATCH, batch, part="server", ci=("grpc",), needs=("openai",)),
    Item(RECORDING, recording, ci=()),
    Item(DETERMINISTIC, deterministic, executors=("local", "ahead"), ci=()),
    served(HEADER),
    served(DRAFT, executors=("local", "ahead")),
    Item(EXECUTOR, elsewhere, executors=("local", "ahead"), ci=(), needs=("grpc",)),
    Item(CLIENT, elsewhere, executors=(), ci=(), needs=("grpc",)),
    Item(ONNX, onnx, executors=(), ci=(), needs=("onnx", "onnxruntime")),
    Item(HF, hf, executors=(), ci=(), needs=("quire.executors.hf",)),
)

AGENT = "test_the_agent_itself_ends_after_two_tools"

NAMED = (
    *(
        Named(f"docs/guides/kv-tiers.md: {first}", "no other executor has tiers", f"tests/test_kv_offload.py::{place}")
        for first, place in (
            ("quire serve --kv-offloading-size 8", "test_a_server_says_where_a_prefix_came_from"),
            ("from quire import LLM, SamplingParams", "test_the_guides_conversations_come_back"),
        )
    ),
    *(
        Named(f"docs/guides/disaggregation.md: {first}", "two servers", f"tests/test_disaggregated_servers.py::{place}")
        for first, place in (
            (
                "CUDA_VISIBLE_DEVICES=0 quire serve MODEL --port 8001 --disag",
                "test_two_servers_answer_as_one_and_say_what_was_sent",
            ),
            (
                "openssl rand -hex 32 > /etc/quire/split-secret",
                "test_two_servers_answer_as_one_and_say_what_was_sent",
            ),
        )
    ),
    *(
        Named(f"docs/guides/simulate.md: {first}", "no engine of a setting", f"tests/bench/test_simulate.py::{place}")
        for first, place in (
            *(
                (first, "test_the_commands_of_the_guide_answer")
                for first in (
                    "quire simulate --gpu h200 --replicas 2 --num-prompts 500 --s",
                    "quire simulate FOLDER --gpu h200 --trace trace.csv --speed 2",
                    "quire simulate --gpu h200 --num-prompts 500 --shrink 8 --spe",
                    "quire simulate --gpu h200 --trace chats --num-prompts 800 --",
                    "quire simulate --gpu h200 --num-prompts 500 --shrink 8 --aut",
                    "quire simulate --gpu h200 --num-prompts 200 --shrink 4 --spe",
                    "quire simulate --calibration here.json --num-prompts 100 --s",
                )
            ),
            (
                "quire calibrate --seconds 20 --output here.json",
                "test_a_calibration_of_this_machine_is_what_a_simulation_reads",
            ),
        )
    ),
    *(
        Named(name, "needs a model that pools", f"tests/test_encoders.py::{place}")
        for name, place in (
            ("LLM.classify", "test_classes_are_those_of_transformers"),
            ("LLM.score", "test_scores_are_those_of_transformers"),
            ("LLM.encode", "test_embedders_score_by_the_cosine_and_give_vectors_of_tokens"),
        )
    ),
    *(
        Named(f"AsyncLLM.{name}", "needs a model that pools", "tests/test_async_llm.py::test_poolings_are_those_of_llm")
        for name in ("classify", "encode", "score")
    ),
    *(
        Named(f"docs/guides/{block}", "needs a model that pools", f"tests/server/test_pooling.py::{place}")
        for block, place in (
            (
                "embeddings.md: quire serve sentence-transformers/all-MiniLM-L6-v2",
                "test_embeddings_are_cut_only_where_that_is_asked_for_and_counted",
            ),
            ("scores.md: quire serve cross-encoder/ms-marco-MiniLM-L6-v2", "test_scores_have_vllms_shape"),
            ('scores.md: {"text_1": "What is a panda?", "text_2": ["hi", "The giant p', "test_scores_have_vllms_shape"),
        )
    ),
    Named(
        "docs/guides/scores.md: quire serve Qwen/Qwen3-Reranker-0.6B --hf-overrides '{\"archi",
        "needs a hub",
        "tests/test_encoders.py::test_a_reranker_that_answers_in_words_scores_as_its_logits_say",
    ),
    Named(
        "quire pull",
        "needs a hub",
        "tests/cli/test_models.py::test_a_model_is_pulled_listed_and_removed",
    ),
    Named(
        "quire rm",
        "needs a download",
        "tests/cli/test_models.py::test_a_model_is_pulled_listed_and_removed",
    ),
    Named(
        "docs/guides/offline-inference.md: asyncio",
        "how much it says depends on time",
        "tests/test_docs.py::test_each_example_in_python_runs",
    ),
    Named(
        "docs/guides/offline-inference.md: notebook",
        "runs in an event loop",
        "tests/test_docs.py::test_the_example_for_notebooks_runs_in_a_loop_that_runs_already",
    ),
    Named(
        "LLM.wait_for_completion",
        "is what LLM.enqueue is tried with",
        "tests/test_llm.py::test_what_is_enqueued_is_returned_once_in_order",
    ),
    Named(
        "LLM.get_default_sampling_params",
        "is LLM.default_sampling_params",
        "tests/test_async_llm.py::test_scripts_for_vllm_make_it_of_engine_args_and_shut_it_down",
    ),
    *(
        Named(f"AsyncLLM.{name}", "does what AsyncLLM.generate does, or no step", f"tests/test_async_llm.py::{test}")
        for name, test in (
            ("abort", "test_an_abort_ends_one_request_and_gives_its_blocks_back"),
            ("chat", "test_a_conversation_is_rendered_by_the_models_template"),
            ("close", "test_closing_interrupts_those_that_run_and_refuses_those_that_come"),
            ("default_sampling_params", "test_defaults_are_the_models"),
            ("embed", "test_vectors_are_those_of_llm"),
            ("get_tokenizer", "test_defaults_are_the_models"),
            ("reset_prefix_cache", "test_answers_are_those_of_llm"),
            ("shutdown", "test_scripts_for_vllm_make_it_of_engine_args_and_shut_it_down"),
            ("start", "test_a_start_that_fails_says_why_to_every_caller"),
        )
    ),
    *(
        Named(
            f"docs/quickstart.md: {name}",
            "the README's",
            "tests/test_docs.py::test_the_quickstart_shows_the_examples_of_the_readme",
        )
        for name in ("serve", "test", "curl", "openai", "offline")
    ),
    Named(
        "docs/guides/fill-in-the-middle.md: infill",
        "the embedded model has no markers",
        "tests/server/test_infill.py::test_the_example_of_the_guide_is_answered",
    ),
    Named("docs/guides/images.md: serving", "needs a model from the hub", "tests/server/test_images.py"),
    Named(
        "docs/guides/images.md: images",
        "needs a model that reads images",
        "tests/test_images.py::test_the_example_of_the_guide_runs",
    ),
    Named("docs/guides/observability.md: pip install -e '.[otel]'", "needs a collector", "tests/test_tracing.py"),
    Named(f"{MANY}: pip install 'quire-llm[ray]'", "needs a cluster", "tests/assembly/test_ray_ranks.py"),
    Named("README.md: test", "CI is this", "tests/test_readme.py::test_the_test_command_is_the_one_ci_runs"),
    Named(
        'CONTRIBUTING.md: pip install -e ".[dev]" && pre-commit install',
        "commands of a developer",
        "tests/test_readme.py::test_the_test_command_is_the_one_ci_runs",
    ),
    Named(
        "CONTRIBUTING.md: native/build.sh src/quire/ops/native/libquire_cpu.so",
        "commands of a developer",
        "tests/ops/test_native.py::test_the_library_is_built_from_its_source",
    ),
    Named(
        "CONTRIBUTING.md: python -m tests.mutation --seed 1 --count 100",
        "commands of a developer",
        "tests/test_mutation.py",
    ),
    Named(
        "docs/guides/scheduling-policies.md: from collections.abc import Sequence as Seq",
        "an engine of its own",
        "tests/test_scheduling_policy.py::test_the_example_serves_and_explains",
    ),
    *(
        Named(f"docs/clients.md: {first}", "needs the agent", f"tests/test_agents.py::{AGENT}")
        for first in ('model = "MODEL"', "export ANTHROPIC_BASE_URL=http://127.0.0.1:8000")
    ),
    Named("docs/guides/deployment.md: docker build -t quire .", "needs Docker", "tests/test_deploy.py"),
    Named(
        'docs/model-card.md: TEXT="--stories tinystories.txt.xz --fairytales fairytales_p',
        "training takes hours and texts that are not here",
        "tests/training/test_train.py",
    ),
    Named(
        "docs/performance/measuring.md: quire bench latency --input-len 32 --output-len 128 --batch-",
        "takes minutes",
        "tests/bench/test_offline.py",
    ),
    Named(
        "docs/guides/recording.md: worked",
        "no engine of a setting",
        "tests/sim/test_replay.py::test_the_worked_example_of_the_docs_works",
    ),
    Named(
        'docs/guides/recording.md: curl -o found.quirerec -H "Authorization: Bearer $ADMIN_KEY"',
        "needs a key of one's own",
        "tests/test_recording.py",
    ),
    Named(
        """docs/guides/speculative-decoding.md: quire serve big-model --speculative-config '{"model": "small""",
        "needs two models that share a tokenizer",
        PARSED,
    ),
    Named(
        "docs/guides/speculative-decoding.md: quire serve Qwen/Qwen3-Next-80B-A3B-Instruct --speculative-c",
        "needs more memory than there is",
        PARSED,
    ),
    Named(
        "docs/guides/replicas.md: pip install 'quire-llm[ray]'",
        "Ray takes half a minute to start",
        "tests/replicas/test_deployment.py",
    ),
    Named(
        "docs/guides/replicas.md: quire serve --replicas 1 --max-replicas 3",
        "it grows and shrinks in minutes",
        "tests/replicas/test_deployment.py",
    ),
    Named(
        "docs/guides/replicas.md: applications:",
        "a file of Ray Serve",
        "tests/replicas/test_application.py",
    ),
    Named(
        "docs/guides/upstream.md: quire serve --backend vllm --model Qwen/Qwen2.5-7B-Instruct",
        "needs vLLM",
        "tests/frontend/test_supervisor.py",
    ),
    Named(
        "docs/guides/upstream.md: python -m benchmarks.pair --direct http://127.0.0.1:8000 --c",
        "`python -m benchmarks.pair` is tried",
        PARSED,
    ),
)
