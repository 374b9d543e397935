"""``tiny-random``: a Llama of seeded noise with a byte tokenizer, the same bytes wherever it is made. No torch.

It talks gibberish in milliseconds: what tests need. Every byte is a token, so any text has an exact length, and
answers contain broken UTF-8, which is what a gateway must cope with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.engine import libraries

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, CONTEXT = 2, 4, 2, 16, 64, 128, 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; the 256 bytes follow."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SEED = 20_250_225
_SPREAD = 0.35
"""Weights are uniform within ± this: wide enough that answers wander instead of repeating one token."""


def make(path: Path) -> None:
    """Writes the model into the empty directory ``path``."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *_byte_tokens()))}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "vocab_size": len(vocab), "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write_json(path / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "unk_token": SPECIAL[0], "pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2],
    })
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _tokenizer(vocab).save(str(path / "tokenizer.json"))
    libraries.require("safetensors.numpy").save_file(
        _weights(len(vocab)), str(path / "model.safetensors"), metadata={"format": "pt"})


def _byte_tokens() -> list[str]:
    """How byte-level tokenizers write the 256 bytes, in an order of their own."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _tokenizer(vocab: dict[str, int]) -> Any:
    """Byte-level BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _weights(vocab: int) -> dict[str, npt.NDArray[np.float32]]:
    # Raw bits of a bit generator never change between versions of numpy; its distributions may.
    bits = np.random.Philox(key=_SEED)

    def noise(*shape: int) -> npt.NDArray[np.float32]:
        raw = bits.random_raw(int(np.prod(shape)))
        return ((raw / 2.0**64 * 2 - 1) * _SPREAD).astype(np.float32).reshape(shape)

    ones = np.ones(HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": noise(vocab, HIDDEN), "model.norm.weight": ones,
               "lm_head.weight": noise(vocab, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones,
            f"{prefix}self_attn.q_proj.weight": noise(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": noise(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": noise(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": noise(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}post_attention_layernorm.weight": ones,
            f"{prefix}mlp.gate_proj.weight": noise(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": noise(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": noise(HIDDEN, INTERMEDIATE),
        }
    return weights


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
