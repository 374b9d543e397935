"""One run: options to a :class:`Result`. Everything that happens in it follows from the options and the trace."""

from __future__ import annotations

import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from load.sim.cluster import Cluster, ClusterOptions, check_possible
from load.sim.coupled import CoupledCluster, CoupledOptions
from load.sim.faults import Fault, node_names
from load.sim.loop import Loop
from load.sim.outcome import Objective, Outcomes, Summary
from load.sim.profile import NodeProfile, read_profile
from load.sim.request import Job
from load.workload.traces import Arrival, Trace
from services.conductor.core.policies.registry import ADMISSIONS, OURS, POLICIES
from shared.errors import UserError
from shared.ids import BlockKey
from shared.order import FCFS, ORDER, SRPT, Order, aged
from shared.store import policies
from shared.units import format_seconds, parse_seconds

ORDERS = ("fcfs", "srpt", "aged", "bounded")
AGING = 0.05
"""Of ``aged``, unless given as in ``aged:0.1``: a prompt that waits 20 s longer may take 1 s more of computing."""
_SAMPLE_S = 5.0
_PROGRESS_REQUESTS = 100
_SLOWEST, _SLOWED_S = 0.125, 86_400.0
"""A trace may be slowed down to this rate, or to last so long: idle virtual time costs real time too."""
_MOST_GAP_S = 30 * 86_400.0
"""Between two requests, as in a trace itself."""
_MOST_CONDUCTORS = 64
_MOST_NODES = 4096
_NOT_COUPLED = ("elastic", "pipeline", "nic_gbps", "dram_tokens", "ssd_tokens", "admission", "queue", "conductors",
                "message_delay_s", "faults")
"""Options that coupled instances know nothing of."""
_COUPLED_ONLY = ("prefix_cache", "chunk_tokens")
_OPTION = {"faults": "--fault", "message_delay_s": "--message-delay"}
"""{field of the options: its option} where they have other names."""
_STRETCH = re.compile(r"(?P<base>[^+]+)\+\s*(?P<stretch>[0-9]+(?:\.[0-9]*)?)\s*x")

Progress = Callable[[int, int], None]
"""Called with requests ended, and all."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to simulate; the defaults are those of the command line."""

    profile: str = "a800-llama3-70b"
    prefill: int = 8
    decode: int = 8
    coupled: int = 0
    """Coupled instances instead of prefill and decode nodes, when above 0."""
    prefix_cache: bool = False
    chunk_tokens: int = 0
    """Of coupled instances."""
    pipeline: int = 1
    """Prefill nodes that work as one."""
    nic_gbps: float | None = None
    dram_tokens: int | None = None
    ssd_tokens: int = 0
    cache_policy: str = policies.DEFAULT
    """What leaves a prefill node's full cache first; that of workers unless given."""
    policy: str = OURS
    admission: str = "none"
    queue: str = ""
    """Order of the prefill queues; the policy's own when empty."""
    rate_scale: float = 1.0
    ttft_slo: str = "30s"
    """Like ``30s``, or ``1s+3x``: a second and three times the prompt's own uncached prefill."""
    tbt_slo_s: float = 0.1
    output_tokens: int | None = None
    """Length of every answer, instead of the trace's."""
    elastic: bool | None = None
    """Whether every node can prefill and decode, by need; ``None``: where the policy is ours and nodes are not grouped
    into pipelines."""
    repeat: int = 1
    """The trace so many times, one after the other, each time with fresh ids."""
    conductors: int = 1
    message_delay_s: float = 0.0005
    seed: int = 0
    faults: tuple[Fault, ...] = ()

    @property
    def queue_name(self) -> str:
        """Order of the prefill queues: that asked for, or else the policy's; others' are run as published, first come,
        first served."""
        return self.queue or ("bounded" if self.policy == OURS else "fcfs")

    @property
    def is_elastic(self) -> bool:
        """Whether nodes change roles."""
        return self.policy == OURS and self.pipeline == 1 if self.elastic is None else self.elastic

    @property
    def asks_slo(self) -> bool:
        """Whether requests bring their bounds, so that what becomes of them depends on these."""
        return self.admission != "none"

    def objective(self, ttft_slo: str | None = None) -> Objective:
        """The bounds, or those with another TTFT bound."""
        text = self.ttft_slo if ttft_slo is None else ttft_slo
        base, stretch = text, 0.0
        if match := _STRETCH.fullmatch(text.strip()):
            base, stretch = match["base"].strip(), float(match["stretch"])
        try:
            ttft_s = parse_seconds(base)
        except ValueError as error:
            raise UserError(f"--ttft-slo: {error}, or like 1s+3x") from error
        if ttft_s <= 0:
            raise UserError(f"--ttft-slo {text}: a bound must be above 0 s, also what comes before the + of 1s+3x")
        if self.tbt_slo_s <= 0:
            raise UserError(f"--tbt-slo {format_seconds(self.tbt_slo_s)}: a bound must be above 0 s")
        return Objective(ttft_s=ttft_s, tbt_s=self.tbt_slo_s, stretch=stretch)


class Sample(NamedTuple):
    """The pools at one moment. A load of 1 is all that the pool's nodes can take within the bounds, on average."""

    at_s: float
    waiting_tokens: int
    """Of prompts, waiting or running at prefill nodes."""
    batch: int
    """Requests in decode batches."""
    prefill_load: float
    """Seconds of computing on hand, a prefill node, over the TTFT bound (that of a short prompt)."""
    decode_load: float
    """The larger of step time over TBT bound and of memory in use over all, a decode node."""


@dataclass
class Result:
    """What one run brought."""

    options: RunOptions
    trace: str
    summary: Summary
    outcomes: Outcomes
    curve: list[Sample] = field(default_factory=list)
    is_given_up: bool = False
    """Stopped early, since it could not reach what was asked."""


def simulate(trace: Trace, options: RunOptions, *, bounds: Sequence[str] = (), progress: Progress | None = None,
             give_up_share: float | None = None, log: Callable[[float, Any, Any], None] | None = None) -> Result:
    """Runs to the end, or until more than ``give_up_share`` of all requests have missed a bound.

    ``bounds`` are TTFT bounds whose shares are wanted too; then all of them must have been missed by so many.

    Raises :class:`UserError` for options that contradict each other or a cluster that cannot be.
    """
    profile = check(options, trace)
    began_s = time.perf_counter()
    loop = Loop()
    expected = len(trace.arrivals) * options.repeat
    outcomes = Outcomes(options.objective(), profile, expected=expected,
                        others=[options.objective(bound) for bound in bounds])
    cluster = _cluster(loop, options, trace, profile, outcomes, log)
    cluster.offer(_jobs(trace, options))
    curve: list[Sample] = []
    if isinstance(cluster, Cluster):
        for fault in options.faults:
            fault.schedule(cluster)
        _sample(loop, cluster, curve)
    most_missed = expected if give_up_share is None else int(give_up_share * expected)
    reported = 0

    def is_over() -> bool:
        nonlocal reported
        ended = outcomes.ended
        if progress is not None and ended - reported >= _PROGRESS_REQUESTS:
            reported = ended
            progress(ended, expected)
        return ended >= expected or outcomes.missed > most_missed

    with _uncollected():
        loop.run(is_over=is_over)
    if progress is not None:
        progress(outcomes.ended, expected)
    summary = outcomes.summary(transferred_bytes=cluster.transferred_bytes, busy_s=cluster.busy_s,
                               duration_s=loop.now, wall_s=time.perf_counter() - began_s)
    return Result(options, trace.name, summary, outcomes, curve, is_given_up=outcomes.ended < expected)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A run makes millions of objects and no circles of them; to look for circles takes a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def order_of(options: RunOptions) -> Order:
    """The order of the prefill queues."""
    name, *amounts = options.queue_name.split(":")
    numbers = [_amount(options.queue, amount) for amount in amounts]
    match name, numbers:
        case "fcfs", []:
            return FCFS
        case "srpt", []:
            return SRPT
        case "aged", []:
            return aged(AGING)
        case "aged", [aging]:
            return aged(aging)
        case "bounded", []:
            return ORDER
        case "bounded", [stretch, most_s]:
            return Order(stretch=stretch, most_s=most_s)
    raise UserError(f"there is no queue {options.queue}; there are {', '.join(ORDERS)}, aged:0.1, bounded:20:40")


def _amount(queue: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not amount >= 0:
        raise UserError(f"--queue {queue}: expected a number that is not negative, like aged:0.1, not {text!r}")
    return amount


def check(options: RunOptions, trace: Trace) -> NodeProfile:
    """The profile; raises :class:`UserError` for options that contradict each other or a cluster that cannot be."""
    profile = read_profile(options.profile)
    options.objective()
    if not 0 < options.rate_scale < math.inf:
        raise UserError(f"--rate-scale is {options.rate_scale:g}; expected a number above 0")
    if options.policy not in POLICIES:
        raise UserError(f"there is no policy {options.policy}; there are {', '.join(POLICIES)}")
    if options.cache_policy not in policies.POLICIES:
        raise UserError(f"there is no cache policy {options.cache_policy}; there are {', '.join(policies.POLICIES)}")
    if options.admission not in ADMISSIONS:
        raise UserError(f"there is no admission {options.admission}; there are {', '.join(ADMISSIONS)}")
    order_of(options)
    _check_rate(options, trace)
    for name, most in (("prefill", _MOST_NODES), ("decode", _MOST_NODES), ("coupled", _MOST_NODES),
                       ("conductors", _MOST_CONDUCTORS)):
        if getattr(options, name) > most:
            raise UserError(f"--{name} is {getattr(options, name)}; at most {most:,} are simulated")
    usual = RunOptions()
    ignored = _NOT_COUPLED if options.coupled else _COUPLED_ONLY
    for name in ignored:
        value, option = getattr(options, name), _OPTION.get(name, f"--{name.replace('_', '-')}")
        if value == getattr(usual, name) or value is False:
            continue
        if options.coupled:
            raise UserError(f"{option}: coupled instances have none of that; leave out --coupled or {option}")
        raise UserError(f"{option} is of coupled instances; say with --coupled how many there are, or leave it out")
    if not options.coupled:
        check_possible(_cluster_options(options, trace, profile))
        nodes = node_names(options.prefill // options.pipeline, options.decode)
        for fault in options.faults:
            fault.check(nodes)
    longest = max(trace.arrivals, key=lambda arrival: arrival.input_tokens + arrival.output_tokens)
    needed = longest.input_tokens + max(options.output_tokens or longest.output_tokens, 1)
    if 1 <= profile.vram_tokens < needed:
        raise UserError(f"request {longest.index} of {trace.name} needs {needed} tokens of KV; a node of profile "
                        f"{profile.name} has accelerator memory for {profile.vram_tokens}")
    return profile


def _check_rate(options: RunOptions, trace: Trace) -> None:
    """Raises :class:`UserError` where the rate makes a run that hardly ends."""
    as_it_is_s = trace.duration_s * options.repeat
    slowed_s = as_it_is_s / options.rate_scale
    lowest = min(_SLOWEST, as_it_is_s / _SLOWED_S)
    if options.rate_scale < lowest:
        raise UserError(f"--rate-scale {options.rate_scale:g}: the last request of {trace.name} would come after "
                        f"{slowed_s / 86_400:,.3g} days; give at least {lowest * 1.01:.3g}")
    if options.rate_scale < 1 and slowed_s > _MOST_GAP_S:
        gap_s = max(after.at_s - before.at_s for before, after in itertools.pairwise(trace.arrivals)) \
            / options.rate_scale
        if gap_s > _MOST_GAP_S:
            raise UserError(f"--rate-scale {options.rate_scale:g}: two requests of {trace.name} would be "
                            f"{gap_s / 86_400:,.3g} days apart, more than {_MOST_GAP_S / 86_400:.0f}; give a higher "
                            "rate")


def _cluster_options(options: RunOptions, trace: Trace, profile: NodeProfile) -> ClusterOptions:
    return ClusterOptions(
        profile=profile, prefill=options.prefill, decode=options.decode, block_tokens=trace.block_tokens,
        policy=options.policy, admission=options.admission, order=order_of(options),
        nic_gbps=options.nic_gbps, dram_tokens=options.dram_tokens, ssd_tokens=options.ssd_tokens,
        cache_policy=options.cache_policy,
        pipeline=options.pipeline, conductors=options.conductors,
        elastic=options.is_elastic,
        message_delay_s=options.message_delay_s, seed=options.seed, asks_slo=options.asks_slo,
        rechecks=options.admission != "none" and options.policy != OURS)


def _cluster(loop: Loop, options: RunOptions, trace: Trace, profile: NodeProfile, outcomes: Outcomes,
             log: Callable[[float, Any, Any], None] | None) -> Cluster | CoupledCluster:
    if options.coupled:
        return CoupledCluster(loop, CoupledOptions(
            profile=profile, instances=options.coupled, block_tokens=trace.block_tokens,
            has_prefix_cache=options.prefix_cache, chunk_tokens=options.chunk_tokens), outcomes)
    return Cluster(loop, _cluster_options(options, trace, profile), outcomes, log=log)


def _jobs(trace: Trace, options: RunOptions) -> Iterator[Job]:
    """The trace's requests as they arrive; block ids become keys of 32 bytes, other ones in each repetition."""
    gap_s = trace.duration_s + (trace.duration_s / len(trace.arrivals) if trace.arrivals else 0.0)
    index = itertools.count()
    for round_ in range(options.repeat):
        keys: dict[int, BlockKey] = {}
        # a hash: a conductor tells blocks apart by their keys folded, and ids and small numbers fold into one another
        salt = sha256(round_.to_bytes(8, "little")).digest()[:16] if round_ else bytes(16)
        for arrival in trace.arrivals:
            yield _job(next(index), arrival, (arrival.at_s + round_ * gap_s) / options.rate_scale, keys, salt, trace,
                       options)


def _job(index: int, arrival: Arrival, at_s: float, keys: dict[int, BlockKey], salt: bytes, trace: Trace,
         options: RunOptions) -> Job:
    chain = []
    for hash_id in arrival.hash_ids[:arrival.input_tokens // trace.block_tokens]:
        key = keys.get(hash_id)
        if key is None:
            key = keys[hash_id] = BlockKey(hash_id.to_bytes(16, "little") + salt)
        chain.append(key)
    return Job(index, at_s, num_tokens=arrival.input_tokens,
               output_tokens=max(options.output_tokens or arrival.output_tokens, 1), keys=chain,
               block_tokens=trace.block_tokens)


def _sample(loop: Loop, cluster: Cluster, curve: list[Sample]) -> None:
    options, objective, profile = cluster.options, cluster.outcomes.objective, cluster.options.profile

    def look() -> None:
        prefills = [job for node in cluster.prefill.values() for job in node.jobs if job.prefilled_s < 0]
        decoding = [node for node in cluster.decode.values() if node.batch]
        curve.append(Sample(
            loop.now, sum(job.num_tokens - job.done_tokens for job in prefills),
            sum(node.batch for node in decoding),
            sum(profile.compute_s(job.done_tokens, job.num_tokens) for job in prefills)
            / options.prefill / objective.ttft_s,
            sum(max(node.step_s(node.batch, node.context_tokens) / objective.tbt_s, node.used_share)
                for node in decoding) / options.decode))
        loop.after(_SAMPLE_S, look)

    look()
