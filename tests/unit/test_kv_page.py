"""The drawn prefix tree: where bars lie, and that the page is whole by itself."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from services.cli.kv_page import MAX_LEAVES, draw, render
from shared.ids import BlockKey
from shared.messages import PrefixRow


def row(number: int, parent: int, *, hits: int = 1, blocks: int = 1, tenant: str = "acme",
        workers: tuple[str, ...] = ("prefill-1",)) -> PrefixRow:
    return PrefixRow(key=BlockKey(number.to_bytes(32, "big")), parent=BlockKey(parent.to_bytes(32, "big")), depth=0,
                     blocks=blocks, tokens=64 * blocks, nbytes=blocks, model="m", tenant=tenant, hits=hits,
                     last_used_at_s=90.0, created_by="w", created_at_s=10.0, request="r", workers=list(workers))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 10**6), st.integers(1, 300)), max_size=250))
def test_bars_have_their_own_places(links: list[tuple[int, int, int]]) -> None:
    rows = [row(number, min(parent, number - 1), hits=hits, blocks=blocks)
            for number, (parent, hits, blocks) in enumerate(links, 1)]
    drawing = draw(rows)
    assert len(drawing.bars) + drawing.hidden == len(rows)
    assert sum(not bar.below for bar in drawing.bars) <= MAX_LEAVES
    middles = [bar.y for bar in drawing.bars if not bar.below]
    assert len(set(middles)) == len(middles), "a line each"
    for bar in drawing.bars:
        assert 0 < bar.left < bar.right
        assert 0 < bar.y < drawing.height
        assert all(child.left > bar.right for child in bar.below)


def test_the_hottest_are_drawn() -> None:
    rows = [row(number, 0, hits=number) for number in range(1, 2 * MAX_LEAVES)]
    assert {bar.row.hits for bar in draw(rows).bars} == set(range(MAX_LEAVES, 2 * MAX_LEAVES))


def test_a_page_needs_nothing_and_trusts_nobody() -> None:
    page = render([row(1, 0, hits=9, tenant="<script>alert(1)</script>"), row(2, 1, hits=3), row(3, 1, workers=())],
                  title="Hot & cold", said="Three.", now_s=100.0)
    assert "<script>alert" not in page and "Hot &amp; cold" in page
    assert not re.findall(r"(?:src|href)\s*=|https?://|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page and "10 s ago" in page
    svg = re.search(r"<svg.*</svg>", page, re.S)
    assert svg is not None
    bars = ElementTree.fromstring(svg[0]).findall(".//g[@class='bar']")
    titles = [bar.findtext("title") or "" for bar in bars]
    assert len(titles) == 3 and "copies: prefill-1" in titles[0] and "copies: none" in titles[2]


def test_nothing_to_draw() -> None:
    assert "no block was reused yet" in render([], title="Hot", said="", now_s=0.0)
