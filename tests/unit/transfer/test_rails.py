"""Choice of cards, addresses and rails."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.transfer.frames import MAX_RAILS
from shared.transfer.rails import (
    COOL_DOWN_S,
    MAX_COOL_DOWN_S,
    STALE_S,
    Gid,
    Load,
    Nic,
    Rail,
    Rails,
    Topology,
    choose_gid,
    pair_nics,
)

V1, V2 = "IB/RoCE v1", "RoCE v2"


def raw(address: str) -> bytes:
    ip = ipaddress.ip_address(address)
    return ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed


def nic(*addresses: tuple[str, str], name: str = "mlx5_0", node: int = 0, gbps: float = 100,
        ethernet: bool = True) -> Nic:
    gids = tuple(Gid(i, raw(address), kind) for i, (address, kind) in enumerate(addresses))
    return Nic(name, node, gbps * 1e9 / 8, ethernet, False, gids)


# -- addresses --------------------------------------------------------------------------------------------------

USUAL = [("fe80::1", V1), ("fe80::1", V2), ("10.0.0.7", V1), ("10.0.0.7", V2), ("2001:db8::7", V2), ("10.0.9.7", V2)]


@pytest.mark.parametrize(("gids", "used", "index", "why"), [
    (USUAL, "10.0.9.7", 5, "holds the address in use"),
    (USUAL, "2001:db8::7", 4, "holds the address in use"),
    (USUAL, "192.0.2.1", 3, "an IPv4 address"),
    (USUAL[:2] + USUAL[4:5], "192.0.2.1", 2, "a routable IPv6 address"),
    (USUAL[:2], "192.0.2.1", 1, "link-local, nothing better"),
])
def test_the_gid_is_the_best_of_roce_v2(gids: list[tuple[str, str]], used: str, index: int, why: str) -> None:
    gid, reason = choose_gid(nic(*gids), {raw(used)})
    assert (gid.index, reason) == (index, why) and gid.kind == V2


def test_a_gid_that_was_set_is_taken_whatever_it_is() -> None:
    assert choose_gid(nic(*USUAL), {raw("10.0.9.7")}, override=2)[0].index == 2
    with pytest.raises(LookupError, match="no GID 9"):
        choose_gid(nic(*USUAL), (), override=9)


def test_a_card_without_an_address_is_left_out() -> None:
    with pytest.raises(LookupError, match="no RoCE v2 GID"):
        choose_gid(nic(("10.0.0.7", V1)), ())
    with pytest.raises(LookupError):
        choose_gid(nic(ethernet=False), ())


def test_infiniband_speaks_from_its_own_gid() -> None:
    assert choose_gid(nic(("fe80::1", V1), ethernet=False), ())[0].index == 0


# -- pairs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "theirs", "pairs"), [
    (1, 1, [(0, 0)]), (2, 2, [(0, 0), (1, 1)]), (1, 3, [(0, 0), (0, 1), (0, 2)]), (3, 2, [(0, 0), (1, 1), (2, 0)]),
    (0, 2, []), (2, 0, []),
])
def test_cards_are_paired_by_place(own: int, theirs: int, pairs: list[tuple[int, int]]) -> None:
    assert pair_nics(own, theirs) == pairs


@given(st.integers(0, 40), st.integers(0, 40))
def test_pairs_are_bounded_and_use_every_card_there_is_room_for(own: int, theirs: int) -> None:
    pairs = pair_nics(own, theirs)
    assert len(pairs) == len(set(pairs)) <= MAX_RAILS
    if own and theirs and max(own, theirs) <= MAX_RAILS:
        assert {i for i, _ in pairs} == set(range(own)) and {j for _, j in pairs} == set(range(theirs))


# -- topology ---------------------------------------------------------------------------------------------------

TWO_NODES = Topology({0: (10, 21), 1: (21, 10)})


def test_memory_of_another_node_is_further_away() -> None:
    cards = [nic(name="a", node=0), nic(name="b", node=1), nic(name="c", node=-1)]
    assert TWO_NODES.matrix(cards) == {"a": {0: 1.0, 1: 2.1}, "b": {0: 2.1, 1: 1.0}, "c": {0: 1.0, 1: 1.0}}


@pytest.mark.parametrize(("card", "buffer"), [(0, -1), (-1, 0), (5, 0), (0, 5)])
def test_an_unknown_node_costs_nothing(card: int, buffer: int) -> None:
    assert TWO_NODES.penalty(card, buffer) == 1.0
    assert Topology({}).penalty(card, buffer) == 1.0


# -- loads ------------------------------------------------------------------------------------------------------


def test_bandwidth_starts_as_claimed_and_follows_what_is_measured() -> None:
    load = Load(10e9)
    assert load.bytes_per_s(0.0) == 10e9
    load.started(1 << 20)
    load.finished(1 << 20, started_s=1.0, now_s=1.001)
    first = (1 << 20) / 0.001
    assert load.bytes_per_s(1.0) == pytest.approx(first) and load.inflight_bytes == 0
    load.started(1 << 20)
    load.finished(1 << 20, started_s=2.0, now_s=2.002)
    assert load.bytes_per_s(2.0) == pytest.approx(first + 0.2 * (first / 2 - first))


def test_an_old_measurement_of_an_idle_card_is_forgotten() -> None:
    load = Load(10e9)
    load.started(1 << 20)
    load.finished(1 << 20, started_s=1.0, now_s=2.0)
    assert load.bytes_per_s(2.0 + STALE_S) == 1 << 20
    assert load.bytes_per_s(2.1 + STALE_S) == 10e9
    load.started(1)
    assert load.bytes_per_s(2.1 + STALE_S) == 1 << 20


def test_a_batch_that_waited_behind_another_is_measured_from_its_turn() -> None:
    load = Load(1.0)
    for _ in range(2):
        load.started(1 << 20)
    load.finished(1 << 20, started_s=0.0, now_s=0.5)
    load.finished(1 << 20, started_s=0.0, now_s=1.0)
    assert load.bytes_per_s(1.0) == pytest.approx((1 << 20) / 0.5)


def test_small_batches_and_dropped_ones_measure_nothing() -> None:
    load = Load(1e9)
    load.started(100)
    load.started(1 << 20)
    load.finished(100, started_s=0.0, now_s=1.0)
    load.dropped(1 << 20)
    assert (load.bytes_per_s(1.0), load.inflight_bytes) == (1e9, 0)


# -- choice -----------------------------------------------------------------------------------------------------


def rails_of(*cards: Nic, topology: Topology = TWO_NODES) -> Rails:
    rails = Rails([Rail(i, i, card, Load(card.bytes_per_s)) for i, card in enumerate(cards)], topology)
    for i in range(len(cards)):
        rails.opened(i)
    return rails


def chosen(rails: Rails, nbytes: int = 8 << 20, node: int = 0) -> int | None:
    choice = rails.choose(nbytes, buffer_node=node, now_s=0.0)
    if choice is None:
        return None
    rails.rails[choice.rail].load.started(nbytes)
    return choice.rail


def test_equal_cards_take_turns() -> None:
    rails = rails_of(nic(name="a"), nic(name="b"))
    assert [chosen(rails) for _ in range(6)] == [0, 1, 0, 1, 0, 1]


def test_a_faster_card_takes_more() -> None:
    rails = rails_of(nic(name="a", gbps=300), nic(name="b", gbps=100))
    taken = [chosen(rails) for _ in range(40)]
    assert 29 <= taken.count(0) <= 31


def test_the_near_card_is_taken_until_it_is_busy() -> None:
    rails = rails_of(nic(name="a", node=0), nic(name="b", node=1))
    assert [chosen(rails, node=1) for _ in range(3)] == [1, 1, 0]


def test_a_card_is_as_busy_as_all_its_rails() -> None:
    shared, other = nic(name="a"), nic(name="b")
    load = Load(shared.bytes_per_s)
    rails = Rails([Rail(0, 0, shared, load), Rail(0, 1, shared, load), Rail(1, 2, other, Load(other.bytes_per_s))],
                  TWO_NODES)
    for i in range(3):
        rails.opened(i)
    assert [chosen(rails) for _ in range(4)] == [0, 2, 0, 2]


def test_the_reason_has_the_numbers() -> None:
    rails = rails_of(nic(name="a"))
    choice = rails.choose(125, buffer_node=1, now_s=0.0)
    assert choice is not None
    assert choice.reason == "a: 0 bytes before it, 12.50 GB/s, penalty 2.1"
    assert choice.predicted_s == pytest.approx(125 / 12.5e9 * 2.1)


@given(st.lists(st.tuples(st.floats(1, 400), st.integers(0, 1 << 30), st.integers(-1, 1)), min_size=1, max_size=8),
       st.integers(1, 1 << 24), st.integers(-1, 1))
def test_the_choice_is_the_earliest_predicted_finish(cards: list[tuple[float, int, int]], nbytes: int,
                                                     node: int) -> None:
    rails = rails_of(*(nic(name=str(i), gbps=gbps, node=place) for i, (gbps, _, place) in enumerate(cards)))
    for rail, (_, inflight, _) in zip(rails.rails, cards, strict=True):
        rail.load.started(inflight)
    choice = rails.choose(nbytes, buffer_node=node, now_s=0.0)
    assert choice is not None
    assert choice.predicted_s == min(
        rail.load.predicted_s(nbytes, TWO_NODES.penalty(rail.nic.node, node), 0.0) for rail in rails.rails)


# -- failures ---------------------------------------------------------------------------------------------------


def test_a_failed_rail_takes_nothing_until_it_is_open_again() -> None:
    rails = rails_of(nic(name="a"), nic(name="b"))
    rails.failed(0, "no answer")
    assert [chosen(rails) for _ in range(3)] == [1, 1, 1]
    assert rails.down == [0] and rails.why_down == "a: no answer"
    rails.failed(1, "link down")
    assert chosen(rails) is None and rails.why_down == "a: no answer; b: link down"
    rails.opened(0)
    assert chosen(rails) == 0 and rails.down == [1]


def test_the_cool_down_doubles_up_to_a_bound_and_is_forgiven_by_success() -> None:
    rails = rails_of(nic())
    pauses = [rails.failed(0, "no answer") for _ in range(8)]
    assert pauses == [min(MAX_COOL_DOWN_S, COOL_DOWN_S * 2**i) for i in range(8)]
    rails.opened(0)
    assert rails.failed(0, "again") == MAX_COOL_DOWN_S, "to be connected is no proof"
    rails.opened(0)
    rails.worked(0)
    assert rails.failed(0, "again") == COOL_DOWN_S
