"""A planner and its workers in memory, under virtual time: workers keep real event logs and do what they are asked.

``Cluster`` performs the planner's effects: questions take ``delay_s``, a stopped worker answers nothing, a gone one
is nobody. What happened is in ``asked``.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.store_manager.core.drains import OrdersRead
from services.store_manager.core.events import Led, Started
from services.store_manager.core.orders import Drain, Orders, with_drain, with_progress
from services.store_manager.core.planner import KeepOrders, OrdersFailed, Planner
from services.store_manager.core.policy import PlannerPolicy
from shared.ids import BlockKey, ConductorId, HostId, Incarnation, RequestId, WorkerId
from shared.kv import CacheSpec, pack_keys, unpack_keys
from shared.machine import Answered, Publish, Request, Unanswered, Woke
from shared.messages import (
    Bye,
    Endpoint,
    Failure,
    Hello,
    KvEvent,
    Load,
    Placed,
    Placement,
    Protect,
    Protected,
    Quotas,
    Replicate,
    Replicated,
    Retire,
    Retired,
    Rollcall,
    Since,
    StoredBlock,
    Trim,
    Trimmed,
)
from shared.messages.workers import Role
from shared.store.events import EventLog

SPEC = CacheSpec(model="toy", weights_digest="w", tokenizer_digest="t", dtype="float32", layers=1, kv_heads=1,
                 head_dim=8, block_tokens=16, max_context=1 << 16)
ROOT = BlockKey(bytes(32))


def chain(name: str, length: int, *, tenant: str = "acme", after: StoredBlock | None = None) -> list[StoredBlock]:
    """Blocks of one chain, root first; ``after`` is what they continue."""
    blocks: list[StoredBlock] = []
    parent = after.key if after else ROOT
    for depth in range(length):
        key = BlockKey(hashlib.sha256(parent + name.encode()).digest())
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth + (after.depth + 1 if after else 0),
                                  nbytes=SPEC.block_bytes, tokens=16, tenant=tenant))
        parent = key
    return blocks


class Addresses:
    """Addresses as (kind, worker)."""

    rollcall = ("rollcall", "")

    def sync(self, worker: WorkerId) -> Any:
        return ("sync", worker)

    def pool(self, worker: WorkerId) -> Any:
        return ("pool", worker)

    def quotas(self, worker: WorkerId) -> Any:
        return ("quotas", worker)


@dataclass
class Worker:
    """One worker without an engine: holds blocks, tells of them, does what it is asked as a store agent would."""

    name: str
    host: str = "h1"
    role: Role = "prefill"
    life: str = "1"
    capacity: int = 1_000
    held: dict[BlockKey, StoredBlock] = field(default_factory=dict)
    draining: bool = False
    alive: bool = True
    stopped: bool = False
    refuses: str = ""
    """Why it takes no copies; empty when it does."""
    silent_news: bool = False
    """Its news is lost on the way."""
    elastic: bool = False

    def __post_init__(self) -> None:
        self.id, self.incarnation = WorkerId(self.name), Incarnation(self.life)
        self.log = EventLog(self.id, self.incarnation, SPEC.digest, lambda: self.held.values())

    def hello(self) -> Hello:
        return Hello(worker=self.id, incarnation=self.incarnation, role=self.role, spec=SPEC, max_running=1,
                     capacity_blocks=self.capacity, started_at_s=0.0, elastic=self.elastic,
                     endpoint=Endpoint(worker=self.id, incarnation=self.incarnation, host=HostId(self.host)))

    def load(self) -> Load:
        return Load(worker=self.id, incarnation=self.incarnation, role=self.role, kv_seq=self.log.seq,
                    free_blocks=self.capacity, cached_blocks=len(self.held), draining=self.draining)

    def store(self, blocks: Sequence[StoredBlock], at_s: float) -> list[KvEvent]:
        new = [block for block in blocks if block.key not in self.held]
        self.held.update({block.key: block for block in new})
        return [self.log.stored(new, at_s=at_s)] if new else []

    def evict(self, keys: Sequence[BlockKey], at_s: float, reason: str = "capacity") -> list[KvEvent]:
        gone = [key for key in keys if self.held.pop(key, None) is not None]
        return [self.log.evicted(gone, at_s=at_s, reason=reason)] if gone else []

    def leaves(self) -> set[BlockKey]:
        return self.held.keys() - {block.parent for block in self.held.values()}


@dataclass
class Cluster:
    """See the module."""

    policy: PlannerPolicy = field(default_factory=PlannerPolicy)
    now: float = 1000.0
    delay_s: float = 0.01
    workers: dict[str, Worker] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)
    asked: list[tuple[float, str, Any]] = field(default_factory=list)
    damaged: bool = False
    """The record of orders cannot be read."""
    quotas: dict[str, Quotas] = field(default_factory=dict)
    #: workers that answer no question about their pool
    mute: set[str] = field(default_factory=set)
    leading: bool = True
    term: int = 1
    #: (question, worker asked) -> why the copy fails, empty when it does not
    fails: Callable[[Replicate, str], str] = lambda ask, target: ""

    def __post_init__(self) -> None:
        self.planner = Planner("m1", Addresses(), self.policy)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.feed(Started())
        self._beat()

    # Driving.

    def feed(self, event: Any) -> None:
        """One event, and what follows from it."""
        effects = self.planner.handle(event, now=self.now)
        for effect in effects:
            self._perform(effect)

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), what))

    def run(self, seconds: float, *, check: bool = True) -> None:
        """Lets time pass."""
        end_s = self.now + seconds
        while True:
            wake_s = self.planner.next_wake()
            times = [self._due[0][0] if self._due else end_s, end_s if wake_s is None else wake_s, end_s]
            next_s = max(self.now, min(times))
            if next_s >= end_s and not (self._due and self._due[0][0] <= end_s):
                self.now = end_s
                break
            self.now = next_s
            if self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            else:
                self.feed(Woke())
        if check:
            self.planner.check_invariants()

    def until(self, condition: Callable[[], Any], *, limit_s: float = 60.0) -> float:
        """Lets time pass until ``condition``; how long that took."""
        began_s = self.now
        while not condition():
            assert self.now - began_s < limit_s, f"not within {limit_s} s"
            self.run(0.05, check=False)
        self.planner.check_invariants()
        return self.now - began_s

    def _beat(self) -> None:
        for worker in self.workers.values():
            if worker.alive and not worker.stopped:
                self.feed(worker.load())
        if self.leading:
            self.feed(Led(self.term, self.now + 2.0))
        self.later(0.5, self._beat)

    # Workers.

    def add(self, worker: Worker) -> Worker:
        """A worker joins, or begins a new life."""
        self.workers[worker.name] = worker
        self.feed(worker.hello())
        self.feed(worker.load())
        return worker

    def store(self, worker: Worker, blocks: Sequence[StoredBlock]) -> None:
        self._tell(worker, worker.store(blocks, self.now))

    def evict(self, worker: Worker, keys: Sequence[BlockKey]) -> None:
        self._tell(worker, worker.evict(keys, self.now))

    def kill(self, worker: Worker) -> None:
        worker.alive = False

    def leave(self, worker: Worker) -> None:
        worker.alive = False
        self.feed(Bye(worker=worker.id, incarnation=worker.incarnation))

    def _tell(self, worker: Worker, events: Sequence[KvEvent]) -> None:
        if not worker.silent_news:
            for event in events:
                self.feed(event)

    def use(self, blocks: Sequence[StoredBlock], times: int = 1, *, gain_s: float = 0.0) -> None:
        """So many requests with this prompt are placed, each of which more copies of it would have spared
        ``gain_s``."""
        for _ in range(times):
            request = RequestId(f"r{next(self._order)}")
            placement = Placement(
                request=request, attempt=0, conductor=ConductorId("c"), prefill=WorkerId("p"),
                prefill_incarnation=Incarnation("1"), decode=WorkerId("d"), decode_incarnation=Incarnation("1"),
                own_blocks=0, sources=[], hit_tokens=0, predicted_queue_s=0, predicted_transfer_s=0,
                predicted_prefill_s=0, predicted_tbt_s=0, reuse_gain_s=gain_s)
            self.feed(Placed(placement=placement, num_tokens=1, max_tokens=1,
                             keys=pack_keys([block.key for block in blocks])))

    def holders(self, block: StoredBlock) -> list[str]:
        return sorted(w.name for w in self.workers.values() if w.alive and block.key in w.held)

    # Orders.

    def drain(self, worker: Worker, *, timeout_s: float = 60.0, force: bool = False) -> None:
        self.orders = with_drain(self.orders, Drain(worker=worker.id, incarnation=worker.incarnation,
                                                    ordered_at_s=self.now, timeout_s=timeout_s, force=force))

    def drained(self, worker: Worker) -> Drain:
        drain = self.orders.drain_of(worker.name)
        assert drain is not None
        return drain

    # Effects.

    def _perform(self, effect: Any) -> None:
        match effect:
            case Publish(message=Rollcall()):
                for worker in self.workers.values():
                    if worker.alive and not worker.stopped:
                        self.later(self.delay_s, lambda worker=worker: self.feed(worker.hello()))
            case Publish(message=Quotas() as quotas):
                self.quotas[quotas.worker] = quotas
            case Request():
                self._ask(effect)
            case KeepOrders() if self.damaged:
                self.later(self.delay_s, lambda: self.feed(OrdersFailed(damaged=True)))
            case KeepOrders():
                kept = with_progress(self.orders, effect.progress, effect.term)
                self.orders = kept if kept is not None else self.orders
                self.later(self.delay_s, lambda: self.feed(OrdersRead(self.orders, self.now)))
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def _ask(self, request: Request) -> None:
        _, name = request.address
        worker = self.workers.get(name)
        if worker is None or not worker.alive:
            self.later(self.delay_s, lambda: self.feed(Unanswered(request.tag, "nobody", gone=True)))
            return
        self.asked.append((self.now, name, request.message))

        def answer() -> None:
            if not worker.alive or worker.stopped or (name in self.mute and not isinstance(request.message, Since)):
                self.later(request.timeout_s, lambda: self.feed(Unanswered(request.tag, "no answer")))
                return
            reply, events = self._do(worker, request.message)
            self.feed(Answered(request.tag, reply))
            self._tell(worker, events)

        self.later(self.delay_s, answer)

    def _do(self, worker: Worker, message: Any) -> tuple[Any, list[KvEvent]]:
        match message:
            case Since():
                return worker.log.since(message, now=self.now), []
            case Replicate():
                return self._copy(worker, message)
            case Trim():
                wanted = set(unpack_keys(message.keys))
                dropped: list[BlockKey] = []
                while ready := [key for key in sorted(wanted & worker.leaves()) if key in worker.held]:
                    for key in ready:
                        dropped.append(key)
                        del worker.held[key]
                events = [worker.log.evicted(dropped, at_s=self.now, reason="trim")] if dropped else []
                return Trimmed(blocks=len(dropped)), list(events)
            case Protect():
                return Protected(blocks=sum(key in worker.held for key in unpack_keys(message.keys))), []
            case Retire():
                worker.draining = True
                if not message.drop:
                    return Retired(blocks=0), []
                blocks = len(worker.held)
                return Retired(blocks=blocks), worker.evict(list(worker.held), self.now, "drain")
        return Failure(message=f"what is {message!r}?"), []

    def _copy(self, worker: Worker, ask: Replicate) -> tuple[Replicated, list[KvEvent]]:
        source = self.workers[ask.source]
        why = worker.refuses or self.fails(ask, worker.name)
        copied: list[StoredBlock] = []
        if not why:
            for block in ask.blocks:
                if not source.alive or block.key not in source.held:
                    why = "missing"
                    break
                if block.depth and block.parent not in worker.held:
                    why = "parent"
                    break
                if block.key not in worker.held:
                    worker.held[block.key] = block
                    copied.append(block)
        held = next((i for i, block in enumerate(ask.blocks) if block.key not in worker.held), len(ask.blocks))
        events: list[KvEvent] = [worker.log.stored(copied, at_s=self.now)] if copied else []
        return Replicated(operation=ask.operation, blocks=held, copied=len(copied),
                          nbytes=sum(block.nbytes for block in copied), why=why), events
