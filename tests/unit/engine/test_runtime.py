"""The engine against plain transformers, and against itself in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.runtime import Engine, Row
from shared.errors import ModelError
from tests.unit.engine.small_models import BLOCK_TOKENS, LAYERS, Pair, build_pair

Tokens = Callable[..., np.ndarray]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 24},
    "Gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "Phi3": {"head_dim": 8, "hidden_size": 48},
    "Olmo2": {},
    "Granite": {"logits_scaling": 2.0},
    "Gemma": {},
    "Cohere": {},
    "SmolLM3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_plain_transformers(architecture: str, tokens: Tokens) -> None:
    pair = build_pair(architecture, **ARCHITECTURES[architecture])
    pair.engine.check(architecture)
    prompt = tokens(70)
    expected = pair.expected(prompt)
    slots = _shuffled(pair.engine, 6)

    whole = pair.engine.forward([Row(prompt, 0, slots[:5])])
    torch.testing.assert_close(whole[0], expected[-1], **TOLERANCE)
    for start, end in ((0, 32), (32, 64), (64, 69), (69, 70)):  # chunks, a ragged one, and a decode step
        chunked = pair.engine.forward([Row(prompt[start:end], start, slots)])
        torch.testing.assert_close(chunked[0], expected[end - 1], **TOLERANCE)


@pytest.mark.parametrize(("architecture", "extra", "why"), [
    ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, r"its logits differ from the model's own by"),
    ("Bloom", {"n_head": 6}, r"of 3 layers, attention ran in \[\]"),
    ("DeepseekV3", {}, r"size of tensor"),
])
def test_a_model_that_would_answer_nonsense_is_refused(architecture: str, extra: dict[str, Any], why: str) -> None:
    engine = build_pair(architecture, **extra).engine
    with pytest.raises(ModelError, match=f"^model m cannot be served over paged KV blocks: .*{why}") as caught:
        engine.check("m")
    assert "\n" not in str(caught.value)


def test_a_ragged_mixture_equals_separate_runs(llama: Pair, tokens: Tokens) -> None:
    engine, slots = llama.engine, _shuffled(llama.engine, 60)
    # (context so far, new tokens): whole prompts, a later chunk, decode rows of like and of very unlike lengths
    shapes = [(0, 20), (5, 1), (32, 30), (7, 1), (200, 1), (0, 1), (16, 2), (190, 1)]
    rows, expected = [], []
    for seed, (start, new) in enumerate(shapes):
        prompt = tokens(start + new, seed)
        needed = -(-(start + new) // BLOCK_TOKENS)
        mine, slots = slots[:needed], slots[needed:]
        if start:
            engine.forward([Row(prompt[:start], 0, mine)])
        rows.append(Row(prompt[start:], start, mine))
        expected.append(llama.expected(prompt)[-1])

    torch.testing.assert_close(engine.forward(rows), torch.stack(expected), **TOLERANCE)
    torch.testing.assert_close(engine.forward(rows[::-1]), torch.stack(expected[::-1]), **TOLERANCE)


def test_two_rows_share_the_blocks_of_a_prefix(llama: Pair, tokens: Tokens) -> None:
    engine, slots = llama.engine, _shuffled(llama.engine, 8)
    prefix = tokens(2 * BLOCK_TOKENS)
    engine.forward([Row(prefix, 0, slots[:2])])
    before = engine.pool.blocks[slots[:2]].clone()
    endings = [tokens(9, seed) for seed in (1, 2)]

    logits = engine.forward([Row(end, len(prefix), [*slots[:2], slots[3 + i]]) for i, end in enumerate(endings)])

    for got, end in zip(logits, endings, strict=True):
        torch.testing.assert_close(got, llama.expected(np.concatenate([prefix, end]))[-1], **TOLERANCE)
    assert torch.equal(engine.pool.blocks[slots[:2]], before)


def test_a_cached_prefix_gives_the_same_greedy_tokens(llama: Pair, tokens: Tokens) -> None:
    prompt = tokens(75)
    slots = _shuffled(llama.engine, 20)
    uncached = _greedy(llama.engine, prompt, slots[:7], reuse=0)
    assert uncached == _greedy(llama.engine, prompt, slots[:7], reuse=4 * BLOCK_TOKENS)
    # The prefix moved: copied to other slots, as a transfer would.
    llama.engine.pool.blocks[slots[10:14]] = llama.engine.pool.blocks[slots[:4]]
    assert uncached == _greedy(llama.engine, prompt, [*slots[10:14], *slots[14:17]], reuse=4 * BLOCK_TOKENS)


def test_layers_are_told_in_order_with_their_kv_in_the_pool(llama: Pair, tokens: Tokens) -> None:
    engine, slots = llama.engine, _shuffled(llama.engine, 3)
    prompt = tokens(3 * BLOCK_TOKENS)
    engine.forward([Row(prompt, 0, slots)])
    expected = engine.pool.blocks[slots].clone()
    engine.pool.blocks[slots] = float("nan")
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        torch.testing.assert_close(engine.pool.blocks[slots, layer], expected[:, layer])
        assert engine.pool.blocks[slots, layer + 1:].isnan().all()

    engine.forward([Row(prompt, 0, slots)], on_layer)
    assert seen == list(range(LAYERS))


def test_an_error_of_the_listener_reaches_the_caller(llama: Pair, tokens: Tokens) -> None:
    def on_layer(layer: int) -> None:
        raise ConnectionError("the peer is gone")

    with pytest.raises(ConnectionError, match="the peer is gone"):
        llama.engine.forward([Row(tokens(4), 0, [0])], on_layer)


@pytest.mark.parametrize(("count", "start", "blocks", "message"), [
    (17, 0, [0], "needs 2 blocks, got 1"),
    (1, 32, [0, 1], "needs 3 blocks, got 2"),
    (1, 0, [64], "outside a pool of 64"),
    (1, 0, [-1], "outside a pool of 64"),
    (0, 0, [0], "a row of 0 tokens"),
])
def test_a_row_that_does_not_fit_its_blocks_is_refused(llama: Pair, tokens: Tokens, count: int, start: int,
                                                       blocks: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama.engine.forward([Row(tokens(count), start, blocks)])


def _shuffled(engine: Engine, count: int) -> list[int]:
    """``count`` different slots in no order."""
    return [int(slot) for slot in np.random.default_rng(3).permutation(engine.pool.num_blocks)[:count]]


def _greedy(engine: Engine, prompt: np.ndarray, slots: list[int], *, reuse: int, steps: int = 20) -> list[int]:
    """The greedy answer when the KV of the first ``reuse`` tokens is taken from the pool."""
    answer: list[int] = []
    logits = engine.forward([Row(prompt[reuse:], reuse, slots)])
    while True:
        answer.append(int(logits[0].argmax()))
        if len(answer) == steps:
            return answer
        logits = engine.forward([Row(np.array(answer[-1:], np.uint32), len(prompt) + len(answer) - 1, slots)])
