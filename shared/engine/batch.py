"""A ragged batch: rows of new tokens with their history in the pool, and the plan to attend over them.

The rows' tokens lie back to back as one sequence. A plan is made once a forward pass and used by every layer, so
a layer runs a handful of tensor operations and no Python a token. Per row, positions are half-open intervals::

    [0, start)              in the pool already (earlier chunks, reused prefix, earlier steps)
    [start, start + new)    computed by this pass; written to the pool before anything attends
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.engine.kv_pool import KVPool

_SCRATCH_BYTES = 4 * 2**20
"""Keys and values that decode rows gather at once. About a CPU core's cache: measured, 8 rows of 2,000 tokens
gathered in one go take half again as long as one by one, while short contexts gain from going together."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a pass."""

    tokens: npt.NDArray[np.uint32]
    """New tokens, at least one."""
    start: int
    """Position of the first of them: how many tokens the pool already holds."""
    blocks: Sequence[int]
    """Slots of the pool that hold (or will hold) positions from 0; at least ``ceil(end / block_tokens)`` of them.

    The attention only writes positions ``start`` and later, so leading slots may be shared with other requests.
    """

    @property
    def end(self) -> int:
        """Tokens of context after this pass."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Several new tokens of one row."""

    tokens: slice
    """Where they lie in the batch."""
    start: int
    end: int
    pages: torch.Tensor
    """Int64 [2, kv_heads, blocks]: layer 0's pages of keys and values, in order of position."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one new token each and contexts of similar length, attended together."""

    tokens: torch.Tensor
    """Int64 [rows]: where they lie in the batch."""
    ends: torch.Tensor
    """Int64 [rows]: context lengths, the new token included."""
    longest: int
    shortest: int
    """Of ``ends``."""
    pages: torch.Tensor
    """Int64 [2, rows, kv_heads, blocks], padded with pages of slot 0, which ``ends`` masks."""


class Batch:
    """The plan of one pass; valid for that pass only."""

    def __init__(self, rows: Sequence[Row], pool: KVPool) -> None:
        self.pool = pool
        self.num_tokens = sum(len(row.tokens) for row in rows)
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        device, spec = pool.device, pool.spec
        tables = [_table(row, pool) for row in rows]
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        bounds = np.cumsum([0, *(len(row.tokens) for row in rows)])
        slots = np.concatenate([table[np.arange(row.start, row.end) // spec.block_tokens]
                                for row, table in zip(rows, tables, strict=True)])
        pages = _pages(slots, pool)  # [2, kv_heads, tokens]
        self.vectors = torch.from_numpy(pages * spec.block_tokens + positions % spec.block_tokens).to(device)
        """Int64 [2, kv_heads, tokens]: where layer 0's new keys and values go in ``pool.vectors``."""
        tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
        self.input_ids = torch.from_numpy(tokens).to(device)[None]
        """Int64 [1, tokens]."""
        self.positions = torch.from_numpy(positions.astype(np.int64)).to(device)[None]
        """Int64 [1, tokens]."""
        self.last = torch.from_numpy(bounds[1:] - 1).to(device)
        """Int64 [rows]: each row's last token in the batch."""
        self.prefills = [
            PrefillRow(slice(int(bounds[i]), int(bounds[i + 1])), row.start, row.end,
                       torch.from_numpy(_pages(tables[i], pool)).to(device))
            for i, row in enumerate(rows) if len(row.tokens) > 1
        ]
        decodes = [i for i, row in enumerate(rows) if len(row.tokens) == 1]
        self.decodes = [_decode_group(group, rows, tables, bounds, pool)
                        for group in _grouped(decodes, [len(table) for table in tables], pool)]
        self.written = sorted(set(slots.tolist()))
        """Slots that this pass writes to."""
        self._scratch = self._make_scratch()

    def layer_offset(self, layer: int) -> int:
        """What to add to layer 0's page numbers to get those of ``layer``."""
        return layer * self.pool.layer_pages

    def _make_scratch(self) -> torch.Tensor:
        """Room for the largest gather: one allocation a pass, since touching fresh memory costs more than copying."""
        gathers = [row.pages.numel() for row in self.prefills if row.start > 0]
        gathers += [group.pages.numel() for group in self.decodes]
        shape = (max(gathers, default=0), *self.pool.pages.shape[1:])
        return torch.empty(shape, dtype=self.pool.pages.dtype, device=self.pool.device)

    def gather(self, pages: torch.Tensor, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``layer`` in ``pages`` [2, ..., blocks]: [..., length, head_dim] each.

        Valid until the next call, which overwrites them.
        """
        into = self._scratch[:pages.numel()]
        torch.index_select(self.pool.pages, 0, (pages + self.layer_offset(layer)).flatten(), out=into)
        both = into.view(*pages.shape[:-1], -1, self.pool.spec.head_dim)
        return both[0, ..., :length, :], both[1, ..., :length, :]

    def prefill_mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Additive mask [new, context] of ``prefills[index]``; ``None`` when plain causal from position 0 is right."""
        row = self.prefills[index]
        if row.start == 0 and (window is None or row.end <= window):
            return None
        key = (index, window)
        if key not in self._masks:
            device = self.pool.device
            query = torch.arange(row.start, row.end, device=device)[:, None]
            self._masks[key] = self._mask(query, torch.arange(row.end, device=device)[None], window)
        return self._masks[key]

    def decode_mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Additive mask [rows, 1, 1, context] of ``decodes[index]``; ``None`` when all rows see all of it."""
        group = self.decodes[index]
        if group.shortest == group.longest and (window is None or group.longest <= window):
            return None
        key = (-1 - index, window)
        if key not in self._masks:
            context = torch.arange(group.longest, device=self.pool.device)[None]
            self._masks[key] = self._mask(group.ends[:, None] - 1, context, window)[:, None, None]
        return self._masks[key]

    def _mask(self, query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return torch.zeros(hidden.shape, dtype=self.pool.blocks.dtype, device=hidden.device).masked_fill_(
            hidden, float("-inf"))


def _table(row: Row, pool: KVPool) -> npt.NDArray[np.int64]:
    """The slots that hold the row's context, checked: a wrong slot would be somebody else's KV."""
    needed = -(-row.end // pool.spec.block_tokens)
    if not len(row.tokens) or row.start < 0 or len(row.blocks) < needed:
        raise ValueError(f"a row of {len(row.tokens)} tokens from {row.start} needs {needed} blocks, "
                         f"got {len(row.blocks)}")
    table = np.asarray(row.blocks[:needed], dtype=np.int64)
    if table.min() < 0 or table.max() >= pool.num_blocks:
        raise ValueError(f"slots {table.min()}..{table.max()} are outside a pool of {pool.num_blocks}")
    return table


def _pages(slots: npt.NDArray[np.int64], pool: KVPool) -> npt.NDArray[np.int64]:
    """Layer 0's pages of ``slots`` [n]: [2, kv_heads, n]."""
    offsets = np.arange(pool.layer_pages, dtype=np.int64).reshape(2, pool.spec.kv_heads, 1)
    return slots * (pool.spec.layers * pool.layer_pages) + offsets


def _grouped(rows: list[int], lengths: Sequence[int], pool: KVPool) -> Iterator[list[int]]:
    """Splits rows into groups that fit the scratch memory, with contexts alike: none has twice another's blocks."""
    block_bytes = pool.layer_pages * pool.pages[0].nbytes
    group: list[int] = []
    for i in sorted(rows, key=lambda i: lengths[i]):
        if group and (lengths[i] > 2 * lengths[group[0]]
                      or (len(group) + 1) * lengths[i] * block_bytes > _SCRATCH_BYTES):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _decode_group(group: list[int], rows: Sequence[Row], tables: Sequence[npt.NDArray[np.int64]],
                  bounds: npt.NDArray[np.int64], pool: KVPool) -> DecodeGroup:
    device = pool.device
    padded = np.zeros((len(group), max(len(tables[i]) for i in group)), dtype=np.int64)
    for line, i in enumerate(group):
        padded[line, :len(tables[i])] = tables[i]
    pages = _pages(padded.reshape(-1), pool).reshape(2, pool.spec.kv_heads, *padded.shape).swapaxes(1, 2)
    ends = [rows[i].end for i in group]
    return DecodeGroup(
        tokens=torch.from_numpy(bounds[group]).to(device),
        ends=torch.tensor(ends, device=device),
        longest=max(ends),
        shortest=min(ends),
        pages=torch.from_numpy(np.ascontiguousarray(pages)).to(device),
    )
