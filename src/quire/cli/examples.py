"""Examples of every command, shown under its help. Keys are what follows `quire`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

Example = tuple[str, str]
"""A command line, and what it does."""

EXAMPLES: Mapping[str, Sequence[Example]] = MappingProxyType(
    {
        "serve": (
            ("quire serve", "the embedded model on http://127.0.0.1:8000"),
            ("quire serve Qwen/Qwen3-8B --max-model-len 8192", "a model of the Hugging Face Hub"),
            ("quire serve model.gguf --port 8080", "a GGUF file"),
            ("quire serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "one of a repository's GGUF files"),
            ("quire serve FOLDER --host 0.0.0.0 --api-key SECRET", "for other machines, with a key"),
        ),
        "run": (
            ('quire run embedded "Tell me a story about a dog."', "one answer of the embedded model"),
            ('quire run Qwen/Qwen3-0.6B "Why is the sky blue?"', "one answer"),
            ("quire run Qwen/Qwen3-0.6B", "a conversation"),
        ),
        "generate": (
            ('quire generate "Once upon a time" --max-tokens 40', "a completion by the embedded model"),
            ("quire generate - --model FOLDER --temperature 0 < prompt.txt", "of what standard input has"),
        ),
        "chat": (
            ("quire chat FOLDER --system 'Answer in one sentence.'", "a conversation with a model in this process"),
            ("quire chat --url http://127.0.0.1:8000", "with a server's model"),
            ("quire chat FOLDER --history-file ~/.quire/history", "and arrow keys bring back earlier questions"),
        ),
        "pull": (
            ("quire pull Qwen/Qwen3-0.6B", "a repository's model"),
            ("quire pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "one of a repository's GGUF files"),
        ),
        "list": (("quire list", "names, formats, sizes, and when they were last used"),),
        "rm": (
            ("quire rm unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "one GGUF file, after a question"),
            ("quire rm Qwen/Qwen3-0.6B --yes", "a whole repository, without"),
        ),
        "quantize": (
            ("quire quantize Qwen/Qwen3-0.6B qwen3-q4.gguf --type q4_k_m", "4 bits a weight, more for some tensors"),
            ("quire quantize model-BF16.gguf model-Q8_0.gguf --type q8_0", "a GGUF file in another type"),
        ),
        "bench latency": (("quire bench latency FOLDER --batch-size 8", "the time of a batch of eight"),),
        "bench throughput": (("quire bench throughput FOLDER --num-prompts 200", "tokens a second of 200"),),
        "bench startup": (("quire bench startup FOLDER", "seconds until the first token"),),
        "bench serve": (
            ("quire bench serve --max-concurrency 1,8,64 --save-result load.json", "at three levels of load"),
            ("quire bench serve --request-rate 2,8 --num-prompts 200", "at two rates of arrival"),
        ),
        "bench report": (("quire bench report before.json after.json --output page.html", "two runs in a page"),),
        "bench engine": (("quire bench engine --requests 1000", "the engine without a model"),),
        "bench cpu": (
            (
                "quire bench cpu --vs llama-cpp,openvino --peer-python llama-cpp=PATH",
                "prompts and decoding, beside other engines",
            ),
        ),
        "export-onnx": (("quire export-onnx FOLDER onnx-folder --int8", "graphs in int8"),),
        "executor": (
            ("quire executor FOLDER --listen 127.0.0.1:9000", "and `quire serve FOLDER --executor grpc` elsewhere"),
        ),
        "inspect": (("quire inspect Qwen/Qwen3-8B", "its shapes, formats, template and K/V bytes a token"),),
        "plan": (("quire plan Qwen/Qwen3-8B --memory 24GiB --max-num-seqs 32", "what fits into 24 GiB"),),
        "simulate": (
            ("quire simulate --gpu h200 --replicas 4", "four cards under a load like Azure's trace of coding"),
            ("quire simulate FOLDER --gpu h200 --trace trace.csv --target ttft_p99=500ms", "how many cards?"),
            ("quire simulate --gpu h200 --set max_num_batched_tokens=2048,8192", "which value is better?"),
        ),
        "calibrate": (("quire calibrate FOLDER --output here.json", "for quire simulate --calibration here.json"),),
        "check": (
            ("quire check FOLDER", "a model's answers alone and in a batch"),
            ("quire check --all", "a tiny model of each family"),
        ),
        "diff": (("quire diff FOLDER", "activations beside transformers', layer by layer"),),
        "verify": (("quire verify FOLDER --requests 32", "the same answers under any load"),),
        "replay": (
            ("quire replay recording --request ID", "why a request took as long as it did"),
            ("quire replay recording --step 7", "what was decided in a step"),
            ("quire replay recording --page view.json", "a file that the live page opens"),
        ),
        "demo": (("quire demo --requests 6 --max-num-seqs 3", "six requests, three at once"),),
        "config": (("quire config FOLDER --config quire.yaml", "the settings that a server would have"),),
        "doctor": (("quire doctor", "what is missing on this machine, and how to mend it"),),
        "version": (("quire version", "of Quire, torch and Python"),),
    }
)


def examples_of(path: str) -> str | None:
    """The examples of a command, as click shows a text under its help."""
    lines = [f"  {line}\n      {does}" for line, does in EXAMPLES.get(path, ())]
    return "\n".join(["\b\nExamples:", *lines]) if lines else None
