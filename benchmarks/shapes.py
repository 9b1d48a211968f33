"""Public model shapes, written to a folder with a tokenizer of made-up words: for random weights of real size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.decoders import Metaspace as Decoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace

from quire.errors import InvalidConfig, nearest


def decoder(
    hidden: int, layers: int, heads: tuple[int, int, int], width: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """config.json fields of a gated decoder. heads: of queries, of keys and values, numbers each."""
    queries, pairs, dim = heads
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": queries,
        "num_key_value_heads": pairs,
        "head_dim": dim,
        "intermediate_size": width,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **more,
    }


def llama(*shape: Any, tied: bool, stretch: float) -> dict[str, Any]:
    return decoder(
        *shape,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": stretch,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
        bos_token_id=128000,
        eos_token_id=128001,
    )


def qwen(generation: int, *shape: Any, tied: bool, **more: Any) -> dict[str, Any]:
    fields = decoder(
        *shape,
        architectures=[f"Qwen{generation}ForCausalLM"],
        model_type=f"qwen{generation}",
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        bos_token_id=151643,
        eos_token_id=151645,
    )
    return fields | more


def delta_hybrid(*shape: Any, experts: int, used: int, **more: Any) -> dict[str, Any]:
    """Of layers of the gated delta rule, every fourth of attention, with experts."""
    return decoder(
        *shape,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000000,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        num_experts=experts,
        num_experts_per_tok=used,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        **more,
    )


def granite(*shape: Any, mamba_heads: int, experts: int, used: int, shared: int) -> dict[str, Any]:
    """Granite 4-H: layers of Mamba 2, every tenth of attention, with experts."""
    return decoder(
        *shape,
        architectures=["GraniteMoeHybridForCausalLM"],
        model_type="granitemoehybrid",
        hidden_act="silu",
        rms_norm_eps=1e-5,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
        position_embedding_type="nope",
        attention_multiplier=0.0078125,
        embedding_multiplier=12,
        residual_multiplier=0.22,
        logits_scaling=16,
        mamba_n_heads=mamba_heads,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        num_local_experts=experts,
        num_experts_per_tok=used,
        shared_intermediate_size=shared,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        bos_token_id=100257,
        eos_token_id=100257,
    )


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-0.6b": qwen(3, 1024, 28, (16, 8, 128), 3072, 151936, tied=True),
        "qwen3-4b": qwen(3, 2560, 36, (32, 8, 128), 9728, 151936, tied=True),
        "qwen3-8b": qwen(3, 4096, 36, (32, 8, 128), 12288, 151936, tied=False),
        "qwen3-30b-a3b": qwen(
            *(3, 2048, 48, (32, 4, 128), 6144, 151936),
            tied=False,
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        "gpt-oss-20b": decoder(
            *(2880, 24, (64, 8, 64), 2880, 201088),
            architectures=["GptOssForCausalLM"],
            model_type="gpt_oss",
            hidden_act="silu",
            rms_norm_eps=1e-5,
            attention_bias=True,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 12,
            num_local_experts=32,
            num_experts_per_tok=4,
            swiglu_limit=7.0,
            rope_theta=150000.0,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            max_position_embeddings=131072,
            tie_word_embeddings=False,
            bos_token_id=199998,
            eos_token_id=200002,
            quantization_config={
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            },
        ),
        "qwen3-next-80b-a3b": delta_hybrid(
            *(2048, 48, (16, 2, 256), 5120, 151936),
            experts=512,
            used=10,
            architectures=["Qwen3NextForCausalLM"],
            model_type="qwen3_next",
            decoder_sparse_step=1,
            mlp_only_layers=[],
            bos_token_id=151643,
            eos_token_id=151645,
        ),
        "qwen3.5-35b-a3b": delta_hybrid(
            *(2048, 40, (16, 2, 256), 512, 248320),
            experts=256,
            used=8,
            architectures=["Qwen3_5MoeForCausalLM"],
            model_type="qwen3_5_moe_text",
            eos_token_id=248044,
        ),
        "granite-4.0-h-small": granite(
            4096, 40, (32, 8, 128), 768, 100352, mamba_heads=128, experts=72, used=10, shared=1536
        ),
        "granite-4.0-h-tiny": granite(
            1536, 40, (12, 4, 128), 512, 100352, mamba_heads=48, experts=64, used=6, shared=1024
        ),
        "nemotron-h-8b": decoder(
            *(4096, 52, (32, 8, 128), 21504, 131072),
            architectures=["NemotronHForCausalLM"],
            model_type="nemotron_h",
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            mlp_hidden_act="relu2",
            layer_norm_epsilon=1e-5,
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=12,
        ),
        "qwen2.5-7b": qwen(2, 3584, 28, (28, 4, 128), 18944, 152064, tied=False),
        "llama-3.2-1b": llama(2048, 16, (32, 8, 64), 8192, 128256, tied=True, stretch=32.0),
        "llama-3.2-3b": llama(3072, 28, (24, 8, 128), 8192, 128256, tied=True, stretch=32.0),
        "llama-3.1-8b": llama(4096, 32, (32, 8, 128), 14336, 128256, tied=False, stretch=8.0),
        "llama-3.1-70b": llama(8192, 80, (64, 8, 128), 28672, 128256, tied=False, stretch=8.0),
        "gpt2": {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
            "torch_dtype": "bfloat16",
        },
        "gemma3-1b": decoder(
            1152,
            26,
            (4, 1, 256),
            6912,
            262144,
            architectures=["Gemma3ForCausalLM"],
            model_type="gemma3_text",
            hidden_activation="gelu_pytorch_tanh",
            rms_norm_eps=1e-6,
            rope_theta=1000000,
            rope_local_base_freq=10000,
            sliding_window=512,
            sliding_window_pattern=6,
            query_pre_attn_scalar=256,
            max_position_embeddings=32768,
            bos_token_id=2,
            eos_token_id=1,
        ),
    }
)


AWQ: Mapping[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
"""Of config.json, of matrices of 4-bit integers in groups of 128."""

GPTQ: Mapping[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
"""Of config.json, of GPTQ's matrices of 4-bit integers in groups of 128, in the order of their inputs."""


def write(
    folder: Path,
    name: str,
    *,
    tokenizer: Callable[[int], Tokenizer] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A model folder without weights: for `load_format="dummy"`. Raises InvalidConfig for an unknown shape.

    tokenizer: makes one of so many tokens; `words` by default. config: fields of config.json that differ from the
    shape's.
    """
    if name not in SHAPES:
        raise InvalidConfig(f"there is no shape {name!r} (known: {', '.join(SHAPES)}).{nearest(name, SHAPES)}")
    fields = {**SHAPES[name], **(config or {})}
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(fields))
    (place / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    (tokenizer or words)(int(fields["vocab_size"])).save(str(place / "tokenizer.json"))
    return place


def words(count: int) -> Tokenizer:
    """`count` tokens, each a word of five letters: id i is i in letters, least significant first."""
    made = Tokenizer(WordLevel({f"▁{letters(i, 5)}": i for i in range(count)}, unk_token=f"▁{letters(0, 5)}"))
    made.pre_tokenizer = Metaspace()
    made.decoder = Decoder()
    return made


def byte_words(count: int) -> Tokenizer:
    """`count` tokens: 256 of a byte each, then words of a space and four letters. For grammars: `words` has no JSON.

    Without merges, a text becomes one token a byte. Punctuation, digits and capitals are in byte tokens only, so texts
    made of them have one way to be written.
    """
    vocabulary = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {f"Ġ{letters(i, 4)}": 256 + i for i in range(count - 256)}
    made = Tokenizer(BPE(vocabulary, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteDecoder()
    return made


def letters(number: int, count: int) -> str:
    """`number` in `count` letters, least significant first."""
    return "".join("abcdefghijklmnopqrstuvwxyz"[number // 26**place % 26] for place in range(count))
