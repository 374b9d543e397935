"""Paged attention behind transformers' attention interface.

The model's classes project, normalise and rotate; then they call :func:`paged_attention` with this pass's queries,
keys and values. It writes keys and values to the pool, tells the pass that the layer's KV is there, and attends.
Grouped queries are never paid for by copying keys: they are laid out beside each other as queries of one KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from shared.engine.batch import Batch, DecodeGroup, PrefillRow

NAME = "moonbus_paged"
"""The attention implementation's name in transformers' registry."""


class Pass:
    """One forward pass as the attention sees it: the plan, and who wants to know that a layer's KV is in the pool."""

    def __init__(self, batch: Batch, on_layer: Callable[[int], None] | None) -> None:
        self.batch, self.on_layer = batch, on_layer
        self.layers: list[int] = []
        """Layers whose KV this pass has written, in order."""

    def written(self, layer: int) -> None:
        """Layer ``layer`` of every row's new tokens is in the pool."""
        self.layers.append(layer)
        if self.on_layer is not None:
            self.on_layer(layer)


def register(interface: Any, masks: Any) -> None:
    """Makes :data:`NAME` known to transformers. Idempotent."""
    interface.register(NAME, paged_attention)
    masks.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """The plan has its own masks."""


def paged_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                    attention_mask: torch.Tensor | None, *, paged: Pass, scaling: float | None = None,
                    sliding_window: int | None = None, softcap: float | None = None,
                    **_: Any) -> tuple[torch.Tensor, None]:
    """Attends ``query`` [1, heads, tokens, head_dim] over the pool after storing ``key`` and ``value``
    [1, kv_heads, tokens, head_dim] there; returns [1, tokens, heads, head_dim].

    ``sliding_window`` is how many positions a query sees, itself included; ``softcap`` bounds scores by tanh.
    """
    batch, layer = paged.batch, module.layer_idx
    offset = batch.layer_offset(layer)
    _store(batch, key, value, offset)
    paged.written(layer)
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    for i, row in enumerate(batch.prefills):
        mask = batch.prefill_mask(i, sliding_window)
        if row.start == 0:
            keys, values = key[0, :, row.tokens], value[0, :, row.tokens]
        else:
            keys, values = _context(batch, row, offset)
        grouped = query[0, :, row.tokens].unflatten(0, (keys.shape[0], -1))  # [kv_heads, group, new, head_dim]
        attended = _attend(grouped, keys[:, None], values[:, None], mask, scaling, softcap)
        out[row.tokens] = attended.flatten(0, 1).transpose(0, 1)
    for i, group in enumerate(batch.decodes):
        keys, values = _context(batch, group, offset)  # [rows, kv_heads, context, head_dim]
        grouped = query[0].transpose(0, 1)[group.tokens].unflatten(1, (keys.shape[1], -1))
        mask = batch.decode_mask(i, sliding_window)
        if mask is None:
            attended = _attend(grouped, keys, values, None, scaling, softcap, causal=False)
        else:
            attended = _attend(grouped, keys, values, mask.expand(-1, -1, grouped.shape[2], -1), scaling, softcap)
        out[group.tokens] = attended.flatten(1, 2)
    return out[None], None


def _store(batch: Batch, key: torch.Tensor, value: torch.Tensor, offset: int) -> None:
    vectors = batch.pool.vectors
    at = batch.vectors + offset * batch.pool.spec.block_tokens
    vectors.index_put_((at[0],), key[0])
    vectors.index_put_((at[1],), value[0])


def _context(batch: Batch, rows: PrefillRow | DecodeGroup, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of whole contexts, gathered in one copy: [..., kv_heads, context, head_dim] each."""
    length = rows.end if isinstance(rows, PrefillRow) else rows.longest
    pages = rows.pages + offset
    gathered = batch.pool.pages.index_select(0, pages.flatten()).view(*pages.shape[:-1], -1, batch.pool.spec.head_dim)
    return gathered[0, ..., :length, :], gathered[1, ..., :length, :]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
            scaling: float | None, softcap: float | None, *, causal: bool | None = None) -> torch.Tensor:
    """Softmax attention over the last two dimensions; the first two are broadcast. No mask means causal."""
    causal = mask is None if causal is None else causal
    shape = query.shape[:2]
    key, value = key.expand(*shape, -1, -1), value.expand(*shape, -1, -1)
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scaling)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    elif causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
