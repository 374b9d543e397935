"""Who may stay at a crowded door."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from shared.store.door_crowd import IDLE_S, admit

MOST, MOST_OF_ONE = 8, 4


@dataclass(eq=False)
class Someone:
    peer: str
    heard_s: float
    has_entered: bool
    is_busy: bool


def may_leave(guest: Someone, now_s: float) -> bool:
    return not guest.has_entered or (not guest.is_busy and guest.heard_s + IDLE_S <= now_s)


arrivals = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.booleans(), st.floats(0, 1.5)), max_size=60)


@given(arrivals)
def test_the_bounds_hold_and_who_is_busy_stays(arrivals: list[tuple[str, bool, bool, float]]) -> None:
    guests: list[Someone] = []
    now_s = 0.0
    for peer, enters, is_busy, pause_s in arrivals:
        now_s += pause_s
        before, of = list(guests), Counter(guest.peer for guest in guests)
        admission = admit(peer, guests, now_s=now_s, most=MOST, most_of_one=MOST_OF_ONE)
        if admission.leaves is not None:
            leaves = admission.leaves
            assert admission.is_admitted and may_leave(leaves, now_s)
            assert of[peer] >= MOST_OF_ONE or len(before) >= MOST, "nobody leaves while there is room"
            crowd = [guest for guest in before if guest.peer == peer] if of[peer] >= MOST_OF_ONE else before
            assert leaves in crowd, "whoever has too many makes room among them"
            waiting = [guest for guest in crowd if not guest.has_entered]
            assert not waiting or not leaves.has_entered, "who shows no token goes before who did"
            alike = [guest for guest in crowd if guest.has_entered == leaves.has_entered and may_leave(guest, now_s)]
            assert of[leaves.peer] == max(of[guest.peer] for guest in alike)
            guests.remove(leaves)
        elif not admission.is_admitted:
            crowd = [guest for guest in before if guest.peer == peer] if of[peer] >= MOST_OF_ONE else before
            assert not any(may_leave(guest, now_s) for guest in crowd)
        if admission.is_admitted:
            guests.append(Someone(peer, now_s, enters, is_busy))
        assert len(guests) <= MOST
        assert max(Counter(guest.peer for guest in guests).values(), default=0) <= MOST_OF_ONE


def test_many_who_say_nothing_keep_nobody_out() -> None:
    guests = [Someone("flood", float(i), False, False) for i in range(MOST - 1)]
    guests.append(Someone("honest", 0.0, False, False))
    admission = admit("other", guests, now_s=10.0, most=MOST, most_of_one=MOST)
    assert admission.is_admitted and admission.leaves is guests[0], "of the flood, and the first that came"
