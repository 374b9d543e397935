"""Owners that do not deliver are left alone for a while."""

from __future__ import annotations

from shared.ids import WorkerId
from shared.store.owners import FAILURES, MAX_OWNERS, MAX_PAUSE_S, PATIENCE_S, PAUSE_S, Owners

SICK, WELL = WorkerId("sick"), WorkerId("well")


def stalled(owners: Owners, now: float) -> None:
    owners.heard(SICK, blocks=0, why="deadline", waited_s=PATIENCE_S, now=now)


def test_one_that_sent_nothing_in_time_is_left_alone_longer_each_time() -> None:
    owners, now, pauses = Owners(), 0.0, []
    for _ in range(8):
        stalled(owners, now)
        assert not owners.allows(SICK, now) and owners.allows(WELL, now)
        pause_s = next(s for s in range(1, 100) if owners.allows(SICK, now + s))
        pauses.append(pause_s)
        now += pause_s
    assert pauses == sorted(pauses) and pauses[0] == PAUSE_S and pauses[-1] == MAX_PAUSE_S


def test_a_block_that_came_forgives() -> None:
    owners = Owners()
    for now in (0.0, 1.0, 3.0):
        stalled(owners, now)
    owners.heard(SICK, blocks=1, why="deadline", waited_s=9.0, now=8.0)
    assert owners.allows(SICK, 8.0)
    stalled(owners, 8.0)
    assert owners.allows(SICK, 8.0 + PAUSE_S)


def test_failures_at_once_count_together_and_short_waits_and_honest_answers_do_not() -> None:
    owners = Owners()
    for now in range(20):
        owners.heard(SICK, blocks=0, why="deadline", waited_s=PATIENCE_S / 2, now=now)
        owners.heard(SICK, blocks=0, why="missing", waited_s=0.0, now=now)
        assert owners.allows(SICK, now)
    for _ in range(FAILURES):
        assert owners.allows(SICK, 20.0)
        owners.heard(SICK, blocks=0, why="peer", waited_s=0.0, now=20.0)
    assert not owners.allows(SICK, 20.0)


def test_memory_is_bounded() -> None:
    owners = Owners()
    for i in range(2 * MAX_OWNERS):
        owners.heard(WorkerId(f"w{i}"), blocks=0, why="path", waited_s=0.0, now=0.0)
    assert len(owners._breakers) == MAX_OWNERS
