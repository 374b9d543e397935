"""When a soak is a failure."""

from __future__ import annotations

import dataclasses

from load.bench.histogram import Histogram
from load.bench.processes import Footprint
from load.bench.soak import ALLOWED, SoakResult, excess

START = Footprint(descriptors=40, threads=20, rss_bytes=100 << 20)
AT_THE_EDGE = Footprint(START.descriptors + ALLOWED.descriptors, START.threads + ALLOWED.threads,
                        START.rss_bytes + ALLOWED.rss_bytes)


def histogram(fast: int, slow: int) -> Histogram:
    made = Histogram()
    for duration_s in [0.001] * fast + [0.1] * slow:
        made.add(duration_s)
    return made


def test_growth_within_the_allowance_is_no_leak() -> None:
    assert excess(START, START) == excess(START, AT_THE_EDGE) == excess(AT_THE_EDGE, START) == ""


def test_each_kind_of_growth_beyond_it_is() -> None:
    more = dataclasses.replace(AT_THE_EDGE, descriptors=57, threads=29, rss_bytes=125 << 20)
    assert excess(START, more) == ("went from 40 to 57 descriptors, went from 20 to 29 threads, "
                                   "went from 100 to 125 MiB of memory")
    result = SoakResult(everything=histogram(100, 0), footprints={7: (START, more), 8: (START, START)})
    assert len(result.problems()) == 1 and "process 7" in result.problems()[0]


def test_starvation_is_a_p99_beyond_twenty_times_the_p50() -> None:
    assert SoakResult(everything=histogram(990, 10)).problems() == []
    starving = SoakResult(everything=histogram(980, 20))
    assert starving.is_starving and "starvation" in starving.problems()[0]


def test_failed_pushes_and_none_at_all_are_failures() -> None:
    assert SoakResult(everything=histogram(9, 0), failed=2, error="gone").problems() == [
        "2 pushes failed, the first one so: gone"]
    assert SoakResult().problems() == ["no push succeeded"]
