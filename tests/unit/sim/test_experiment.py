"""Whole runs: every request ends once, the same seed decides the same, what cannot be is refused."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load.sim.experiment import RunOptions, _jobs, check, simulate
from load.sim.faults import Fault, parse_fault
from load.sim.many import find_knee
from load.sim.profile import read_profile
from load.workload.traces import Trace
from services.conductor.core.machine import Conductor
from services.conductor.core.policies.registry import POLICIES
from services.conductor.core.prefix_index import fingerprints
from shared.errors import UserError
from shared.machine import Asked, Reply, Woke
from tests.unit.sim.builders import PROFILE, profile_file, quick, trace


def busy(requests: int, *, seed: int = 0, per_s: float = 4.0) -> Trace:
    """Prompts of 20 to 400 tokens over a few shared prefixes."""
    rng = random.Random(seed)
    rows, at_s = [], 0.0
    for index in range(requests):
        blocks, shared = rng.randint(2, 40), rng.randint(0, 20)
        chat = rng.randrange(6)
        ids = tuple(chat * 100 + i if i < shared else 10_000 + index * 100 + i for i in range(blocks))
        rows.append((at_s, blocks * 10 - rng.randrange(10), rng.randint(1, 40), ids))
        at_s += rng.expovariate(per_s)
    return trace(*rows)


def options(folder: Path, **changes: Any) -> RunOptions:
    profile = profile_file(folder, quick(vram_bytes=640e3))
    return RunOptions(**{"profile": profile, "prefill": 2, "decode": 2, **changes})


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everybody(policy: str, tmp_path: Path) -> None:
    result = simulate(busy(40), options(tmp_path, policy=policy))
    summary = result.summary
    assert summary.completed == summary.requests == summary.accepted == 40
    assert sorted(int(row[0]) for row in result.outcomes.table()) == list(range(40))
    assert 0 < summary.ttft_s.p50 <= summary.ttft_s.p99 and 0 <= summary.hit_tokens < summary.prompt_tokens


@pytest.mark.parametrize("admission", ["slo", "baseline", "early", "early_prediction"])
def test_under_overload_each_request_is_served_or_turned_away(admission: str, tmp_path: Path) -> None:
    summary = simulate(busy(200, per_s=40.0), options(
        tmp_path, policy="mooncake_a1", admission=admission, ttft_slo="1s", tbt_slo_s=0.05)).summary
    assert summary.completed + sum(summary.rejected.values()) == 200 and summary.rejected


_FAULTS = st.builds(
    lambda kind, node, start, length: Fault(kind, node, start, start + length,
                                            {"crash": 0.0, "slow": 3.0, "cut": 0.0, "lose": 0.3}[kind]),
    st.sampled_from(["crash", "slow", "cut", "lose"]), st.sampled_from(["prefill-1", "prefill-2", "decode-1"]),
    st.floats(0.0, 15.0), st.floats(1.0, 20.0))


@settings(max_examples=8, deadline=None)
@given(faults=st.lists(_FAULTS, max_size=3, unique_by=lambda fault: (fault.kind, fault.node)),
       seed=st.integers(0, 5), queue=st.sampled_from(["fcfs", "srpt", "aged"]))
def test_whatever_breaks_every_request_ends_once(tmp_path_factory: pytest.TempPathFactory, faults: list[Fault],
                                                 seed: int, queue: str) -> None:
    result = simulate(busy(40, seed=seed), options(tmp_path_factory.mktemp("faults"), faults=tuple(faults), seed=seed,
                                                   queue=queue))
    summary = result.summary
    assert sorted(int(row[0]) for row in result.outcomes.table()) == list(range(40))
    assert summary.completed + summary.failed + sum(summary.rejected.values()) == 40


def test_the_same_seed_decides_the_same_and_another_one_does_not(tmp_path: Path) -> None:
    def decisions(seed: int) -> list[Any]:
        said: list[Any] = []
        simulate(busy(50), options(tmp_path, seed=seed, policy="random"), log=lambda now, event, effects: said.extend(
            (now, effect.message) for effect in effects if isinstance(effect, Reply)))
        return said

    first = decisions(1)
    assert first == decisions(1) and first != decisions(2)


async def test_the_recorded_events_lead_to_the_same_decisions_under_the_asyncio_driver(tmp_path: Path) -> None:
    from load.sim.cluster import Names
    from services.conductor.core.policy import Policy
    from shared.bus.memory import MemoryBus
    from shared.clock import ManualClock
    from shared.driver import Driver
    from shared.ids import ConductorId

    recorded: list[tuple[float, Any, Any]] = []
    simulate(busy(60), options(tmp_path), log=lambda now, event, effects: recorded.append((now, event, effects)))
    expected = [effect.message for _, _, effects in recorded for effect in effects if isinstance(effect, Reply)]
    machine = Conductor(ConductorId("conductor-1"), Names(), Policy(
        suspect_after_s=5.0, dead_after_s=12.0, max_queue_s=1e9, candidates=8), seed=0)
    clock, replies = ManualClock(), []

    class Recording:
        """The machine; its effects stay here, since the recording has what came of them."""

        def handle(self, event: Any, *, now: float) -> list[Any]:
            replies.extend(e.message for e in machine.handle(event, now=now) if isinstance(e, Reply))
            handled.append(event)
            changed.set()
            return []

        next_wake = staticmethod(machine.next_wake)
        check_invariants = staticmethod(machine.check_invariants)

    handled: list[Any] = []
    changed = asyncio.Event()
    driver: Driver[Any] = Driver(Recording(), MemoryBus(), clock, name="parity")
    running = asyncio.create_task(driver.run())
    try:
        for count, (now, event, _) in enumerate(recorded, start=1):
            clock.advance(now - clock.monotonic())
            if isinstance(event, Woke):
                driver.poke()
            else:
                driver.feed(event)
            async with asyncio.timeout(10):
                while len(handled) < count:
                    changed.clear()
                    await changed.wait()
    finally:
        running.cancel()
    assert [type(event) for event in handled] == [type(event) for _, event, _ in recorded]
    assert sum(isinstance(event, Asked) for event in handled) == 60
    assert replies == expected


def test_several_conductors_share_the_requests(tmp_path: Path) -> None:
    alone = simulate(busy(80), options(tmp_path)).summary
    three = simulate(busy(80), options(tmp_path, conductors=3, message_delay_s=0.005)).summary
    assert three.completed == 80 and three.ttft_s.mean < 1.5 * alone.ttft_s.mean + 0.1


def test_a_trace_can_be_repeated_with_fresh_ids(tmp_path: Path) -> None:
    once = simulate(busy(30), options(tmp_path)).summary
    twice = simulate(busy(30), options(tmp_path, repeat=2)).summary
    assert twice.completed == 60
    assert twice.hit_tokens == pytest.approx(2 * once.hit_tokens, rel=0.25)


def test_a_conductor_tells_the_blocks_of_repetitions_apart(tmp_path: Path) -> None:
    keys = {key for job in _jobs(busy(30), options(tmp_path, repeat=40)) for key in job.keys}
    assert len(set(fingerprints(b"".join(keys)))) == len(keys)


@pytest.mark.parametrize(("changes", "message"), [
    ({"prefill": 0}, "--prefill is 0; a cluster needs at least 1"),
    ({"decode": 0}, "--decode is 0"),
    ({"policy": "fastest"}, "there is no policy fastest; there are random"),
    ({"admission": "maybe"}, "there is no admission maybe"),
    ({"queue": "aged:much"}, "--queue aged:much: expected a number"),
    ({"queue": "aged:nan"}, "--queue aged:nan: expected a number"),
    ({"queue": "lifo"}, "there is no queue lifo"),
    ({"cache_policy": "best"}, "there is no cache policy best; there are hit_density"),
    ({"rate_scale": float("nan")}, "--rate-scale is nan; expected a number above 0"),
    ({"rate_scale": 0.0}, "--rate-scale is 0; expected a number above 0"),
    ({"ttft_slo": "soon"}, "--ttft-slo: 'soon' is not a duration"),
    ({"ttft_slo": "0s"}, "--ttft-slo 0s: a bound must be above 0 s"),
    ({"ttft_slo": "0s+3x"}, "--ttft-slo"),
    ({"tbt_slo_s": 0.0}, "--tbt-slo 0.0 ms: a bound must be above 0 s"),
    ({"nic_gbps": -1.0}, "--nic-gbps is -1"),
    ({"nic_gbps": float("nan")}, "--nic-gbps is nan"),
    ({"profile": "h9000"}, "there is no profile h9000; there are a800-llama3-70b"),
    ({"faults": (parse_fault("crash:prefill-9@3"),)},
     "fault crash names node prefill-9; there are prefill-1, prefill-2, decode-1, decode-2$"),
    ({"coupled": 2, "faults": (parse_fault("crash:prefill-1@3"),)}, "--fault: coupled instances have none of that"),
    ({"coupled": 2, "elastic": True}, "--elastic: coupled instances have none of that; leave out --coupled"),
    ({"coupled": 2, "pipeline": 2}, "--pipeline: coupled instances"),
    ({"coupled": 2, "dram_tokens": 0}, "--dram-tokens: coupled instances"),
    ({"coupled": 2, "message_delay_s": 1.0}, "--message-delay: coupled instances"),
    ({"chunk_tokens": 512}, "--chunk-tokens is of coupled instances; say with --coupled how many"),
    ({"prefix_cache": True}, "--prefix-cache is of coupled instances"),
    ({"rate_scale": 1e-300}, "--rate-scale 1e-300: the last request of made would come after .* days; give at"),
    ({"rate_scale": 1e-9}, "--rate-scale 1e-09: .* give at least"),
    ({"conductors": 500}, "--conductors is 500; at most 64"),
    ({"decode": 10**9}, "--decode is 1000000000; at most 4,096"),
])
def test_what_cannot_be_is_refused_with_the_numbers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message.replace("-", "[-]")):
        simulate(busy(5), options(tmp_path, **changes))


def test_a_trace_may_be_slowed_down_to_an_eighth_or_to_a_day(tmp_path: Path) -> None:
    day_s = 86_400.0
    for duration_s, least in ((10.0, 10.0 / day_s), (day_s, 0.125), (20 * day_s, 0.125)):
        one = trace((0.0, 95, 4, ()), (duration_s / 2, 95, 4, ()), (duration_s, 95, 4, ()))
        check(options(tmp_path, rate_scale=least if duration_s < day_s else 1.0), one)
        with pytest.raises(UserError, match="would come after") as error:
            check(options(tmp_path, rate_scale=least * 0.99), one)
        said = float(str(error.value).rsplit(maxsplit=1)[1])
        assert least <= said < 1.1 * least, "what it says is enough"
    check(options(tmp_path, rate_scale=0.34), one)
    with pytest.raises(UserError, match=r"two requests of made would be 33\.3 days apart, more than 30"):
        check(options(tmp_path, rate_scale=0.3), one)


@pytest.mark.parametrize(("changes", "message"), [
    ({"layers": 0}, "layers is 0: expected `int` >= 1"),
    ({"nic_efficiency": 0}, "nic_efficiency is 0: expected `float` > 0.0"),
    ({"dtype": "foo"}, 'dtype is "foo": expected one of float32'),
    ({"decode_fixed_s": -1}, "decode_fixed_s is -1: expected `float` >= 0.0"),
    ({"max_running": 0}, "max_running is 0"), ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens is 0"),
    ({"prefill_per_token_s": 0, "prefill_per_token2_s": 0}, "prefill_per_token_s and prefill_per_token2_s are both 0"),
    ({"decode_fixed_s": 0, "decode_per_request_s": 0}, "a decode step must take time"),
    ({"wings": 2}, "wings"),
    ({"weights_bytes": float("nan")}, "weights_bytes is nan: expected a number"),
    ({"vram_bytes": float("inf")}, "vram_bytes is inf: expected a number"),
])
def test_a_profile_that_cannot_be_is_refused_with_field_and_value(changes: dict[str, Any], message: str,
                                                                  tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**msgspec.to_builtins(PROFILE), **changes}))
    with pytest.raises(UserError) as caught:
        read_profile(str(path))
    assert f"profile {path}: " in str(caught.value) and message in str(caught.value)


def test_a_model_larger_than_the_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    profile = profile_file(tmp_path / "other", quick(weights_bytes=141e9, vram_bytes=80e9))
    with pytest.raises(UserError, match="weights take 141 GB and a node has 80 GB"):
        simulate(busy(5), options(tmp_path, profile=profile))


def test_a_prompt_larger_than_the_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"request 0 of made needs 20005 tokens of KV; .* memory for 10000"):
        simulate(trace((0.0, 20_000, 5, tuple(range(2000)))), options(tmp_path))


def test_the_length_fair_bound_grows_with_the_prompt(tmp_path: Path) -> None:
    objective = RunOptions(ttft_slo="1s+3x").objective()
    assert (objective.ttft_s, objective.stretch) == (1.0, 3.0)
    result = simulate(busy(20), options(tmp_path, ttft_slo="500ms + 2x"))
    for row in result.outcomes.table():
        assert row[5] == pytest.approx(0.5 + 2 * PROFILE.prefill_per_token_s * row[2])


def test_the_knee_is_where_enough_are_inside(tmp_path: Path) -> None:
    knee = find_knee(busy(80), options(tmp_path, ttft_slo="1s", tbt_slo_s=1.0, queue="fcfs"), low=0.05, high=50.0)
    assert knee.ran.summary.slo_share >= 0.95 and knee.ran.run.options.rate_scale == knee.rate_scale
    too_fast = [rate for rate, is_good in knee.tried if not is_good]
    assert too_fast and 1.0 < min(too_fast) / knee.rate_scale < 1.03
    with pytest.raises(UserError, match="not even 40x"):
        find_knee(busy(80), options(tmp_path, ttft_slo="1ms", tbt_slo_s=1.0), low=40.0, high=50.0)


@pytest.mark.parametrize(("text", "fault"), [
    ("crash:prefill-2@100", Fault("crash", "prefill-2", 100.0, float("inf"), 0.0)),
    ("slow:decode-1@5-7.5x2.5", Fault("slow", "decode-1", 5.0, 7.5, 2.5)),
    ("lose:all@1-2x0.02", Fault("lose", "all", 1.0, 2.0, 0.02)),
])
def test_faults_are_read(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize("text", ["melt:prefill-1@3", "crash", "crash:prefill-1@9-3", "slow:prefill-1@3x0",
                                  "cut:a@1x2", "slow:prefill-1@3-9", "crash:a@1.2.3"])
def test_faults_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--fault"):
        parse_fault(text)
