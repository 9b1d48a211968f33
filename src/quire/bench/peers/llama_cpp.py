"""llama.cpp, by the C functions that llama-cpp-python binds. See `service.py`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

BATCH = 512
"""Tokens of a step, llama.cpp's own default of its physical batch."""

Q4_K_M = 15
"""LLAMA_FTYPE_MOSTLY_Q4_K_M."""


class Generator:
    """Greedy answers of one model, all sequences decoded in one batch, as llama-batched-bench does."""

    def __init__(self, model: str, threads: int, sequences: int, context: int) -> None:
        self.library = library = import_module("llama_cpp")
        self.numpy = import_module("numpy")
        self.log = library.llama_log_callback(lambda level, text, data: None)
        library.llama_log_set(self.log, None)
        library.llama_backend_init()
        how = library.llama_model_default_params()
        how.n_gpu_layers = 0
        # Repacked for AMX, quantized weights crash llama.cpp 0.25 on some virtual machines.
        how.use_extra_bufts = model.endswith("bf16.gguf") or not has_amx()
        self.model = library.llama_model_load_from_file(model.encode(), how)
        if not self.model:
            raise ValueError(f"llama.cpp cannot read {model}")
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        options = library.llama_context_default_params()
        options.n_ctx, options.n_seq_max = sequences * context, sequences
        options.n_batch = options.n_ubatch = BATCH
        options.n_threads = options.n_threads_batch = threads
        self.state = library.llama_init_from_model(self.model, options)
        self.batch = library.llama_batch_init(BATCH, 0, 1)

    def feed(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Decode (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self.library.llama_decode(self.state, batch):
            raise RuntimeError("llama_decode failed")

    def logits(self, place: int) -> Any:
        """Of one entry of the last step, float32 [V]."""
        found = self.library.llama_get_logits_ith(self.state, place)
        return self.numpy.ctypeslib.as_array(found, shape=(self.vocabulary,))

    def __call__(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Answers of `new` tokens each."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.state), True)
        entries = [
            (token, i, s, i == len(prompt) - 1) for s, prompt in enumerate(prompts) for i, token in enumerate(prompt)
        ]
        made: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(entries), BATCH):
            some = entries[first : first + BATCH]
            self.feed(some)
            for place, (_, _, sequence, wanted) in enumerate(some):
                if wanted:
                    made[sequence].append(int(self.logits(place).argmax()))
        for turn in range(1, new):
            self.feed([(answer[-1], len(prompts[s]) + turn - 1, s, True) for s, answer in enumerate(made)])
            for s, answer in enumerate(made):
                answer.append(int(self.logits(s).argmax()))
        return made


def has_amx() -> bool:
    """Whether this processor has AMX."""
    known = Path("/proc/cpuinfo")
    return known.exists() and " amx_tile" in known.read_text()


def load(model: str, threads: int, sequences: int, context: int) -> tuple[Generator, str]:
    """A model file, and the version of the package."""
    made = Generator(model, threads, sequences, context)
    return made, str(made.library.__version__)


def quantize(source: str, target: str) -> None:
    """Write a GGUF file in bfloat16 as Q4_K_M, by llama.cpp's own quantizer."""
    library = import_module("llama_cpp")
    how = library.llama_model_quantize_default_params()
    how.ftype = Q4_K_M
    if library.llama_model_quantize(source.encode(), target.encode(), how):
        raise RuntimeError(f"llama.cpp cannot quantize {source}")
