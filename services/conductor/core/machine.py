"""The conductor as a machine: it hears what everybody says, and answers where a request shall run.

Theory of operation
-------------------

Nothing here is the truth. Workers own their blocks and their queues; the conductor keeps copies that it can rebuild
from them at any time: ``Membership`` from hellos and heartbeats, ``PrefixIndex`` from KV events and syncs
(``FeedTracker`` keeps it exact), ``Cluster`` from decisions, progress and heartbeats.

===============  ====================================================================================
event            what it does
===============  ====================================================================================
Started          rollcall; from here on the conductor converges
Deaf             nobody's silence counts: the bus is away
Reconnected      the same, and a rollcall: what was said meanwhile is lost, heartbeats will show what
Hello            a worker joins: its blocks are asked for; a cache spec that does not fit is refused
Load             sign of life; corrects its queue; shows KV events that got lost
Bye              the worker and its blocks are gone
Stored, Evicted  the index follows
Progress         load leaves the prefill worker, then the decode worker; costs are refitted
Placed           another conductor decided: its load and its promised blocks count too
Cancel, Done     nothing of the request burdens anybody any more
Asked            PlaceRequest: a Placement or a Rejection; WorkersQuery: the cluster as seen from here
Answered,        an owner told what was missed, or did not
Unanswered
Woke             silent workers turn SUSPECT, then DEAD; holes and promises get old
===============  ====================================================================================

Convergence: once the rollcall's window is over and every worker that answered has told its blocks, or some seconds
have passed, ``Converged`` is emitted, once. Before it a conductor should not be asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from services.conductor.core.answers import beginning
from services.conductor.core.cluster import Cluster
from services.conductor.core.placement import Placer, Usable
from services.conductor.core.policies.base import PlacementPolicy
from services.conductor.core.policy import Policy
from services.conductor.core.prefix_index import Fingerprint, Match, PrefixIndex, fingerprints, prints_of
from services.conductor.core.promises import Promises
from services.conductor.core.roles import Advice, Roles, in_line
from services.conductor.core.worker import Worker
from shared.errors import Bug
from shared.ids import ConductorId, RequestId, SpecDigest, WorkerId
from shared.kv import KEY_BYTES, Tier
from shared.kv.feed import Action, Apply, Ask, FeedStatistics, FeedTracker, Gather, Reset, Swap
from shared.machine import Answered, Asked, Effect, Publish, Reply, Request, Unanswered, Woke
from shared.membership import Change, Changed, Conflict, Joined, Membership, Unknown
from shared.messages import (
    Bye,
    Cancel,
    Evicted,
    Hello,
    IndexState,
    Load,
    Placed,
    Placement,
    PlaceRequest,
    Progress,
    Refuse,
    Rejection,
    RequestDone,
    Role,
    RoleAdvice,
    Rollcall,
    Stored,
    StoredBlock,
    WorkersQuery,
    WorkersReply,
    WorkerState,
)

_ROLLCALL_PAUSE_S = 1.0
"""At most one rollcall in this time, however many strangers send heartbeats."""
_TELLING = 20
"""What a worker's first few requests were off by says more about its start than about its estimates."""
_TIDY_SLICE = 1024
"""Rows or blocks of the index that are cleaned up at a time: what a question may have to wait for."""
_TIDY_PAUSE_S = 0.002
"""Time for others between two slices."""


class Addresses(Protocol):
    """Where effects go; rendered by the shell, since the core knows no subjects."""

    rollcall: Any
    placed: Any

    def sync(self, worker: WorkerId) -> Any:
        """Where ``worker`` answers what was missed."""
        ...

    def refuse(self, worker: WorkerId) -> Any:
        """Where ``worker`` hears that it must stop."""
        ...


class Started(msgspec.Struct, frozen=True):
    """The shell listens; the first event."""


class Deaf(msgspec.Struct, frozen=True):
    """The bus is away; comes again and again until it is back."""


class Reconnected(msgspec.Struct, frozen=True):
    """The bus was away and is back."""


class Converged(Effect, frozen=True):
    """Requests can be placed well from now on; ``missing`` workers have not told their blocks in time."""

    workers: int
    missing: list[WorkerId]


Event = (Started | Deaf | Reconnected | Hello | Load | Bye | Stored | Evicted | Progress | Placed | Cancel | RequestDone
         | Asked | Answered | Unanswered | Woke)


@dataclass(frozen=True)
class Statistics:
    """The machine's state in numbers, for metrics."""

    workers: Mapping[tuple[str, str], int]
    """{(role, state): workers}"""
    blocks: Mapping[WorkerId, int]
    """{worker: blocks indexed}"""
    dropped_blocks: int
    """Copies the full index did not take."""
    index_bytes: int
    """Memory the index takes, estimated."""
    promised_blocks: int
    jobs: int
    """Requests in flight."""
    mismatched_events: int
    """KV events of another cache spec than their worker's."""
    refused: Mapping[str, int]
    """{kind: loads and observed times that cannot be true}"""
    feed: FeedStatistics
    syncs: Mapping[tuple[WorkerId, str], int]
    """{(worker, why): questions asked of its present life}"""
    errors: Mapping[tuple[WorkerId, str], float]
    """{(worker, model): smoothed relative error of its estimates}"""


@dataclass(frozen=True)
class _Pool:
    """The workers of one spec, for as long as nothing changes about any worker."""

    block_tokens: int
    senders: tuple[WorkerId, ...]
    """Who may send blocks: also those that take no new work."""
    takers: Sequence[Worker]
    """Who may get new work."""
    usable: Usable
    """These, by role."""
    roles: Roles | None
    """Decides who of them has which role; ``None`` when each has but one."""
    version: int
    """Of the roles."""


class Conductor:
    """See the module. One instance decides alone; several share their decisions as ``Placed``."""

    def __init__(self, conductor: ConductorId, addresses: Addresses, policy: Policy, *, seed: int,
                 placer: PlacementPolicy | None = None, published: str = "") -> None:
        """``placer`` decides instead of our own policy, and ``published`` is its name; ``seed`` is that of our own."""
        self.id = conductor
        self._published = published
        self._addresses, self._policy = addresses, policy
        self._membership = Membership(policy.suspect_after_s, policy.dead_after_s)
        self._feed = FeedTracker(hold_s=policy.hold_s, by_page=True)
        self._index = PrefixIndex(max_blocks=policy.max_blocks, max_bytes=policy.max_index_bytes)
        self._promises = Promises(max_blocks=policy.max_promised)
        self._cluster = Cluster(policy)
        self._placer: PlacementPolicy = placer or Placer(conductor, policy, seed=seed)
        #: published policies know workers at home, as long as there are any
        self._is_elastic = isinstance(self._placer, Placer)
        self._started_s: float | None = None
        #: when to look whether all have told their blocks; ``None`` before the start and once converged
        self._converge_s: float | None = None
        self._tick_s = 0.0
        #: when the next slice of the index is cleaned up; ``None`` when there is nothing to clean
        self._tidy_s: float | None = None
        #: {spec: its workers}, forgotten whenever something changes about any of them
        self._pools: dict[SpecDigest, _Pool] = {}
        #: {spec: what its load needs}, of specs with live workers
        self._roles: dict[SpecDigest, Roles] = {}
        self._rollcall_s = -math.inf
        self._mismatched_events = 0
        #: {(worker, why): questions asked of its present life}
        self._syncs: Counter[tuple[WorkerId, str]] = Counter()

    # The door

    def handle(self, event: Event, *, now: float) -> Sequence[Effect]:
        """Applies ``event``; see the table above."""
        match event:
            case Asked(token=token, message=PlaceRequest() as ask):
                return self._place(token, ask, now)
            case Asked(token=token, message=WorkersQuery()):
                return [Reply(token, self._workers(now))]
            case Stored() | Evicted():
                return self._act(self._feed.offer(event, now), now)
            case Progress():
                self._progress(event, now)
                return []
            case Load():
                member = self._membership.members.get(event.worker)
                if member is not None and member.draining != event.draining:
                    self._pools.clear()
                effects = self._changes(self._membership.load(event, now=now), now)
                self._cluster.load(event, now)
                if (worker := self._cluster.workers.get(event.worker)) is not None and worker.spec in self._pools:
                    self._pools[worker.spec].usable.refresh()
                actions = self._feed.heartbeat(event.worker, event.incarnation, event.kv_seq, now)
                return [*effects, *self._act(actions, now)]
            case Hello():
                if wrong := _impossible(event):
                    return [self._refuse(event, wrong)]
                return self._changes(self._membership.hello(event, now=now), now)
            case Bye():
                return self._changes(self._membership.bye(event), now)
            case Placed():
                if event.placement.conductor != self.id and math.isfinite(
                        event.placement.predicted_ttft_s + event.head_start_s + (event.tbt_slo_s or 0.0)):
                    self._count(event, now)
                return []
            case Cancel():
                self._over(event.request, now, attempt=event.attempt)
                return []
            case RequestDone():
                if event.outcome == "ok":
                    self._cluster.answered(event.completion_tokens, event.tenant, event.request)
                self._over(event.request, now)
                return []
            case Answered(tag=Ask() as ask, message=reply):
                return [*self._act(self._feed.synced(ask.worker, reply, now), now), *self._converge(now)]
            case Unanswered(tag=Ask() as ask):
                return self._unanswered(ask, event, now)
            case Woke():
                return self._woke(now)
            case Started():
                self._started_s = self._tick_s = now
                self._converge_s = now + self._policy.rollcall_window_s
                self._membership.tick(now=now)
                return self._call_roll(now)
            case Deaf():
                self._membership.deaf(now=now)
                return []
            case Reconnected():
                self._membership.deaf(now=now)
                return self._call_roll(now)
            case _:
                raise Bug(f"the conductor cannot handle {event!r}")

    def next_wake(self) -> float | None:
        """When something gets old."""
        if self._started_s is None:
            return None
        wake_s = self._tick_s
        for time_s in (self._converge_s, self._feed.next_wake(), self._promises.next_wake(), self._tidy_s):
            if time_s is not None and time_s < wake_s:
                wake_s = time_s
        return wake_s

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when the copies contradict each other."""
        self._index.check_invariants()
        self._promises.check_invariants()
        live = {worker for worker, member in self._membership.members.items() if member.state != "dead"}
        if live != set(self._cluster.workers):
            raise Bug(f"conductor: live members {sorted(live)} are not the cluster's {sorted(self._cluster.workers)}")
        for worker in self._cluster.workers.values():
            worker.check_invariants()
            for job in [*worker.prefilling.values(), *worker.decoding.values()]:
                if self._cluster.jobs.get(job.request) is not job:
                    raise Bug(f"conductor: {worker.id} is burdened with request {job.request} that is over")

    def statistics(self) -> Statistics:
        """The state in numbers."""
        workers: dict[tuple[str, str], int] = {}
        for member in self._membership.members.values():
            kind = (member.hello.role, member.state)
            workers[kind] = workers.get(kind, 0) + 1
        return Statistics(
            workers=workers, blocks={worker: self._index.blocks_of(worker) for worker in self._cluster.workers},
            dropped_blocks=self._index.dropped_blocks, index_bytes=self._index.nbytes,
            promised_blocks=len(self._promises), jobs=len(self._cluster.jobs),
            mismatched_events=self._mismatched_events, refused=dict(self._cluster.refused),
            feed=self._feed.statistics, syncs=dict(self._syncs),
            errors={(worker.id, model): error for worker in self._cluster.workers.values()
                    for model, error in worker.costs.errors().items()})

    def advice(self, now: float) -> dict[SpecDigest, Advice]:
        """{spec: whether its workers' roles fit its load}, of specs that were asked for and have two workers or more.
        To be asked every second or so: looks at the load are counted."""
        return {spec: one for spec, _, one in self._advised(now)}

    def _advised(self, now: float) -> list[tuple[SpecDigest, Sequence[Worker], Advice]]:
        """The same, with the workers."""
        return [(spec, takers, roles.advice(takers, now)) for spec, roles in self._roles.items()
                if len(takers := self._takers(spec)) > 1]

    def told_advice(self, now: float) -> list[RoleAdvice]:
        """:meth:`advice` as it is told to others."""
        return [RoleAdvice(
            model=takers[0].hello.spec.model, spec=spec, prefill=one.prefill, decode=one.decode,
            best_prefill=one.best_prefill, best_decode=one.best_decode, needed_prefill=one.need.prefill,
            needed_decode=one.need.decode, is_wrong=one.is_wrong, is_short=one.is_short,
            prefill_rate=one.need.prefill_rate, queued_s=one.need.queued_s, decode_rate=one.need.decode_rate,
            step_s=one.need.step_s, step_limit_s=one.need.step_limit_s, batch=one.need.batch,
            context_tokens=one.need.context_tokens, memory=one.need.memory,
            answers=max(one.need.answers, one.need.answers_memory))
            for spec, takers, one in sorted(self._advised(now), key=lambda advised: advised[0])]

    # Requests

    def _place(self, token: int, ask: PlaceRequest, now: float) -> list[Effect]:
        self._over(ask.request, now)  # a former attempt, or the same asked again
        if wrong := _wrong(ask):
            return [Reply(token, _malformed(ask, wrong))]
        pool = self._pool(ask.spec, now)
        match, usable = self._match(ask, pool), self._asked_of(ask, pool)
        answer = self._decide(ask, usable, match, now)
        if (isinstance(answer, Rejection) and answer.code == "capacity" and pool.roles is not None
                and _is_full(usable, ask) and pool.roles.call_decode(pool.takers, now)):
            usable = self._asked_of(ask, self._pool(ask.spec, now))
            answer = self._decide(ask, usable, match, now)
        if isinstance(answer, Rejection):
            return [Reply(token, answer)]
        placed = Placed(placement=msgspec.structs.replace(answer, candidates=[], decode_candidates=[]),
                        num_tokens=ask.num_tokens, max_tokens=ask.max_tokens, keys=ask.keys,
                        ttft_slo_s=self._policy.ttft_left_s(ask), tenant=ask.tenant,
                        head_start_s=ask.head_start_s, tbt_slo_s=ask.tbt_slo_s or self._policy.tbt_slo_s)
        self._count(placed, now)
        return [Reply(token, answer), Publish(self._addresses.placed, placed)]

    def _decide(self, ask: PlaceRequest, usable: Usable, match: Match, now: float) -> Placement | Rejection:
        answer = self._placer.place(ask, self._cluster, usable, match, now=now)
        return msgspec.structs.replace(answer, policy=self._published) if self._published else answer

    def _match(self, ask: PlaceRequest, pool: _Pool) -> Match:
        """What is held, and what is promised, of the blocks that can be reused: not the one of the last token."""
        keys = ask.keys[:KEY_BYTES * ((ask.num_tokens - 1) // pool.block_tokens)]
        match = self._index.match(prints_of(keys), pool.senders)
        own, promised = match.own, self._promises.lengths(keys)
        for worker in [worker for worker, blocks in promised.items() if blocks > own.get(worker, 0)]:
            match.unmade[worker] = own.get(worker, 0)
            own[worker] = promised[worker]
        return match

    def _pool(self, spec: SpecDigest, now: float) -> _Pool:
        pool = self._pools.get(spec)
        if pool is not None:
            if pool.roles is not None:
                pool.roles.look(pool.takers, now)
            if pool.roles is None or pool.roles.version == pool.version:
                return pool
        workers = [worker for worker in self._cluster.workers.values() if worker.spec == spec
                   and self._membership.members[worker.id].state == "alive"]
        takers = self._takers(spec)
        roles = None
        if self._is_elastic and any(worker.hello.elastic for worker in takers):
            roles = self._roles_of(spec, now)
            roles.look(takers, now)
        pool = _Pool(workers[0].hello.spec.block_tokens if workers else 1, tuple(worker.id for worker in workers),
                     takers, self._usable(takers, roles, excluded=0), roles, roles.version if roles is not None else 0)
        if workers:  # else anybody could make us remember what nobody has
            self._pools[spec] = pool
        return pool

    def _asked_of(self, ask: PlaceRequest, pool: _Pool) -> Usable:
        """Who of the pool may be given ``ask``, by role."""
        if not ask.exclude:
            return pool.usable
        takers = [worker for worker in pool.takers if worker.id not in ask.exclude]
        return self._usable(takers, pool.roles, excluded=len(pool.takers) - len(takers))

    def _roles_now(self, now: float) -> dict[WorkerId, Role]:
        """What the elastic workers are given work for, of those that are given any."""
        roles: dict[WorkerId, Role] = {}
        for spec in {worker.spec for worker in self._cluster.workers.values() if worker.hello.elastic}:
            usable = self._pool(spec, now).usable
            roles |= {worker.id: "decode" for worker in usable.decode if worker.hello.elastic}
            roles |= {worker.id: "prefill" for worker in usable.prefill if worker.hello.elastic}
        return roles

    def _takers(self, spec: SpecDigest) -> list[Worker]:
        """Who of that spec may get new work."""
        members = self._membership.members
        return [worker for worker in self._cluster.workers.values() if worker.spec == spec
                and worker.hello.role != "store" and members[worker.id].state == "alive"
                and not members[worker.id].draining]

    def _usable(self, takers: Sequence[Worker], roles: Roles | None, *, excluded: int) -> Usable:
        """``takers`` by the role they have now, or, without ``roles``, at home; where nobody is left at home, the first
        in line of the other side stands in, if it can."""
        if roles is not None:
            return Usable(*roles.split(takers), excluded=excluded)
        prefill = [worker for worker in takers if worker.hello.role == "prefill"]
        decode = [worker for worker in takers if worker.hello.role == "decode"]
        if len(takers) > 1:
            if not decode and (worker := in_line(prefill)[-1]).does("decode"):
                prefill, decode = [other for other in prefill if other is not worker], [worker]
            elif not prefill and (worker := in_line(decode)[0]).does("prefill"):
                prefill, decode = [worker], [other for other in decode if other is not worker]
        return Usable(prefill, decode, excluded)

    def _roles_of(self, spec: SpecDigest, now: float) -> Roles:
        roles = self._roles.get(spec)
        if roles is None:
            roles = self._roles[spec] = Roles(tbt_slo_s=self._policy.tbt_slo_s, now=now)
        return roles

    def _count(self, placed: Placed, now: float) -> None:
        """A decision burdens its workers, and promises the prompt's blocks."""
        placement, begins = placed.placement, beginning(placed.keys)
        self._cluster.place(placement, num_tokens=placed.num_tokens, max_tokens=placed.max_tokens, now=now,
                            ttft_slo_s=placed.ttft_slo_s, tenant=placed.tenant, begins=begins,
                            head_start_s=placed.head_start_s)
        if (prefill := self._cluster.workers.get(placement.prefill)) is not None:
            self._roles_of(prefill.spec, now).asked(
                placement.predicted_prefill_s, now, num_tokens=placed.num_tokens,
                answer_tokens=self._cluster.answers.usual(placed.tenant, begins),
                max_tokens=placed.max_tokens)
        if (decode := self._cluster.workers.get(placement.decode)) is not None:
            self._roles_of(decode.spec, now).bounded(
                placed.tbt_slo_s, lone_s=decode.costs.step_s(batch=1, context_tokens=placed.num_tokens))
        if placement.prefill in self._cluster.workers and not len(placed.keys) % KEY_BYTES:
            self._promises.make(placement.request, placement.prefill, placed.keys,
                                until_s=now + placement.predicted_ttft_s + self._policy.promise_s)

    def _progress(self, progress: Progress, now: float) -> None:
        job = self._cluster.jobs.get(progress.request)
        ours = job is not None and job.attempt == progress.attempt
        self._cluster.progress(progress, now)
        if not ours or job is None:
            return
        if progress.stage == "failed":
            self._promises.end(progress.request)
        elif progress.stage == "prefill_started":
            self._promises.end_at(progress.request, now + job.work_s + self._policy.promise_s)
        else:
            self._promises.end_at(progress.request, now + self._policy.promise_s)

    def _over(self, request: RequestId, now: float, *, attempt: int = -1) -> None:
        job = self._cluster.jobs.get(request)
        if self._cluster.release(request, now=now, attempt=attempt) and job is not None and job.prefilled_s is None:
            self._promises.end(request)  # else its blocks are there, and the promise lasts until they are announced

    def _workers(self, now: float) -> WorkersReply:
        states, roles = [], self._roles_now(now)
        for worker_id, member in sorted(self._membership.members.items()):
            worker = self._cluster.workers.get(worker_id)
            states.append(WorkerState(
                hello=member.hello, load=member.load, state=member.state, silence_s=max(now - member.heard_s, 0.0),
                indexed_blocks=self._index.blocks_of(worker_id), waiting_s=worker.queue_s(now) if worker else 0.0,
                errors=worker.costs.errors(least=_TELLING) if worker else {}, other_load=member.other_load,
                now=roles.get(worker_id)))
        index = IndexState(
            block_copies=len(self._index), max_block_copies=self._policy.max_blocks, nbytes=self._index.nbytes,
            max_bytes=self._policy.max_index_bytes, dropped=self._index.dropped_blocks)
        return WorkersReply(conductor=self.id, workers=states, advice=self.told_advice(now), index=index)

    # Workers

    def _changes(self, changes: Iterable[Change], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for change in changes:
            self._pools.clear()
            match change:
                case Joined(hello=hello):
                    effects += self._join(hello, now)
                case Changed(worker=worker, after="dead"):
                    self._lose(worker, now)
                case Changed(worker=worker, before="dead"):
                    effects += self._join(self._membership.members[worker].hello, now)
                case Unknown():
                    effects += self._call_roll(now)
                case Conflict(hello=hello, message=message):
                    effects.append(self._refuse(hello, message))
        return effects

    def _join(self, hello: Hello, now: float) -> list[Effect]:
        self._lose(hello.worker, now)
        self._cluster.join(hello)
        return self._act(self._feed.joined(hello.worker, hello.incarnation, now), now)

    def _refuse(self, hello: Hello, message: str) -> Effect:
        return Publish(self._addresses.refuse(hello.worker), Refuse(
            worker=hello.worker, incarnation=hello.incarnation, message=message))

    def _lose(self, worker: WorkerId, now: float) -> None:
        self._feed.left(worker)
        self._promises.forget(worker)
        self._index.remove(worker)
        self._tidy_soon(now)
        gone = self._cluster.workers.get(worker)
        self._cluster.leave(worker)
        if gone is not None and all(other.spec != gone.spec for other in self._cluster.workers.values()):
            self._roles.pop(gone.spec, None)
        for kind in [kind for kind in self._syncs if kind[0] == worker]:
            del self._syncs[kind]

    def _call_roll(self, now: float) -> list[Effect]:
        if now - self._rollcall_s < _ROLLCALL_PAUSE_S:
            return []
        self._rollcall_s = now
        return [Publish(self._addresses.rollcall, Rollcall(asker=self.id))]

    # Blocks

    def _act(self, actions: Iterable[Action], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for action in actions:
            match action:
                case Apply(event=Stored() as event):
                    if self._fits(event.worker, event.spec):
                        for tier, blocks in _by_tier(event.blocks):
                            self._index.store(event.worker, blocks, tier)
                case Apply(event=Evicted() as event):
                    self._index.evict(event.worker, fingerprints(event.keys), event.tier)
                case Gather(worker=worker, spec=spec, blocks=page, is_first=is_first):
                    if is_first:
                        self._index.drop_gathered(worker)
                    if self._fits(worker, spec):
                        for tier, blocks in _by_tier(page):
                            self._index.gather(worker, blocks, tier)
                case Swap(worker=worker):
                    self._index.swap(worker)
                    self._tidy_soon(now)
                case Reset(worker=worker):  # it begins another life; pages that replace more come as Gather
                    self._index.remove(worker)
                    self._tidy_soon(now)
                case Ask(worker=worker, since=since, why=why):
                    self._syncs[worker, why] += 1
                    effects.append(Request(self._addresses.sync(worker), since, action, self._policy.sync_timeout_s))
        return effects

    def _tidy_soon(self, now: float) -> None:
        if self._tidy_s is None and not self._index.is_tidy:
            self._tidy_s = now + _TIDY_PAUSE_S

    def _fits(self, worker: WorkerId, spec: SpecDigest) -> bool:
        known = self._cluster.workers.get(worker)
        if known is not None and known.spec == spec:
            return True
        self._mismatched_events += 1
        return False

    def _unanswered(self, ask: Ask, event: Unanswered, now: float) -> list[Effect]:
        member = self._membership.members.get(ask.worker)
        effects: list[Effect] = []
        if event.gone and member is not None and member.state == "suspect":
            effects += self._changes(self._membership.gone(ask.worker, ask.since.incarnation), now)
        effects += self._act(self._feed.sync_failed(ask.worker, now, ask.since.incarnation), now)
        return [*effects, *self._converge(now)]

    # Time

    def _woke(self, now: float) -> list[Effect]:
        effects = self._act(self._feed.tick(now), now)
        self._promises.tick(now)
        if self._tidy_s is not None and now >= self._tidy_s:
            self._tidy_s = None if self._index.tidy(_TIDY_SLICE) else now + _TIDY_PAUSE_S
        if now >= self._tick_s:
            effects += self._changes(self._membership.tick(now=now), now)
            for request in self._cluster.sweep(now):
                self._promises.end(request)
            self._tick_s = self._membership.next_wake(now=now)
        return [*effects, *self._converge(now)]

    def _converge(self, now: float) -> list[Effect]:
        if self._started_s is None or self._converge_s is None:
            return []
        if now < self._started_s + self._policy.rollcall_window_s:
            return []
        missing = [worker for worker in self._cluster.workers if not self._feed.is_converged(worker)]
        self._converge_s = self._started_s + self._policy.converge_within_s
        if missing and now < self._converge_s:
            return []
        self._converge_s = None
        return [Converged(workers=len(self._cluster.workers), missing=missing)]


def _impossible(hello: Hello) -> str:
    """What no worker can be like; empty when all is well."""
    spec = hello.spec
    sizes = {"layers": spec.layers, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim,
             "block_tokens": spec.block_tokens, "max_running": hello.max_running}
    small = [f"{name} is {size}" for name, size in sizes.items() if size < 1]
    if spec.dtype not in ("float32", "float16", "bfloat16") and not (hello.role == "store" and spec.is_opaque):
        small.append(f"dtype is {spec.dtype!r}")
    return f"worker {hello.worker} registers what cannot be: {', '.join(small)}" if small else ""


def _wrong(ask: PlaceRequest) -> str:
    """What no prompt can be like; empty when all is well."""
    if len(ask.keys) % KEY_BYTES:
        return f"{len(ask.keys)} bytes are no whole number of {KEY_BYTES}-byte block keys"
    if ask.num_tokens < 1 or ask.max_tokens < 0:
        return f"{ask.num_tokens} prompt tokens and at most {ask.max_tokens} new ones"
    if not math.isfinite(ask.head_start_s):
        return f"a head start of {ask.head_start_s} seconds"
    if not 0 <= ask.waited_s < math.inf:
        return f"a wait of {ask.waited_s} seconds"
    ttft_slo_s = None if ask.ttft_slo_s is None else ask.ttft_slo_s + ask.waited_s  # it may have passed by now
    slos_s = [slo_s for slo_s in (ttft_slo_s, ask.tbt_slo_s) if slo_s is not None]
    return "" if all(math.isfinite(slo_s) and slo_s > 0 for slo_s in slos_s) else f"service levels of {slos_s} seconds"


def _is_full(usable: Usable, ask: PlaceRequest) -> bool:
    """Whether no decode worker has the room that the request needs, and would have if it were empty."""
    workers = usable.decode
    if not workers:
        return False
    needed = workers[0].needed_blocks(ask.num_tokens, ask.max_tokens, ask.tenant, beginning(ask.keys))
    return (all(worker.free_blocks() < needed for worker in workers)
            and any(worker.hello.capacity_blocks >= needed for worker in workers))


def _malformed(ask: PlaceRequest, why: str) -> Rejection:
    return Rejection(request=ask.request, code="no_worker", message=f"the request to place cannot be true: {why}",
                     retry_after_s=60.0)


def _by_tier(blocks: Sequence[StoredBlock]) -> Iterable[tuple[Tier, list[Fingerprint]]]:
    """The blocks of each tier; those whose key is none are left out."""
    keys = [block.key for block in blocks]
    if set(map(len, keys)) - {KEY_BYTES}:
        blocks = [block for block in blocks if len(block.key) == KEY_BYTES]
        keys = [block.key for block in blocks]
    prints = fingerprints(b"".join(keys))
    tiers = [block.tier for block in blocks]
    kinds = set(tiers)
    if len(kinds) == 1:
        return ((tiers[0], prints),)
    return [(kind, [one for one, tier in zip(prints, tiers, strict=True) if tier == kind]) for kind in sorted(kinds)]
