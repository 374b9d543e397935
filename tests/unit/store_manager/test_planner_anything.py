"""Any interleaving of stores, evictions, deaths, stops, lost news, failures and changes of leader."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.store_manager.core.events import Deaf, Reconnected, Unled
from services.store_manager.core.orders import OVER
from services.store_manager.core.policy import PlannerPolicy
from shared.ids import BlockKey
from shared.kv import unpack_keys
from shared.messages import Replicate, Retire, Trim
from tests.support.pool_cluster import Cluster, Worker, chain

POLICY = PlannerPolicy(half_life_s=30.0, ramp_s=5.0, batch_blocks=4, settle_s=2.0, trim_s=2.0, hot_uses=2.0,
                       fill_step=16, suspend_limit_s=4.0, plan_s=0.5)
CHAINS = [chain(f"c{i}", 6) for i in range(5)] + [chain("long", 12)]
NAMES = ["a", "b", "c", "d"]


class Anything(RuleBasedStateMachine):
    """Whatever happens: bounds hold, what is asked makes sense, drains end, and in the end the map is true."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(POLICY)
        self.lives = dict.fromkeys(NAMES, 0)
        self.chance = random.Random(1)
        self.seen = 0
        self.cluster.fails = lambda ask, target: "deadline" if self.chance.random() < 0.2 else ""
        for name in NAMES:
            self.begin(name)
        self.cluster.run(3.0)

    def begin(self, name: str) -> Worker:
        self.lives[name] += 1
        return self.cluster.add(Worker(name, host=f"h{NAMES.index(name) % 3}", life=str(self.lives[name]), capacity=60))

    def worker(self, name: str) -> Worker:
        return self.cluster.workers[name]

    @rule(name=st.sampled_from(NAMES), which=st.integers(0, 5), length=st.integers(1, 12))
    def stores(self, name: str, which: int, length: int) -> None:
        if self.worker(name).alive and not self.worker(name).draining:
            self.cluster.store(self.worker(name), CHAINS[which][:length])

    @rule(name=st.sampled_from(NAMES), which=st.integers(0, 5), kept=st.integers(0, 11))
    def evicts(self, name: str, which: int, kept: int) -> None:
        if self.worker(name).alive:
            self.cluster.evict(self.worker(name), [block.key for block in reversed(CHAINS[which][kept:])])

    @rule(which=st.integers(0, 5), length=st.integers(1, 12), times=st.integers(1, 8))
    def uses(self, which: int, length: int, times: int) -> None:
        self.cluster.use(CHAINS[which][:length], times)

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["kill", "leave", "stop", "go on", "begin", "lose", "tell"]))
    def lives_on(self, name: str, how: str) -> None:
        worker = self.worker(name)
        match how:
            case "kill":
                self.cluster.kill(worker)
            case "leave" if worker.alive:
                self.cluster.leave(worker)
            case "stop" | "go on":
                worker.stopped = how == "stop"
            case "begin":
                worker.alive = False
                self.begin(name)
            case "lose" | "tell":
                worker.silent_news = how == "lose"

    @rule(name=st.sampled_from(NAMES), timeout_s=st.sampled_from([2.0, 20.0]))
    def drains(self, name: str, timeout_s: float) -> None:
        worker, known = self.worker(name), self.cluster.orders.drain_of(name)
        if worker.alive and (known is None or known.state in OVER):
            self.cluster.drain(worker, timeout_s=timeout_s)

    @rule(how=st.sampled_from(["deaf", "back", "unled", "led", "other term"]))
    def leads(self, how: str) -> None:
        match how:
            case "deaf":
                self.cluster.feed(Deaf())
            case "back":
                self.cluster.feed(Reconnected())
            case "unled":
                self.cluster.leading = False
                self.cluster.feed(Unled())
            case "led":
                self.cluster.leading = True
            case "other term":
                self.cluster.term += 1

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0, 12.0]))
    def passes(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(seconds=st.sampled_from([5.0, 15.0]))
    def stalls(self, seconds: float) -> None:
        """We are stopped: nobody dies of that."""
        known = set(self.cluster.planner.picture.workers())
        self.cluster.now += seconds
        self.cluster.feed(Deaf())
        assert known <= set(self.cluster.planner.picture.workers())

    @invariant()
    def what_was_asked_is_sensible(self) -> None:
        self.cluster.planner.check_invariants()
        for _, name, message in self.cluster.asked[self.seen:]:
            match message:
                case Replicate():
                    assert message.source != name and 1 <= len(message.blocks) <= POLICY.batch_blocks
                    pairs = zip(message.blocks, message.blocks[1:], strict=False)
                    assert all(child.parent == parent.key for parent, child in pairs)
                case Trim():
                    assert 1 <= len(unpack_keys(message.keys)) <= POLICY.trim_blocks
                case Retire():
                    drain = self.cluster.orders.drain_of(name)
                    assert drain is not None, "nobody is retired whose drain nobody ordered"
        self.seen = len(self.cluster.asked)

    def teardown(self) -> None:
        cluster = self.cluster
        cluster.leading = True
        cluster.fails = lambda ask, target: ""
        for worker in cluster.workers.values():
            worker.stopped = worker.silent_news = False
        cluster.run(30.0)
        for worker in cluster.workers.values():
            if worker.alive:
                held = {key for key in cluster.planner.picture.map.keys_of(worker.id)}
                assert held == set(worker.held), f"the map of {worker.name} is true again"
        assert cluster.planner.picture.workers() == sorted(w.name for w in cluster.workers.values() if w.alive)
        assert all(drain.state in OVER for drain in cluster.orders.drains), "every drain ends"
        assert len(cluster.planner._copier.under_way) <= POLICY.copies_limit


class NothingIsLost(RuleBasedStateMachine):
    """While no worker evicts by itself, dies or is drained, trimming and copying lose no block."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(POLICY)
        for i, name in enumerate(NAMES):
            self.cluster.add(Worker(name, host=f"h{i % 3}", capacity=60))
        self.cluster.run(3.0)
        self.stored: set[BlockKey] = set()

    @rule(name=st.sampled_from(NAMES), which=st.integers(0, 5), length=st.integers(1, 12))
    def stores(self, name: str, which: int, length: int) -> None:
        self.cluster.store(self.cluster.workers[name], CHAINS[which][:length])
        self.stored.update(block.key for block in CHAINS[which][:length])

    @rule(which=st.integers(0, 5), times=st.integers(1, 8))
    def uses(self, which: int, times: int) -> None:
        self.cluster.use(CHAINS[which], times)

    @rule(seconds=st.sampled_from([0.5, 5.0, 100.0]))
    def passes(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @invariant()
    def everything_is_somewhere(self) -> None:
        held = set().union(*(worker.held for worker in self.cluster.workers.values()))
        assert self.stored <= held


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestNothingIsLost = NothingIsLost.TestCase
TestNothingIsLost.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
