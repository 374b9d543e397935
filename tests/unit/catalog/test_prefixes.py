"""Stretches of a prefix tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.catalog.prefixes import gather
from shared.ids import BlockKey
from shared.messages import BlockRow


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


def row(number: int, parent: int, depth: int, *, hits: int = 0, request: str = "r") -> BlockRow:
    return BlockRow(key=key(number), parent=key(parent), depth=depth, model="m", tenant="t", tokens=16, nbytes=8,
                    created_by="w", created_at_s=float(number), request=request, hits=hits, last_used_at_s=None,
                    replicas=[])


def test_a_trunk_and_two_branches() -> None:
    blocks = [row(1, 0, 0, hits=5), row(2, 1, 1, hits=5), row(3, 2, 2, hits=4), row(4, 2, 2, hits=1),
              row(5, 4, 3, hits=1)]
    found = gather(reversed(blocks), {key(2): ["a", "b"]})
    assert [(part.key[0], part.parent[0], part.depth, part.blocks, part.hits, part.tokens) for part in found] == [
        (2, 0, 0, 2, 5, 32), (3, 2, 2, 1, 4, 16), (5, 2, 2, 2, 1, 32)]
    assert found[0].workers == ["a", "b"]


def test_another_request_begins_another_stretch() -> None:
    assert [part.blocks for part in gather([row(1, 0, 0), row(2, 1, 1, request="s")], {})] == [1, 1]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=30))
def test_every_block_is_in_one_stretch(links: list[tuple[int, int]]) -> None:
    """Each block hangs below an earlier one, or below one that is not known."""
    blocks = [row(number, min(parent, number - 1), 0, hits=hits) for number, (parent, hits) in enumerate(links, 1)]
    found = gather(blocks, {})
    assert sum(part.blocks for part in found) == len(blocks)
    ends = [part.key for part in found]
    assert len(set(ends)) == len(ends)
    seen = {key(0)}
    for part in found:
        assert part.parent in seen, "parents first"
        seen.add(part.key)
