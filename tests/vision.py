"""Tiny checkpoints that read images, written by transformers with random parameters, a tokenizer and a processor."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4 import image_processing_pil_gemma4
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = (
    *("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>", "<end_of_turn>"),
    *("<|image>", "<|image|>", "<image|>"),
)
IDS = {token: 256 + i for i, token in enumerate(SPECIAL)}
VOCAB = 256 + len(SPECIAL)

QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA4_TEMPLATE = GEMMA_TEMPLATE.replace("<start_of_image>", "<|image|>")

TEXT = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": IDS["<pad>"],
        "bos_token_id": IDS["<bos>"],
        "eos_token_id": IDS["<eos>"],
    }
)

QWEN_IDS = MappingProxyType(
    {
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
    }
)

QWEN_VISION = MappingProxyType(
    {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 48,
    }
)


def qwen25() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]}
    text = {**TEXT, "rope_parameters": rope}
    vision = {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1, 3]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN_IDS))


QWEN3_ROPE = MappingProxyType(
    {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
)

QWEN3_VISION = MappingProxyType({**QWEN_VISION, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]})


def qwen3() -> PreTrainedModel:
    text = {**TEXT, "rope_parameters": dict(QWEN3_ROPE), "head_dim": 16}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=dict(QWEN3_VISION), **QWEN_IDS)
    )


EXPERTS = MappingProxyType({"moe_intermediate_size": 20, "num_experts_per_tok": 2})


def qwen3_moe() -> PreTrainedModel:
    text = {**TEXT, **EXPERTS, "num_experts": 4, "rope_parameters": dict(QWEN3_ROPE), "head_dim": 16}
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=text, vision_config=dict(QWEN3_VISION), **QWEN_IDS)
    )


QWEN35_TEXT = MappingProxyType(
    {
        **TEXT,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
)


def qwen35() -> PreTrainedModel:
    vision = {**QWEN_VISION, "num_position_embeddings": 25}
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=dict(QWEN35_TEXT), vision_config=vision, **QWEN_IDS)
    )


def qwen35_moe() -> PreTrainedModel:
    text = {**QWEN35_TEXT, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
    vision = {**QWEN_VISION, "num_position_embeddings": 25}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision, **QWEN_IDS))


def gemma3() -> PreTrainedModel:
    text = {**TEXT, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 20, "num_hidden_layers": 4}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"image_size": 24, "patch_size": 4, "vision_use_head": False}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=9,
            boi_token_index=IDS["<start_of_image>"],
            eoi_token_index=IDS["<end_of_image>"],
            image_token_index=IDS["<image_soft_token>"],
        )
    )


def gemma4_of(text: Mapping[str, Any], vision: Mapping[str, Any]) -> PreTrainedModel:
    local = {"global_head_dim": 16, "head_dim": 12, "sliding_window": 9, "num_hidden_layers": 4}
    local |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2}
    sizes |= {"position_embedding_size": 40}
    ids = {"image_token_id": IDS["<|image|>"], "boi_token_id": IDS["<|image>"], "eoi_token_id": IDS["<image|>"]}
    return Gemma4ForConditionalGeneration(
        Gemma4Config(text_config={**TEXT, **local, **text}, vision_config={**sizes, **vision}, **ids)
    )


def gemma4() -> PreTrainedModel:
    """As the large ones: experts, and images whose tokens see each other."""
    text = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
    text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    return gemma4_of({**text, "use_bidirectional_attention": "vision"}, {"standardize": True})


def gemma4_small() -> PreTrainedModel:
    """As the small ones: inputs of layers, shared K/V and clipped products."""
    text = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2}
    text |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    return gemma4_of({**text, "use_double_wide_mlp": True}, {"use_clipped_linears": True})


FAMILIES: Mapping[str, Any] = MappingProxyType(
    {
        "qwen2.5-vl": qwen25,
        "qwen3-vl": qwen3,
        "qwen3-vl-moe": qwen3_moe,
        "qwen3.5": qwen35,
        "qwen3.5-moe": qwen35_moe,
        "gemma3": gemma3,
        "gemma4": gemma4,
        "gemma4-small": gemma4_small,
    }
)

RECURRENT = ("qwen3.5", "qwen3.5-moe")
"""Those whose text model has recurrent layers."""


GEMMA4_TOKENS = 12
"""Most tokens of an image, fewer than published models have."""
image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS = (GEMMA4_TOKENS,)


def processor_of(family: str) -> Any:
    """transformers' processor of images, without torchvision."""
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    if family.startswith("gemma4"):
        return image_processing_pil_gemma4.Gemma4ImageProcessorPil(
            patch_size=4, pooling_kernel_size=2, max_soft_tokens=GEMMA4_TOKENS
        )
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 40}, patch_size=4, merge_size=2
    )


TEMPLATES = {"gemma3": GEMMA_TEMPLATE, "gemma4": GEMMA4_TEMPLATE, "gemma4-small": GEMMA4_TEMPLATE}

UNSHIFTED = ("linear_attn.norm.weight", "A_log", "dt_bias")
"""Of recurrent layers, what is not a norm of 1 + w."""


GEMMA4_BUFFERS = MappingProxyType(
    {
        "std_bias": (0.0, 1.0),
        "std_scale": (1.0, 0.3),
        "layer_scalar": (0.8, 0.1),
        "put_min": (-1.2, 0.2),
        "put_max": (1.2, 0.2),
    }
)
"""Mean and deviation of what is not a parameter, by the end of its name."""


def make(folder: Path, family: str, seed: int = 0) -> PreTrainedModel:
    """Write a checkpoint and return transformers' model of it, float32."""
    model = FAMILIES[family]().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if own := next((each for ends, each in GEMMA4_BUFFERS.items() if name.endswith(ends)), None):
                buffer.copy_(own[0] + own[1] * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "gemma4" in family and "language_model" in name and "post_" in name:
                parameter.copy_(noise + 5.0)  # or embeddings, which are large, would repeat themselves
            elif "gemma4" in family and name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(0.2 * noise + 0.5)  # scores have no scale of their own
            elif parameter.dim() == 1:
                shifted = family in ("gemma3", *RECURRENT) and "vis" not in name and not name.endswith(UNSHIFTED)
                parameter.copy_(0.2 * noise + (0.0 if name.endswith("bias") or shifted else 1.0))
            else:
                size = parameter[0].numel() if "position" not in name and "pos_embed" not in name else 1
                if parameter.dim() == 3 and "experts" in name:
                    size = parameter.shape[-1]
                # Recurrent layers would make rounding errors larger from layer to layer.
                parameter.copy_(noise * (0.9 if "linear_attn" in name else 1.5) * size**-0.5)
        if "gemma4" in family:  # or the head, which is tied to it, might say it, which no model does
            model.get_input_embeddings().weight[place_of(family)] = 0.0
    model.save_pretrained(folder)
    write_tokenizer(folder, QWEN_TEMPLATE if "qwen" in family else TEMPLATES[family])
    processor_of(family).save_pretrained(folder)
    return model


def write_tokenizer(folder: Path, template: str) -> None:
    """A token for each byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of smooth random colours."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image, format: str = "PNG") -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def place_of(family: str) -> int:
    """The id of a placeholder."""
    return IDS[{"gemma3": "<image_soft_token>"}.get(family, "<|image|>" if "gemma4" in family else "<|image_pad|>")]


def theirs(model: PreTrainedModel, family: str, ids: Sequence[int], images: Sequence[Image.Image]) -> torch.Tensor:
    """transformers' logits [T, V] of a prompt with images whose placeholders are expanded."""
    tokens = torch.tensor([list(ids)])
    fields: dict[str, Any] = {}
    if images:
        read = processor_of(family)(list(images), return_tensors="pt")
        types = (tokens == place_of(family)).int()
        fields["pixel_values"] = read["pixel_values"]
        if family == "gemma3":
            fields["token_type_ids"] = types
        elif family.startswith("gemma4"):
            fields |= {"image_position_ids": read["image_position_ids"], "mm_token_type_ids": types}
        else:
            fields |= {"image_grid_thw": read["image_grid_thw"], "mm_token_type_ids": types}
    with torch.no_grad():
        return model(tokens, **fields).logits[0]
