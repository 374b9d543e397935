"""What is copied to the SSD, in which order, and when the SSD is left alone."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shared.ids import BlockKey, OperationId
from shared.messages import StoredBlock
from shared.store.blocks import BlockPool
from shared.store.policies import make
from shared.store.policies.lru import Lru
from shared.store.tiers import WINDOW_BLOCKS, Breaker, plan_demotion
from tests.support.blocks import make_chain


def filled(*chains: list[StoredBlock], slots: int = 16, policy: Lru | None = None) -> BlockPool:
    """A pool that holds ``chains``, the first one the coldest."""
    pool = BlockPool(slots, policy or make("lru"))
    for now, blocks in enumerate(chains):
        operation = OperationId(f"fill-{now}")
        allocation = pool.allocate(operation, len(blocks), now=now)
        assert allocation is not None
        for slot, block in zip(allocation.slots, blocks, strict=True):
            pool.seal(operation, slot, block, now=now)
        pool.release(operation)
    return pool


def plan(pool: BlockPool, *, held: Callable[[BlockKey], bool] = lambda key: False, ahead: float = 1.0,
         limit: int = 100, fits: Callable[[StoredBlock], bool] = lambda block: True, capacity: int = 1000,
         room: int = 1000, least_odds: float = 0.0, behind: float = 0.0) -> list[StoredBlock]:
    oldest = [block for block in pool.blocks() if not held(block.key)]
    return plan_demotion(pool, oldest=oldest, uncopied=len(oldest), held=held, fits=fits, ahead=ahead,
                         capacity=capacity, room=room, least_odds=least_odds, limit=limit, now=99.0, behind=behind)


def test_ancestors_go_before_the_block_that_is_cold() -> None:
    a, b = make_chain("a", 4), make_chain("b", 4)
    assert plan(filled(a, b)) == a + b
    assert plan(filled(b, a), limit=3) == b[:3]


def test_only_as_much_as_will_be_needed_next() -> None:
    a, b = make_chain("a", 8), make_chain("b", 4)
    pool = filled(a, b, slots=16)
    assert plan(pool, ahead=0.25) == [], "four slots are free"
    assert plan(pool, ahead=0.5) == a, "the deepest four of a, which need the others"


def test_behind_takes_what_is_not_needed_next_while_there_is_room() -> None:
    a, b = make_chain("a", 8), make_chain("b", 4)
    pool = filled(a, b, slots=16)
    assert plan(pool, ahead=0.25, behind=1.0) == a + b
    assert plan(pool, ahead=0.25, behind=1.0, room=5) == a[:5]
    assert plan(pool, ahead=0.25, behind=1.0, room=0) == []


def test_what_has_time_takes_no_more_than_the_room_also_for_a_chain() -> None:
    a = make_chain("a", 8)
    taken = plan_demotion(filled(a, slots=16), oldest=[a[7]], uncopied=8, held=lambda key: False,
                          fits=lambda block: True, ahead=0.25, behind=1.0, capacity=100, room=5, least_odds=0.0,
                          limit=100, now=99.0)
    assert taken == a[:5]


def test_what_is_there_is_not_copied_again() -> None:
    a = make_chain("a", 4)
    there = {block.key for block in a[:2]}
    assert plan(filled(a), held=there.__contains__) == a[2:]


def test_others_than_the_next_only_while_there_is_room() -> None:
    chains = [make_chain(str(number), 1) for number in range(100)]
    pool = filled(*chains, slots=100)
    assert [block for block in plan(pool)] == [block for chain in chains for block in chain]
    assert len(plan(pool, room=0)) == WINDOW_BLOCKS
    assert len(plan(pool, room=80)) == 80
    assert len(plan(pool, ahead=0.9)) == 90
    pinned = OperationId("in use")
    for chain in chains:
        pool.pin(pinned, [chain[0].key], now=98.0)
    assert len(plan(pool)) == 100, "what is in use can be copied too"


def test_no_more_is_wanted_than_the_ssd_holds() -> None:
    a, b, c = make_chain("a", 4), make_chain("b", 4), make_chain("c", 4)
    pool = filled(a, b, c)
    assert plan(pool, capacity=9, room=0) == a + b
    there = {block.key for block in c}
    assert plan(pool, capacity=9, room=0, held=there.__contains__) == a + b
    there = {block.key for block in a + b}
    assert plan(pool, capacity=9, room=0, held=there.__contains__) == []


def test_one_that_does_not_fit_keeps_what_needs_it_away_and_nothing_else() -> None:
    a, b = make_chain("a", 3), make_chain("b", 3)
    assert plan(filled(a, b), fits=lambda block: block.key != a[1].key) == [a[0], *b]


def test_what_is_not_worth_it_stays() -> None:
    class Doubtful(Lru):
        def reuse_odds(self, key: BlockKey) -> float:
            return 0.5 if key == a[2].key else 0.01

    a, b = make_chain("a", 4), make_chain("b", 2)
    assert plan(filled(a, b, policy=Doubtful()), least_odds=0.1) == a[:3], "the likely one, and what it continues"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sets(st.integers(0, 29)), st.floats(0, 1),
       st.integers(1, 40))
def test_every_parent_is_there_before_its_child(lengths: list[int], some: set[int], ahead: float, limit: int) -> None:
    chains = [make_chain(str(number), length) for number, length in enumerate(lengths)]
    pool = filled(*chains, slots=30)
    there = {block.key for number, blocks in enumerate(chains) for block in blocks[:number if number in some else 0]}
    chosen = plan(pool, held=there.__contains__, ahead=ahead, limit=limit)
    assert len(chosen) <= limit and len({block.key for block in chosen}) == len(chosen)
    for block in chosen:
        assert block.key not in there
        assert block.depth == 0 or block.parent in there
        there.add(block.key)
    pool.check_invariants()


def test_the_breaker_pauses_longer_each_time_until_all_is_well() -> None:
    breaker = Breaker(failures=3, pause_s=5.0, max_pause_s=15.0)
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(4.9) and breaker.pause_left_s(3.0) == 2.0 and breaker.allows(5.0)
    breaker.failed(4.0)  # was under way
    assert breaker.allows(5.0) and breaker.trips == 1
    breaker.failed(5.0)
    assert not breaker.allows(14.9) and breaker.allows(15.0)
    breaker.stalled(15.0)
    assert not breaker.allows(29.9) and breaker.allows(30.0)
    breaker.succeeded()
    breaker.failed(31.0)
    assert breaker.allows(31.0)
    breaker.stalled(31.0)
    assert breaker.allows(36.0) and breaker.trips == 4
