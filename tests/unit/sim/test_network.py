"""Links against hand-computed times; a card carries 1000 bytes a second each way."""

from __future__ import annotations

import pytest

from load.sim.loop import Loop
from load.sim.network import Flow, Network, Port


class Wire:
    """Ports ``a``, ``b``, ``c``, and when each flow arrived."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.loop = Loop()
        self.network = Network(self.loop, latency_s=latency_s)
        self.ports = {name: Port(1000.0) for name in "abc"}
        self.arrived: dict[str, float] = {}

    def send(self, name: str, way: str, nbytes: float) -> Flow | None:
        def done() -> None:
            self.arrived[name] = self.loop.now

        return self.network.send(self.ports[way[0]], self.ports[way[1]], nbytes, done)

    def run(self) -> dict[str, float]:
        self.loop.run(is_over=lambda: False)
        return {name: round(at_s, 9) for name, at_s in self.arrived.items()}


def test_a_flow_alone_has_the_whole_link_and_the_latency_once() -> None:
    wire = Wire(latency_s=0.5)
    wire.send("only", "ab", 2000)
    assert wire.run() == {"only": 2.5}


def test_two_flows_out_of_a_node_share_and_the_longer_one_speeds_up() -> None:
    wire = Wire()
    wire.send("short", "ab", 1000)
    wire.send("long", "ac", 3000)
    # 500 B/s each until 2 s, then the long one has 2000 left at 1000 B/s
    assert wire.run() == {"short": 2.0, "long": 4.0}


def test_two_flows_into_a_node_share() -> None:
    wire = Wire()
    wire.send("first", "ac", 1000)
    wire.loop.at(0.5, lambda: wire.send("second", "bc", 1000) and None)
    # 500 bytes left of the first, both at 500 B/s until 1.5; then 500 left of the second
    assert wire.run() == {"first": 1.5, "second": 2.0}


def test_both_ways_of_a_card_are_independent() -> None:
    wire = Wire()
    wire.send("there", "ab", 1000)
    wire.send("back", "ba", 1000)
    assert wire.run() == {"there": 1.0, "back": 1.0}


def test_a_cut_link_holds_its_flows_until_it_is_back() -> None:
    wire = Wire()
    wire.send("held", "ab", 1000)
    wire.loop.at(0.25, wire.network.scale, wire.ports["b"], 0.0)
    wire.loop.at(10.0, wire.network.scale, wire.ports["b"], 1.0)
    assert wire.run() == {"held": 10.75}


def test_a_flow_that_is_given_up_never_arrives_and_leaves_its_share() -> None:
    wire = Wire()
    gone = wire.send("gone", "ab", 1000)
    wire.send("stays", "ab", 1000)
    assert gone is not None
    wire.loop.at(1.0, wire.network.end, gone)
    assert wire.run() == {"stays": 1.5}
    wire.network.end(gone)


@pytest.mark.parametrize("nbytes", [0, -5])
def test_nothing_to_move_takes_the_latency(nbytes: int) -> None:
    wire = Wire(latency_s=0.1)
    assert wire.send("empty", "ab", nbytes) is None
    assert wire.run() == {"empty": 0.1}
