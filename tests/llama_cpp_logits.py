"""Run by another interpreter, which has llama-cpp-python: logits of a GGUF file, and its tokens of a text.

python llama_cpp_logits.py FILE TEXT OUT.npy: prints the tokens, and writes their logits [n, V] float32.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np


def main(path: str, text: str, out: str) -> None:
    standard = llama_cpp.llama_cpp.llama_model_default_params

    def plain() -> object:
        """Without repacked buffers: those for AMX crash on some virtual machines, whoever wrote the file."""
        params = standard()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain
    model = llama_cpp.Llama(path, n_ctx=512, n_batch=512, n_threads=1, logits_all=True, verbose=False)
    tokens = model.tokenize(text.encode(), add_bos=True, special=True)
    model.eval(tokens)
    np.save(out, np.array(model.scores[: len(tokens)], dtype=np.float32))
    print(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
