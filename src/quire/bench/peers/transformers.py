"""transformers' generate, in bfloat16. See `service.py`."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Generator:
    """Greedy answers of one model."""

    def __init__(self, folder: str, threads: int) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        library = import_module("transformers")
        self.model = library.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def __call__(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Answers of `new` tokens each."""
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            made = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        found: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return found


def load(model: str, threads: int, sequences: int, context: int) -> tuple[Generator, str]:
    """A checkpoint's folder, and the version of the package."""
    return Generator(model, threads), str(import_module("transformers").__version__)
