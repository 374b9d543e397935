"""What the conductor shows of its state as metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY

from services.conductor.shell import _Export
from shared.ids import WorkerId
from shared.messages import Bye
from tests.unit.conductor.builders import hello, life_of, stage

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
