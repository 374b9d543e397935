"""Blocks of a prefix tree, gathered into stretches without a branch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shared.messages import BlockRow, PrefixRow


def gather(blocks: Iterable[BlockRow], holders: Mapping[bytes, Sequence[str]]) -> list[PrefixRow]:
    """Stretches of ``blocks``, parents first, siblings by hits; ``holders`` says who has a block: {key: workers}.

    A stretch goes on as long as a block has one child among ``blocks``, reused as often as itself and made for the
    same request: what differs has something to tell.
    """
    known = {block.key: block for block in blocks}
    children: dict[bytes, list[BlockRow]] = {}
    for block in known.values():
        children.setdefault(block.parent, []).append(block)
    tops = [block for block in known.values() if block.parent not in known]
    rows: list[PrefixRow] = []
    waiting = sorted(tops, key=_coldest_first)
    while waiting:
        stretch = [waiting.pop()]
        below = children.get(stretch[-1].key, [])
        while len(below) == 1 and _story(below[0]) == _story(stretch[-1]):
            stretch.append(below[0])
            below = children.get(stretch[-1].key, [])
        waiting.extend(sorted(below, key=_coldest_first))
        rows.append(_row(stretch, list(holders.get(stretch[-1].key, ()))))
    return rows


def _coldest_first(block: BlockRow) -> tuple[int, float, bytes]:
    return block.hits, block.created_at_s, block.key


def _story(block: BlockRow) -> object:
    return block.hits, block.request, block.tenant


def _row(stretch: Sequence[BlockRow], workers: list[str]) -> PrefixRow:
    first, last = stretch[0], stretch[-1]
    return PrefixRow(
        key=last.key, parent=first.parent, depth=first.depth, blocks=len(stretch),
        tokens=sum(block.tokens for block in stretch), nbytes=sum(block.nbytes for block in stretch),
        model=last.model, tenant=last.tenant, hits=last.hits, last_used_at_s=last.last_used_at_s,
        created_by=last.created_by, created_at_s=last.created_at_s, request=last.request, workers=workers)
