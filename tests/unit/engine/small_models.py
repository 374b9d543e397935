"""Small random models, built in memory: every architecture the engine promises, in a few milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.engine import attention, libraries
from shared.engine.kv_pool import KVPool
from shared.engine.runtime import Engine
from shared.kv import CacheSpec

VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, CONTEXT = 211, 3, 6, 2, 8, 48, 512
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Pair:
    """The same weights twice: in our engine, and in plain transformers."""

    engine: Engine
    plain: Any

    def expected(self, tokens: np.ndarray) -> torch.Tensor:
        """Plain transformers' logits of every position: [tokens, vocab]."""
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logits: torch.Tensor = self.plain(ids, use_cache=False).logits[0]
        return logits


def build_pair(architecture: str, *, num_blocks: int = 64, **extra: Any) -> Pair:
    """A random model of ``architecture`` (``Llama``, ``Qwen2`` ...) with ``extra`` configuration."""
    transformers = libraries.transformers()
    from transformers.masking_utils import AttentionMaskInterface

    attention.register(transformers.AttentionInterface, AttentionMaskInterface)
    config_class = getattr(transformers, f"{architecture}Config")
    model_class = getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")
    settings = {
        "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "hidden_size": HIDDEN, "intermediate_size": 64, "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **extra,
    }
    torch.manual_seed(7)
    plain, paged = (
        model_class._from_config(config_class(**settings, attn_implementation=kind), dtype=torch.float32).eval()
        for kind in ("eager", attention.NAME)
    )
    paged.load_state_dict(plain.state_dict())
    config = plain.config
    spec = CacheSpec(
        model=architecture, weights_digest="", tokenizer_digest="", dtype="float32", layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads, head_dim=settings["head_dim"], block_tokens=BLOCK_TOKENS,
        max_context=CONTEXT,
    )
    return Pair(Engine(paged, spec, KVPool(spec, num_blocks)), plain)
