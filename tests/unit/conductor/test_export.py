"""What the conductor shows of its state as metrics."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.conductor.core.machine import Conductor
from services.conductor.shell import _Export
from shared.ids import WorkerId
from shared.messages import Bye
from tests.unit.conductor.builders import (
    OTHER_SPEC,
    answer,
    ask,
    chain,
    evicted,
    hello,
    life_of,
    load,
    progress,
    stage,
    stored,
)

P1, D1, D2 = WorkerId("p1"), WorkerId("d1"), WorkerId("d2")


def placements() -> dict[tuple[str, str], float]:
    return {(sample.labels["prefill"], sample.labels["decode"]): sample.value
            for metric in REGISTRY.collect() for sample in metric.samples
            if sample.name == "moonbus_conductor_placements_total"}


def test_placements_on_workers_that_are_gone_are_not_shown_for_ever() -> None:
    play, export = stage(hello("p1"), hello("d1", "decode"), hello("d2", "decode")), _Export()
    for decode in (D1, D2, D2):
        export.placed(P1, decode)
    export.update(play.machine.statistics())  # type: ignore[attr-defined]
    assert placements() == {(P1, D1): 1.0, (P1, D2): 2.0}
    play >> Bye(worker=D1, incarnation=life_of("d1"))
    export.update(play.machine.statistics())  # type: ignore[attr-defined]
    assert placements() == {(P1, D2): 2.0}
    play >> Bye(worker=P1, incarnation=life_of("p1"))
    export.update(play.machine.statistics())  # type: ignore[attr-defined]
    assert placements() == {}


def dropped() -> dict[str, float]:
    return {why: REGISTRY.get_sample_value("moonbus_conductor_kv_events_dropped_total", {"why": why}) or 0.0
            for why in ("stale", "spec")}


def test_events_of_strangers_of_earlier_lives_and_of_other_specs_are_counted_and_change_nothing() -> None:
    play, export, doc = stage(hello("p1", life=2), hello("d1", "decode")), _Export(), chain("doc", 3)
    machine, before = play.machine, dropped()
    assert isinstance(machine, Conductor)
    for event, stale, spec in (
        (stored("stranger", 1, doc), 1, 0), (evicted("stranger", 2, doc), 2, 0),
        (stored("p1", 1, doc, life=1), 3, 0), (evicted("p1", 7, doc, life=1), 4, 0),
        (stored("p1", 1, doc, life=2, spec=OTHER_SPEC), 4, 1),
        (stored("p1", 1, doc, life=2), 5, 1),  # the same number again
    ):
        (play >> event).done()
        export.update(machine.statistics())
        assert dropped() == {"stale": before["stale"] + stale, "spec": before["spec"] + spec}, event
        assert sum(machine.statistics().blocks.values()) == 0, event


def test_what_is_refused_and_what_does_not_fit_is_counted_once() -> None:
    play = stage(hello("p1"), hello("d1", "decode"), max_blocks=3)
    export = _Export()
    play >> stored("p1", 1, chain("doc", 5)) >> load("p1", kv_seq=1, queued=-1)
    before = REGISTRY.get_sample_value("moonbus_conductor_refused_reports_total", {"kind": "load"}) or 0.0
    assert export.update(play.machine.statistics()) == 2  # type: ignore[attr-defined]
    assert export.update(play.machine.statistics()) == 0  # type: ignore[attr-defined]
    assert REGISTRY.get_sample_value("moonbus_conductor_refused_reports_total", {"kind": "load"}) == before + 1
    assert (REGISTRY.get_sample_value("moonbus_conductor_index_bytes") or 0) > 0


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"moonbus_conductor_{name}", labels)


def test_errors_and_advice_are_shown_for_as_long_as_there_is_somebody_they_are_about() -> None:
    play, export = stage(hello("p1"), hello("p2"), hello("d1", "decode")), _Export()
    machine = play.machine
    assert isinstance(machine, Conductor)
    answer(play, ask("r1", [], tokens=1000))
    play >> progress("r1", "p1", "prefilled", prefill_s=2.02, num_tokens=1000)
    export.update(machine.statistics())
    export.advise(machine.told_advice(play.now))
    assert value("estimate_relative_error", worker="p1", model="prefill") == pytest.approx(0.5)
    assert value("advised_workers", model="toy", role="prefill") == 2.0
    assert 0 < (value("needed_workers", model="toy", role="prefill") or 0.0) < 2
    for worker in ("p1", "p2", "d1"):
        play >> Bye(worker=WorkerId(worker), incarnation=life_of(worker))
    export.update(machine.statistics())
    export.advise(machine.told_advice(play.now))
    assert value("estimate_relative_error", worker="p1", model="prefill") is None
    assert value("advised_workers", model="toy", role="prefill") is None


def test_what_several_cache_specs_of_a_model_need_is_added_up() -> None:
    play, export = stage(hello("p1"), hello("d1", "decode")), _Export()
    machine = play.machine
    assert isinstance(machine, Conductor)
    answer(play, ask("r", [], tokens=1000))
    (one,) = machine.told_advice(play.now)
    export.advise([one, msgspec.structs.replace(one, spec=OTHER_SPEC.digest, needed_prefill=2.5, best_decode=4)])
    assert value("needed_workers", model="toy", role="prefill") == pytest.approx(one.needed_prefill + 2.5)
    assert value("advised_workers", model="toy", role="decode") == 5.0
    export.advise([])
    assert value("needed_workers", model="toy", role="prefill") is None
