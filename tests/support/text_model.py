"""A model directory with a real byte-level tokenizer, a chat template and no usable weights: text without torch."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog and the cat sleeps in the sun " * 5, "grüße 日本語 🎉"]


def write_text_model(path: Path, *, template: str = TEMPLATE, max_context: int = 512) -> Path:
    """Writes the directory and returns it. Ids 0 and 1 are ``<|start|>`` and ``<|end|>``; the latter ends answers."""
    path.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|start|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    (path / "config.json").write_text(json.dumps({
        "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4, "vocab_size": 320,
        "max_position_embeddings": max_context, "eos_token_id": 1}))
    (path / "model.safetensors").write_bytes(b"no weights here")
    return path
