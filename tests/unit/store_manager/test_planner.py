"""What the planner makes of a cluster: copies where they do good, none too many, and every drain ends."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from services.store_manager.core.drains import OrdersRead
from services.store_manager.core.events import Led, Unled
from services.store_manager.core.orders import Drain, Orders, with_drain
from services.store_manager.core.policy import PlannerPolicy
from shared.ids import Incarnation
from shared.kv import unpack_keys
from shared.messages import Protect, Replicate, Retire, StoredBlock, Trim
from shared.store.events import EventLog
from tests.support.pool_cluster import SPEC, Cluster, Worker, chain

POLICY = PlannerPolicy(half_life_s=100.0, ramp_s=10.0)


def asked(cluster: Cluster, kind: type, worker: str = "") -> list[object]:
    return [message for _, name, message in cluster.asked if isinstance(message, kind) and worker in ("", name)]


def cluster_of(*workers: Worker, policy: PlannerPolicy = POLICY) -> Cluster:
    cluster = Cluster(policy)
    for worker in workers:
        cluster.add(worker)
    cluster.run(3.0)
    return cluster


def test_a_hot_prefix_gets_copies_by_its_heat_on_other_hosts_first() -> None:
    a, b, c, d = (Worker("a"), Worker("b"), Worker("c", host="h2"), Worker("d", host="h3"))
    cluster = cluster_of(a, b, c, d)
    prompt = chain("system", 8)
    cluster.store(a, prompt)
    cluster.use(prompt, 3)
    cluster.run(5.0)
    assert cluster.holders(prompt[-1]) == ["a"], "three uses are not hot"
    cluster.use(prompt, 2)
    cluster.run(5.0)
    assert cluster.holders(prompt[-1]) == ["a", "c"], "hot: a second copy, on another host"
    assert [block.origin for block in c.held.values()] == ["received"] * 8
    cluster.use(prompt, 4)
    cluster.run(5.0)
    assert cluster.holders(prompt[-1]) == ["a", "c", "d"], "twice as hot: a third, on the third host"
    cluster.use(prompt, 100)
    cluster.run(10.0)
    assert cluster.holders(prompt[-1]) == ["a", "b", "c", "d"], "at most max_wanted, then also where there is one"
    why = cluster.planner.describe(50, leader="m1", now=cluster.now).decisions
    assert any("wants 2 copies of 8 blocks, 1 have them; from a on another host" in row.why for row in why)


def test_what_requests_would_have_gained_by_copies_counts_until_it_is_worth_their_cost() -> None:
    """A block takes 1 KiB, a chain of 8 is copied in 8.2 ms at a million bytes a second."""
    policy = replace(POLICY, copy_bytes_per_s=1e6)
    a, b, c = Worker("a"), Worker("b", host="h2"), Worker("c", host="h3")
    cluster = cluster_of(a, b, c, policy=policy)
    dear, cheap = chain("dear", 8), chain("cheap", 8)
    cost_s = sum(block.nbytes for block in dear) / 1e6
    for prompt in (dear, cheap):
        cluster.store(a, prompt)
    cluster.use(dear, gain_s=1e9)
    cluster.use(cheap, 2, gain_s=0.2 * cost_s)
    cluster.run(5.0)
    assert len(asked(cluster, Replicate)) == 0, "one request alone, or little gain twice"
    cluster.use([*dear, *chain("more", 4, after=dear[-1])], gain_s=0.4 * cost_s)
    cluster.run(5.0)
    assert cluster.holders(dear[-1]) == ["a", "b"], "2 uses, and gains of almost the cost: heat 5.6"
    assert cluster.holders(cheap[-1]) == ["a"], "2 uses, and gains of less than half the cost: heat 3.6"
    assert len(b.held) == 8, "what nobody holds is not worth a copy"
    cluster.use(dear, 2, gain_s=cost_s)
    cluster.run(5.0)
    assert cluster.holders(dear[-1]) == ["a", "b", "c"]
    cluster.run(600.0)
    assert cluster.holders(dear[-1]) == ["a"], "cold again"


def test_a_gain_that_is_none_counts_as_none() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b)
    prompt = chain("x", 4)
    cluster.store(a, prompt)
    for gain_s in (float("nan"), float("inf"), -1.0):
        cluster.use(prompt, gain_s=gain_s)
    cluster.use(chain("nobody has it", 4), 3, gain_s=1e9)
    cluster.run(5.0)
    assert cluster.planner.picture.heat.of(prompt[0].key, now=cluster.now) < 3.0
    assert asked(cluster, Replicate) == []


def test_hot_blocks_are_looked_at_part_by_part() -> None:
    """The longest step of a look at 60 hot blocks, seven at a time, and what it asks for in the end."""
    a, b = Worker("a", capacity=80), Worker("b", capacity=400)
    cluster = cluster_of(a, b, policy=replace(POLICY, fill_step=7, max_wanted=1, protect_ttl_s=30.0, half_life_s=1e6))
    prompts = [chain(f"p{i}", 10) for i in range(6)]
    for i, prompt in enumerate(prompts):
        cluster.store(a if i % 2 else b, prompt)
        cluster.use(prompt, 5 + i)
    cluster.store(b, prompts[5])
    cluster.run(12.0)
    words = {name: message for _, name, message in cluster.asked if isinstance(message, Protect)}
    keys = {name: set(unpack_keys(message.keys)) for name, message in words.items()}
    assert keys["a"] == {block.key for i in (1, 3) for block in prompts[i]}, "a quarter of 80, p5 is also at b"
    assert keys["b"] == {block.key for i in (0, 2, 4) for block in prompts[i]}


def test_only_what_is_hot_is_copied_and_parents_come_along() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b)
    system = chain("system", 4)
    tails = [chain(f"tail-{i}", 3, after=system[-1]) for i in range(6)]
    for tail in tails:
        cluster.store(a, [*system, *tail])
        cluster.use([*system, *tail])
    cluster.run(5.0)
    assert {block.key for block in b.held.values()} == {block.key for block in system}


def test_long_chains_go_in_batches_and_big_ones_at_the_workers_pace() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b, policy=replace(POLICY, batch_blocks=16))
    prompt = chain("long", 100)
    cluster.store(a, prompt)
    cluster.use(prompt, 5)
    cluster.run(10.0)
    assert len(b.held) == 100
    sizes = [len(message.blocks) for message in asked(cluster, Replicate) if isinstance(message, Replicate)]
    assert sizes == [16] * 6 + [4]


def test_suspect_draining_and_full_workers_get_nothing() -> None:
    a, b, c, d = Worker("a"), Worker("b", host="h2"), Worker("c", host="h3", draining=True), Worker("d", host="h4")
    d.capacity = 3
    cluster = cluster_of(a, b, c, d)
    prompt = chain("x", 4)
    cluster.store(a, prompt)
    b.stopped = True
    cluster.run(2.6)
    cluster.use(prompt, 5)
    cluster.run(3.0)
    assert asked(cluster, Replicate) == [], "b is suspect, c drains, d has no room"
    b.stopped = False
    cluster.run(5.0)
    assert cluster.holders(prompt[-1]) == ["a", "b"]


def test_the_nearest_source_that_sends_least() -> None:
    a, b, c = Worker("a"), Worker("b", host="h2"), Worker("c", host="h2")
    cluster = cluster_of(a, b, c, policy=replace(POLICY, max_wanted=3))
    prompt = chain("x", 4)
    cluster.store(a, prompt)
    cluster.store(b, prompt)
    cluster.use(prompt, 9)
    cluster.run(5.0)
    assert [message.source for message in asked(cluster, Replicate, "c") if isinstance(message, Replicate)] == ["b"]


def test_a_fresh_worker_is_not_flooded() -> None:
    """Complaint 13: the emptiest worker of all would otherwise get everything at once."""
    policy = replace(POLICY, copy_bytes_per_s=2e4, ramp_s=100.0, max_wanted=2)
    old, a, b = Worker("old"), Worker("a", host="h2"), Worker("b", host="h3")
    cluster = cluster_of(old, a, b, policy=policy)
    prompts = [chain(f"p{i}", 4) for i in range(30)]
    for prompt in prompts:
        cluster.store(old, prompt)
    fresh = cluster.add(Worker("fresh", host="h4"))
    for prompt in prompts:
        cluster.use(prompt, 5)
    cluster.run(25.0)
    got = {worker.name: len(worker.held) for worker in (a, b, fresh)}
    assert got["a"] + got["b"] + got["fresh"] == 120
    assert 0 < got["fresh"] < got["a"] / 2 and got["fresh"] < got["b"] / 2, got
    assert cluster.planner.picture.fleet.weight(fresh.id, now=cluster.now) < 0.3


def test_a_sick_worker_is_tried_now_and_then_and_the_others_go_on() -> None:
    """Complaints 12 and 16: one sick node makes nobody else fail, and no failure is repeated in a tight loop."""
    a, sick, well = Worker("a"), Worker("b", host="h2"), Worker("c", host="h3")
    sick.refuses = "broken"
    cluster = cluster_of(a, sick, well, policy=replace(POLICY, max_wanted=3, half_life_s=1e6))
    prompts = [chain(f"p{i}", 2) for i in range(10)]
    for prompt in prompts:
        cluster.store(a, prompt)
        cluster.use(prompt, 9)
    cluster.run(60.0)
    assert all("c" in cluster.holders(prompt[-1]) for prompt in prompts)
    assert len(asked(cluster, Replicate, "b")) < 20
    sick.refuses = ""
    cluster.run(150.0)
    assert all(cluster.holders(prompt[-1]) == ["a", "b", "c"] for prompt in prompts), "and forgiven when it is well"


def test_a_worker_that_does_not_answer_is_suspended() -> None:
    a, mute, well = Worker("a"), Worker("b", host="h2"), Worker("c", host="h3")
    cluster = cluster_of(a, mute, well, policy=replace(POLICY, max_wanted=2))
    cluster.mute.add("b")
    prompt = chain("x", 2)
    cluster.store(a, prompt)
    cluster.use(prompt, 5)
    cluster.run(10.0)
    assert cluster.holders(prompt[-1]) == ["a", "c"]
    assert len(asked(cluster, Replicate, "b")) <= 1


def test_copies_we_made_go_when_the_block_cooled_never_the_last_nor_others() -> None:
    a, b, c = Worker("a"), Worker("b", host="h2"), Worker("c", host="h3")
    cluster = cluster_of(a, b, c, policy=replace(POLICY, half_life_s=20.0, max_wanted=3))
    prompt = chain("x", 4)
    cluster.store(a, prompt)
    cluster.use(prompt, 9)
    cluster.run(5.0)
    assert cluster.holders(prompt[-1]) == ["a", "b", "c"]
    cluster.run(25.0)
    assert cluster.holders(prompt[-1]) == ["a", "b", "c"], "a little cooler is no reason"
    cluster.run(200.0)
    assert cluster.holders(prompt[-1]) == ["a"]
    assert not asked(cluster, Trim, "a"), "what it computed itself is its own to evict"
    cluster.evict(a, [block.key for block in reversed(prompt)])
    cluster.run(60.0)


def test_the_last_copy_is_never_trimmed_even_if_it_is_one_we_made() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b, policy=replace(POLICY, half_life_s=20.0))
    prompt = chain("x", 4)
    cluster.store(a, prompt)
    cluster.use(prompt, 5)
    cluster.run(5.0)
    cluster.evict(a, [block.key for block in reversed(prompt)])
    cluster.run(300.0)
    assert cluster.holders(prompt[-1]) == ["b"]


def test_full_workers_drop_cold_copies_that_others_have_too() -> None:
    a, b = Worker("a", capacity=40), Worker("b", host="h2", capacity=400)
    cluster = cluster_of(a, b, policy=replace(POLICY, half_life_s=5.0))
    twice, once = chain("twice", 15), chain("once", 25)
    cluster.store(a, twice)
    cluster.store(a, once)
    cluster.store(b, twice)
    cluster.run(60.0)
    assert set(a.held) == {block.key for block in once}
    assert len(b.held) == 15, "who is not full keeps them"


def test_last_copies_of_hot_blocks_are_protected_again_and_again() -> None:
    a = Worker("a", capacity=100)
    cluster = cluster_of(a, policy=replace(POLICY, protect_ttl_s=6.0, half_life_s=1e6))
    hot = [chain(f"hot-{i}", 10) for i in range(4)]
    for i, prompt in enumerate(hot):
        cluster.store(a, prompt)
        cluster.use(prompt, 5 + i)
    cluster.run(10.0)
    words = [message for message in asked(cluster, Protect) if isinstance(message, Protect)]
    assert 4 <= len(words) <= 7 and words[0].ttl_s == 6.0
    keys = unpack_keys(words[-1].keys)
    assert len(keys) == 25, "at most a quarter of its slots"
    assert set(keys[:10]) == {block.key for block in hot[3]}, "the hottest first"


def test_quotas_follow_where_the_blocks_are_and_reach_everybody_again_and_again() -> None:
    a, b = Worker("a"), Worker("b")
    cluster = cluster_of(a, b)
    assert cluster.quotas["a"].budgets == []
    cluster.store(a, chain("x", 10))
    unit = chain("x", 1)[0].nbytes
    cluster.orders = msgspec.structs.replace(cluster.orders, quotas={"acme": 20 * unit, "zeta": 0})
    cluster.run(1.0)
    budgets = {name: {row.tenant: row.nbytes for row in quotas.budgets} for name, quotas in cluster.quotas.items()}
    assert budgets == {"a": {"acme": 15 * unit, "zeta": 0}, "b": {"acme": 5 * unit, "zeta": 0}}
    c = cluster.add(Worker("c"))
    cluster.run(6.0)
    assert {row.tenant for row in cluster.quotas["c"].budgets} == {"acme", "zeta"}, c
    cluster.orders = Orders()
    cluster.run(1.0)
    assert cluster.quotas["a"].budgets == []


def forgetful(name: str, *, host: str = "h1") -> Worker:
    """Tells all that it holds when it is asked, since it keeps no news."""
    worker = Worker(name, host=host, capacity=5_000)
    worker.log = EventLog(worker.id, worker.incarnation, SPEC.digest, lambda: worker.held.values(), kept=1)
    return worker


def test_who_is_being_taken_in_hears_no_budget_made_of_a_part_of_its_blocks() -> None:
    a, b = Worker("a"), forgetful("b")
    cluster = cluster_of(a, policy=replace(POLICY, fill_step=1, quota_s=0.01, orders_s=0.05))
    unit = chain("x", 1)[0].nbytes
    cluster.orders = msgspec.structs.replace(cluster.orders, quotas={"acme": 210 * unit})
    cluster.run(20.0)
    for name in ("x", "y"):
        b.store(chain(name, 100), 0.0)
    cluster.add(b)
    budgets = []
    for _ in range(50):
        cluster.run(0.02)
        budgets += [row.nbytes for row in cluster.quotas["b"].budgets] if "b" in cluster.quotas else []
    assert budgets and min(budgets) >= 200 * unit, "the tenant is below its quota: nothing has to go"


# Drains.

def test_what_a_drained_worker_holds_is_known_before_it_lets_go() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b, policy=replace(POLICY, drain_step_s=0.002))
    cluster.store(a, chain("x", 20))
    cluster.run(20.0)
    a.stopped = True
    cluster.until(lambda: cluster.planner.picture.life("a") is None)
    a.stopped, cluster.delay_s = False, 0.05
    cluster.feed(a.load())
    cluster.drain(a)
    cluster.feed(OrdersRead(cluster.orders, cluster.now))
    assert cluster.planner.picture.map.blocks_of(a.id) == 0, "it was only just asked what it holds"
    cluster.until(lambda: cluster.drained(a).state == "done")
    assert cluster.drained(a).copied == 20 and len(b.held) == 20


def test_a_drain_of_a_former_life_does_not_disturb_the_new_ones() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b, policy=replace(POLICY, copy_bytes_per_s=1e4))
    cluster.store(a, chain("x", 200))
    cluster.drain(a)
    cluster.until(lambda: asked(cluster, Replicate))
    before = Drain(worker=a.id, incarnation=Incarnation("0"), ordered_at_s=cluster.now - 9.0, timeout_s=60.0)
    cluster.orders = msgspec.structs.replace(cluster.orders, drains=[before, *cluster.orders.drains])
    cluster.run(1.0)
    assert cluster.orders.drains[0].state == "failed" and cluster.planner.picture.is_leaving(a.id)
    ordered = [row for row in cluster.planner.describe(50, leader="m1", now=cluster.now).decisions
               if row.why == "ordered"]
    assert len(ordered) == 1, "it goes on, it does not begin anew"


def test_a_drain_copies_last_copies_out_and_lets_go() -> None:
    a, b, c = Worker("a"), Worker("b", host="h2"), Worker("c", host="h3")
    cluster = cluster_of(a, b, c, policy=replace(POLICY, batch_blocks=8))
    shared, alone = chain("shared", 6), [chain(f"alone-{i}", 20) for i in range(10)]
    cluster.store(a, shared)
    cluster.store(b, shared)
    for blocks in alone:
        cluster.store(a, blocks)
    cluster.use(alone[7], 2)
    cluster.drain(a)
    cluster.until(lambda: cluster.drained(a).state == "retiring" or cluster.drained(a).state == "done")
    cluster.until(lambda: cluster.drained(a).state == "done")
    drain = cluster.drained(a)
    assert (drain.blocks, drain.copied, drain.left, drain.why) == (200, 200, 0, "")
    assert not a.held and a.draining
    assert all(cluster.holders(block) for blocks in (shared, *alone) for block in blocks)
    first = next(message for message in asked(cluster, Replicate) if isinstance(message, Replicate))
    assert first.blocks[0].key == alone[7][0].key, "what is hot goes first"
    assert not asked(cluster, Replicate, "a")


def test_what_comes_during_a_drain_is_copied_too() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b)
    cluster.store(a, chain("x", 50))
    cluster.drain(a)
    cluster.until(lambda: asked(cluster, Replicate))
    late = chain("late", 5)
    cluster.store(a, late)
    cluster.until(lambda: cluster.drained(a).state == "done")
    assert cluster.holders(late[-1]) == ["b"]


def test_a_drain_without_room_takes_the_hot_ones_and_says_what_stays() -> None:
    a, b = Worker("a"), Worker("b", host="h2", capacity=30)
    cluster = cluster_of(a, b)
    cluster.store(b, chain("theirs", 28))
    hot, cold = chain("hot", 10), chain("cold", 10)
    cluster.store(a, hot)
    cluster.store(a, cold)
    cluster.use(hot, 2)
    cluster.run(1.0)
    cluster.drain(a)
    cluster.until(lambda: cluster.drained(a).state == "done")
    drain = cluster.drained(a)
    assert cluster.holders(hot[-1]) == ["a", "b"], "the worker lets go of nothing while some of it is nowhere else"
    assert (drain.copied, drain.left) == (10, 10) and "no other worker has empty room" in drain.why


def test_the_only_worker_can_be_drained() -> None:
    a = Worker("a")
    cluster = cluster_of(a)
    cluster.store(a, chain("x", 3))
    cluster.drain(a)
    cluster.until(lambda: cluster.drained(a).state == "done")
    assert cluster.drained(a).left == 3 and len(a.held) == 3, "the last copies are served on"
    assert cluster.drained(a).why == ("3 stay behind: no other worker could have them; "
                                      "the worker serves them until it is ended")


def test_a_forced_drain_drops_the_last_copies_and_says_so() -> None:
    a = Worker("a")
    cluster = cluster_of(a)
    cluster.store(a, chain("x", 3))
    cluster.drain(a, force=True)
    cluster.until(lambda: cluster.drained(a).state == "done")
    assert cluster.drained(a).left == 3 and not a.held
    assert cluster.drained(a).why == "3 are dropped: no other worker could have them"


def test_a_drain_beside_workers_that_drain_says_so() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b)
    cluster.store(a, chain("x", 3))
    cluster.drain(b)
    cluster.until(lambda: cluster.drained(b).state == "done")
    cluster.drain(a)
    cluster.until(lambda: cluster.drained(a).state == "done")
    assert cluster.drained(a).why.startswith("3 stay behind: the other workers that could have them are draining;")


def test_drains_end_with_a_reason() -> None:
    for ends in ("death", "bye", "new life", "time", "cancel", "deaf"):
        a, b = Worker("a"), Worker("b", host="h2")
        cluster = cluster_of(a, b, policy=replace(POLICY, copy_bytes_per_s=1e4))
        cluster.store(a, chain("x", 600))
        cluster.drain(a, timeout_s=8.0 if ends == "time" else 60.0)
        cluster.until(lambda: cluster.drained(a).copied > 0)  # noqa: B023
        match ends:
            case "death":
                cluster.kill(a)
            case "bye":
                cluster.leave(a)
            case "new life":
                cluster.add(Worker("a", life="2"))
            case "cancel":
                drain = cluster.drained(a)
                cluster.orders = with_drain(cluster.orders, msgspec.structs.replace(drain, cancel=True))
            case "deaf":
                a.stopped = True  # and never comes back
        cluster.until(lambda: cluster.drained(a).state in ("failed", "cancelled"), limit_s=30.0)  # noqa: B023
        drain = cluster.drained(a)
        wanted = {"death": "it died", "bye": "it died: said bye", "new life": "it began anew", "time": "time is over",
                  "cancel": "somebody cancelled it", "deaf": "it died"}[ends]
        assert wanted in drain.why, (ends, drain)
        assert not asked(cluster, Retire)
        assert drain.state == ("cancelled" if ends == "cancel" else "failed")


def test_a_new_leader_goes_on_with_a_drain() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b, policy=replace(POLICY, copy_bytes_per_s=1e5))
    cluster.store(a, chain("x", 600))
    cluster.drain(a)
    cluster.until(lambda: cluster.drained(a).copied > 0)
    cluster.leading = False
    cluster.feed(Unled())
    cluster.run(5.0)
    before = len(asked(cluster, Replicate))
    cluster.run(5.0)
    assert len(asked(cluster, Replicate)) == before, "nothing is begun without the lease"
    cluster.leading, cluster.term = True, 2
    cluster.until(lambda: cluster.drained(a).state == "done")
    assert not a.held and len(b.held) == 600


# Leading.

def test_orders_that_cannot_be_read_stop_orders_and_nothing_else() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b)
    cluster.orders = msgspec.structs.replace(cluster.orders, quotas={"acme": 1 << 30})
    cluster.run(10.0)
    assert cluster.quotas["a"].budgets
    cluster.damaged, cluster.term = True, 2  # another leads from now on, and cannot read them
    cluster.run(1.0)
    cluster.quotas.clear()
    prompt = chain("system", 8)
    cluster.store(a, prompt)
    cluster.use(prompt, 6)
    cluster.run(20.0)
    assert cluster.holders(prompt[-1]) == ["a", "b"], "copies are made all the same"
    assert not cluster.quotas, "nobody is told that there are no quotas"
    cluster.damaged = False
    cluster.run(10.0)
    assert cluster.quotas["a"].budgets, "what was written stands"


def test_a_follower_knows_and_does_nothing() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = Cluster(POLICY, leading=False)
    for worker in (a, b):
        cluster.add(worker)
    prompt = chain("x", 4)
    cluster.store(a, prompt)
    cluster.use(prompt, 9)
    cluster.run(30.0)
    assert not asked(cluster, Replicate) and not cluster.quotas
    assert cluster.planner.describe(10, leader="m2", now=cluster.now).hot[0].blocks == 4
    cluster.leading = True
    took_s = cluster.until(lambda: len(cluster.holders(prompt[-1])) > 1)
    assert took_s < 2.0, "who knew all along acts at once"


def test_a_leader_that_was_stopped_does_nothing_when_it_wakes() -> None:
    a, b = Worker("a"), Worker("b", host="h2")
    cluster = cluster_of(a, b)
    prompt = chain("x", 4)
    cluster.store(a, prompt)
    cluster.use(prompt, 9)
    cluster.leading = False  # its lease is not renewed either
    cluster.now += 15.0
    for worker in (a, b):
        cluster.feed(worker.load())
    cluster.run(0.4)
    assert not asked(cluster, Replicate)


def test_a_planner_that_stalled_expires_nobody() -> None:
    a, b = Worker("a"), Worker("b")
    cluster = cluster_of(a, b)
    cluster.store(a, chain("x", 4))
    cluster.now += 15.0  # SIGSTOP: nothing was heard, nothing was done
    cluster.run(1.5)
    assert cluster.planner.picture.workers() == ["a", "b"]
    assert cluster.planner.picture.map.blocks_of(a.id) == 4


def test_three_seconds_of_silence_drop_nothing_death_drops_within_ten() -> None:
    a, b = Worker("a"), Worker("b")
    cluster = cluster_of(a, b)
    cluster.store(a, chain("x", 4))
    a.stopped = True
    cluster.run(3.0)
    assert cluster.planner.picture.map.blocks_of(a.id) == 4
    a.stopped = False
    cluster.run(1.0)
    cluster.kill(a)
    assert cluster.until(lambda: "a" not in cluster.planner.picture.workers()) <= 10.0
    assert cluster.planner.picture.map.blocks_of(a.id) == 0


def test_news_that_was_lost_is_asked_for() -> None:
    a = Worker("a")
    cluster = cluster_of(a)
    a.silent_news = True
    blocks: list[StoredBlock] = chain("x", 20)
    cluster.store(a, blocks)
    cluster.run(2.0)
    assert cluster.planner.picture.map.blocks_of(a.id) == 20


def test_a_worker_with_many_blocks_is_taken_in_and_apart_by_steps() -> None:
    a, b = Worker("a", capacity=10_000), Worker("b")
    cluster = Cluster(replace(POLICY, fill_step=100))
    a.store([block for i in range(40) for block in chain(f"c{i}", 50)], 0.0)
    a.log._kept.clear()  # only a snapshot can tell
    cluster.add(a)
    cluster.add(b)
    sizes = set()
    for _ in range(400):
        before = cluster.planner.picture.map.copies
        cluster.run(0.002, check=False)
        sizes.add(abs(cluster.planner.picture.map.copies - before))
    assert cluster.planner.picture.map.blocks_of(a.id) == 2_000
    assert max(sizes) <= 300
    extra = chain("more", 3)
    cluster.store(a, extra)
    assert cluster.planner.picture.map.holds(a.id, extra[-1].key)
    cluster.leave(a)
    assert cluster.planner.picture.map.get(extra[0].key) is None, "gone at once for whoever asks"
    assert cluster.planner.picture.map.copies > 1_000, "and taken apart later"
    cluster.run(1.0)
    assert cluster.planner.picture.map.copies == 0


def test_the_lease_is_a_level() -> None:
    cluster = cluster_of(Worker("a"))
    assert cluster.planner.leads(cluster.now)
    cluster.feed(Led(1, cluster.now - 1.0))
    assert not cluster.planner.leads(cluster.now)


def test_a_drain_asks_for_what_had_no_room_in_the_map_and_says_what_has_none_even_so() -> None:
    a, b = Worker("a", capacity=200), Worker("b", host="h2", capacity=500)
    cluster = cluster_of(a, b, policy=replace(POLICY, max_blocks=60))
    cluster.store(a, chain("first", 40))
    cluster.store(b, chain("other", 50))
    assert cluster.planner.picture.map.unseen_of(a.id) > 0, "b's, which came later, are known"
    cluster.drain(a)
    cluster.run(20.0)
    report = cluster.drained(a)
    assert (report.state, report.left) == ("done", 0), report.why
    assert {block.key for block in chain("first", 40)} <= set(b.held)

    a, b = Worker("a", capacity=200), Worker("b", host="h2", capacity=500)
    cluster = cluster_of(a, b, policy=replace(POLICY, max_blocks=60))
    cluster.store(a, chain("too long", 100))
    cluster.drain(a)
    cluster.run(20.0)
    report = cluster.drained(a)
    assert report.state == "done" and report.left == 100 - report.copied > 0
    assert "has no room" in report.why
