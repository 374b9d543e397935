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

from shared.engine.batch import Batch

NAME = "moonbus_paged"
"""The attention implementation's name in transformers' registry."""


class Pass:
    """One forward pass as the attention sees it: the plan, and who wants to know that a layer's KV is in the pool."""

    def __init__(self, batch: Batch, on_layer: Callable[[int], None] | None) -> None:
        self.batch, self._on_layer = batch, on_layer

    def written(self, layer: int) -> None:
        """Layer ``layer`` of every row's new tokens is in the pool: in the host's memory too for who listens."""
        if self._on_layer is not None:
            self.batch.pool.to_host(self.batch.written, layer)
            self._on_layer(layer)


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
    batch, layer, kv_heads = paged.batch, module.layer_idx, key.shape[1]
    _store(batch, key[0], value[0], layer)
    paged.written(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = query[0].view(kv_heads, -1, *query.shape[2:])  # [kv_heads, group, tokens, head_dim]
    out = query.new_empty(query.shape[2], kv_heads, queries.shape[1], query.shape[3])
    for i, row in enumerate(batch.prefills):
        mask = batch.prefill_mask(i, sliding_window)
        if row.start == 0:
            keys, values = key[0, :, row.tokens], value[0, :, row.tokens]
        else:
            keys, values = batch.gather(row.pages, layer, row.end)
        attended = _attend(queries[:, :, row.tokens], keys[:, None], values[:, None], mask, scale, softcap)
        out[row.tokens] = attended.permute(2, 0, 1, 3)
    for i, group in enumerate(batch.decodes):
        keys, values = batch.gather(group.pages, layer, group.longest)  # [rows, kv_heads, context, head_dim]
        mask = batch.decode_mask(i, sliding_window)
        one_each = queries.index_select(2, group.tokens).permute(2, 0, 1, 3)  # the group stands where tokens stood
        out.index_copy_(0, group.tokens, _weigh(one_each, keys, values, mask, scale, softcap))
    return out.flatten(1, 2)[None], None


def _store(batch: Batch, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
    """Writes [kv_heads, tokens, head_dim] of keys and values to their slots."""
    at = batch.vectors + batch.layer_offset(layer) * batch.pool.spec.block_tokens
    batch.pool.vectors.index_put_((at[0],), key)
    batch.pool.vectors.index_put_((at[1],), value)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float,
            softcap: float | None) -> torch.Tensor:
    """Many queries a head: [kv_heads, group, new, head_dim] over [kv_heads, 1, context, head_dim].

    No mask means causal.
    """
    if softcap is not None:
        if mask is None:
            hidden = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu_(1)
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        return _weigh(query, key, value, mask, scale, softcap)
    shape = query.shape[:2]
    return functional.scaled_dot_product_attention(
        query, key.expand(*shape, -1, -1), value.expand(*shape, -1, -1), mask, is_causal=mask is None, scale=scale)


def _weigh(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float,
           softcap: float | None) -> torch.Tensor:
    """Softmax attention spelled out, broadcast over leading dimensions; no mask means that all is seen.

    For the few queries of a decode row this is faster than the fused kernel, which repacks all keys first.
    """
    scores = (query * scale) @ key.transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
