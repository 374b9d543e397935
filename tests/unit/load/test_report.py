"""The page: it renders for any set of records, is well formed, self-contained, and says what the records say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import msgspec
import pytest

from load import plots, report
from load.record import RunInfo, RunRecord
from load.slo import Slo, summarize

INFO = RunInfo(source="live", trace="conversation <trace>", url="http://127.0.0.1:1", model="m", api="completions",
               started_at_s=0.0, rate_scale=2.0, length_scale=0.05, max_input=4000, output_scale=1.0, max_output=64,
               max_in_flight=4, seed=0, slo_ttft_s=1.0, slo_tbt_s=0.1, planned=3, duration_s=3.0)
OK = RunRecord(index=0, scheduled_s=0.0, sent_s=0.1, finished_s=1.0, outcome="ok", input_tokens=90, output_tokens=2,
               first_token_s=0.5, gaps_s=[0.05], prompt_tokens=90, completion_tokens=2, cached_tokens=64,
               predicted_hit_tokens=64, shared_tokens=80, finish="length", status=200)
REJECTED = RunRecord(index=1, scheduled_s=1.0, sent_s=1.0, finished_s=1.1, outcome="rejected", input_tokens=9,
                     output_tokens=2, status=429, code="ttft", message="too <slow>", retry_after_s=2.0)
FAILED = RunRecord(index=2, scheduled_s=2.0, sent_s=2.0, finished_s=2.5, outcome="failed", input_tokens=9,
                   output_tokens=2, code="broken_stream", message="peer left")
DROPPED = RunRecord(index=3, scheduled_s=2.0, sent_s=2.0, finished_s=2.0, outcome="dropped", input_tokens=9,
                    output_tokens=2, code="max_in_flight")


class Page(HTMLParser):
    """Checks that elements nest, and gathers ids, texts and what a browser would fetch."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value is not None:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action") and value is not None and not value.startswith("#"):
                self.fetched.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("records", [
    [OK, REJECTED, FAILED, DROPPED], [OK], [REJECTED], [DROPPED], [],
    [msgspec.structs.replace(OK, prompt_tokens=None, cached_tokens=None, predicted_hit_tokens=None, gaps_s=[])],
], ids=["mixed", "one", "only-rejected", "only-dropped", "none", "no-usage"])
def test_any_records_make_a_self_contained_page(records: list[RunRecord]) -> None:
    page = Page(report.render(INFO, records))
    assert page.fetched == []
    own = [name for name in page.ids if not re.match(r"(figure|axes|patch|matplotlib|[xy]tick|line2d|text|legend|"
                                                     r"FillBetween|PolyCollection|PathCollection)", name)]
    assert len(own) == len(set(own))


def test_the_page_says_what_the_records_say() -> None:
    html = report.render(INFO, [OK, REJECTED, FAILED, DROPPED])
    text = " ".join(Page(html).text.split())
    assert "1 of 4" in text and "rejected: ttft" in text and "too <slow>" in text and "peer left" in text
    assert "conversation <trace> at 2× on m" in text and "<trace>" not in html
    assert "prefers-color-scheme: dark" in html
    assert "50.0 ms" in text  # the one gap
    assert "stopped early" not in text


def test_an_unfinished_run_is_called_so() -> None:
    killed = msgspec.structs.replace(INFO, duration_s=None)
    assert "not brought to its end: 1 of 3" in report.render(killed, [OK])
    stopped = msgspec.structs.replace(INFO, interrupted=True)
    assert "stopped early: 1 of 3" in report.render(stopped, [OK])


def test_a_client_that_was_too_slow_is_called_so() -> None:
    late = msgspec.structs.replace(OK, sent_s=2.0, first_token_s=2.5, finished_s=3.0)
    assert "could not keep the schedule" in report.render(INFO, [late])
    assert "could not keep the schedule" not in report.render(INFO, [OK])


def test_figures_are_well_formed_theme_free_and_repeatable() -> None:
    records, bounds = [OK, REJECTED, FAILED], Slo(1.0, 0.1)
    for draw in (lambda: plots.latency_cdf(records, bounds), lambda: plots.goodput(records, bounds),
                 lambda: plots.hit_tokens(records), lambda: plots.rejections(summarize(records, bounds)),
                 lambda: plots.in_flight(records)):
        svg = draw()
        assert ET.fromstring(svg).tag.endswith("svg")
        assert not re.search(r"#[0-9a-f]{6}\b", svg.replace("#ffffff", "")), "a fixed colour ignores the reader's theme"
        assert svg == draw()
