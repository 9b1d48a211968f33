"""The tokenizer: byte-level BPE, so that every string of bytes has tokens and comes back unchanged.

Written as the files that transformers, and engines that read its layout, expect beside the weights:
`tokenizer.json` and `tokenizer_config.json`, the latter with the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data import Message

END_OF_TEXT = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, SYSTEM, USER, ASSISTANT, END)
ROLE_TOKENS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ '<|assistant|>' }}
{%- elif message.role in ['system', 'developer'] -%}{{ '<|system|>' }}
{%- else -%}{{ '<|user|>' }}
{%- endif -%}
{%- if message.content is string -%}{{ message.content | trim }}
{%- elif message.content -%}
{%- for part in message.content if part.text is defined -%}{{ part.text | trim }}{%- endfor -%}
{%- endif -%}
{{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Codec:
    """A tokenizer with the ids that the training code needs by name."""

    tokenizer: Tokenizer

    def id_of(self, special: str) -> int:
        token = self.tokenizer.token_to_id(special)
        if token is None:
            raise ValueError(f"the tokenizer has no token {special}")
        return int(token)

    @property
    def end_of_text(self) -> int:
        return self.id_of(END_OF_TEXT)

    @property
    def end(self) -> int:
        return self.id_of(END)

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Many texts at once: the library spreads them over the cores."""
        return [list(encoding.ids) for encoding in self.tokenizer.encode_batch(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def prompt(self, messages: list[Message]) -> list[int]:
        """What the chat template with a generation prompt renders, as tokens."""
        ids: list[int] = []
        for message in messages:
            ids += [
                self.id_of(ROLE_TOKENS[message["role"]]),
                *self.encode(message["content"].strip()),
                self.end,
            ]
        return [*ids, self.id_of(ASSISTANT)]


def train_tokenizer(texts: list[str], vocab_size: int = 4096) -> Codec:
    """Byte-level BPE of exactly `vocab_size` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Codec(tokenizer)


def save_tokenizer(codec: Codec, folder: Path, context: int) -> None:
    """Both tokenizer files; no token is added to a text unasked, which the training rows mirror."""
    folder.mkdir(parents=True, exist_ok=True)
    codec.tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Codec:
    """The tokenizer that `save_tokenizer` wrote."""
    return Codec(Tokenizer.from_file(str(folder / "tokenizer.json")))
