"""Who is there, as this gateway hears it, and which models it can therefore serve.

A model is served once a live worker announced it and a tokeniser with the digest in its cache spec lies here: ids
must mean the same text on both sides. A worker that falls silent after its first heartbeat is asked a cheap question;
when nobody even listens on its subjects (the process is gone), it is lost at once instead of after ``dead_after_s``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from services.gateway.core.problem import ApiError, Problem, model_not_found
from services.gateway.tokenizer import ModelText
from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.subjects import BYE, HELLO, KV_SYNC, LOAD, ROLLCALL
from shared.clock import Clock
from shared.errors import BusError, ModelError, NoResponders
from shared.ids import WorkerId
from shared.kv import CacheSpec
from shared.membership import Change, Changed, Conflict, Joined, Membership, Unknown
from shared.messages import Endpoint, Hello, Load, Rollcall, Since, Source
from shared.models import ModelDir, resolve
from shared.telemetry.logs import Limited

_log = logging.getLogger(__name__)

PROBE_S = 1.0
"""Longest wait for a silent worker to answer; silence is no proof of death, an absent listener is."""
RETRY_LOAD_S = 5.0
"""Pause before a tokeniser that could not be loaded is tried again."""
ROLLCALL_PAUSE_S = 1.0
"""Shortest time between two rollcalls of this gateway."""


@dataclass(frozen=True)
class Served:
    """A model that requests can name."""

    spec: CacheSpec
    text: ModelText
    created_at_s: int
    """Unix seconds when this gateway began to serve it."""


@dataclass(frozen=True)
class _Refused:
    """Why a model that workers announce is not served; ``again_s``: when to look again (monotonic)."""

    tokenizer_digest: str
    why: str
    again_s: float


class Roster:
    """Workers and models. Open with :meth:`start`, end with :meth:`close`."""

    def __init__(self, bus: Bus, clock: Clock, *, asker: str, cache: Path, models: Sequence[str],
                 suspect_after_s: float, dead_after_s: float, threads: Executor,
                 on_lost: Callable[[WorkerId, str], None]) -> None:
        self.membership = Membership(suspect_after_s=suspect_after_s, dead_after_s=dead_after_s)
        self._bus, self._clock, self._asker, self._cache, self._threads = bus, clock, asker, cache, threads
        self._models, self._on_lost = tuple(models), on_lost
        #: {model name: its tokeniser}
        self._texts: dict[str, ModelText] = {}
        #: {model name: when this gateway first had its tokeniser, Unix seconds}
        self._since: dict[str, int] = {}
        self._refused: dict[str, _Refused] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._probing: dict[WorkerId, asyncio.Task[None]] = {}
        self._subscriptions: list[Subscription] = []
        self._watching: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")
        self._limited = Limited(_log)

    async def start(self) -> None:
        """Listens, loads the models that settings name, and asks who is there."""
        for name in self._models:
            model = await self._resolve(name)
            await self._load(model.name, model)
        for address, handler in ((HELLO.any(), self._hello), (LOAD.any(), self._heartbeat), (BYE.any(), self._bye)):
            self._subscriptions.append(await self._bus.subscribe(address, handler))
        self._bus.on_reconnect(self._reconnected)
        self._watching = asyncio.create_task(self._watch(), name="roster watch")
        await self.rollcall()

    async def close(self) -> None:
        """Stops listening."""
        for subscription in self._subscriptions:
            await subscription.close()
        tasks = [*self._loading.values(), *self._probing.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def rollcall(self) -> None:
        """Asks every worker to say hello."""
        self._asked_s = self._clock.monotonic()
        await self._bus.publish(ROLLCALL.at(), Rollcall(asker=self._asker))

    async def _reconnected(self) -> None:
        self.membership.deaf(now=self._clock.monotonic())
        await self.rollcall()

    # -- what others ask ---------------------------------------------------------------------------------------

    def find(self, name: str) -> Served:
        """The model that clients call ``name``; raises ``ApiError`` 404, or 503 when it cannot be served now."""
        served = self.served()
        if name in served:
            return served[name]
        known = {member.hello.spec.model for member in self.membership.members.values() if member.hello.role != "store"}
        if known and name not in known:
            raise model_not_found(name, sorted(served))
        code = "no_worker"
        if not known:
            why = "no worker has registered any model yet"
        elif name not in self.membership.specs():
            why = f"all workers of model {name} are gone"
        else:
            refused = self._refused.get(name)
            code, why = "model_not_ready", refused.why if refused else f"model {name} is being loaded"
        raise ApiError(Problem(status=503, code=code, param="model", message=why, retry_after_s=1.0))

    def served(self) -> dict[str, Served]:
        """{model name: what requests need of it}, over models with live workers and a fitting tokeniser."""
        found: dict[str, Served] = {}
        for name, hello in self.membership.specs().items():
            text = self._texts.get(name)
            if text is not None and text.model.tokenizer_digest == hello.spec.tokenizer_digest:
                found[name] = Served(hello.spec, text, self._since[name])
        return found

    def why_not_ready(self) -> str:
        """Empty when at least one model can be served right now; else what is missing."""
        whys: list[str] = []
        served = self.served()
        for name, hello in self.membership.specs().items():
            if name not in served:
                refused = self._refused.get(name)
                whys.append(refused.why if refused else f"model {name} is being loaded")
                continue
            usable = {role: self.membership.usable(hello.spec.digest, role) for role in ("prefill", "decode")}
            lacking = [role for role, members in usable.items() if not members]
            if not lacking and len(usable["prefill"]) == 1 and usable["prefill"] == usable["decode"]:
                lacking = ["other"]  # nobody prefills for itself
            if not lacking:
                return ""
            whys.append(f"model {name} has no usable {' and no usable '.join(lacking)} worker")
        return "; ".join(whys) or "no worker has registered any model"

    def endpoints(self, sources: Sequence[Source]) -> list[Endpoint]:
        """Where the owners in ``sources`` can be reached, as far as known."""
        members = [self.membership.get(source.owner) for source in sources]
        return [member.hello.endpoint for member in members if member is not None]

    def nobody_there(self, worker: WorkerId) -> None:
        """Somebody found that nobody listens on ``worker``'s subjects."""
        member = self.membership.get(worker)
        if member is not None:
            self._react(self.membership.gone(worker, member.hello.incarnation))

    # -- what it hears -----------------------------------------------------------------------------------------

    async def _hello(self, delivery: Delivery) -> None:
        self._react(self.membership.hello(delivery.message, now=self._clock.monotonic()))
        if delivery.message.role != "store":  # that lends for models, it serves none
            self._look_for(delivery.message.spec)

    async def _heartbeat(self, delivery: Delivery) -> None:
        self._react(self.membership.load(delivery.message, now=self._clock.monotonic()))

    async def _bye(self, delivery: Delivery) -> None:
        self._react(self.membership.bye(delivery.message))

    def _react(self, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Joined(hello=hello, previous=previous):
                    _log.info("worker_joined", extra={"fields": {
                        "worker": hello.worker, "role": hello.role, "model": hello.spec.model}})
                    if previous is not None:
                        self._on_lost(hello.worker, "it started anew")
                case Changed(worker=worker, before=before, after=after, why=why):
                    _log.info("worker_changed", extra={"fields": {
                        "worker": worker, "before": before, "after": after, "why": why}})
                    if after == "dead":
                        self._on_lost(worker, why)
                case Unknown(worker=worker):
                    if self._clock.monotonic() - self._asked_s >= ROLLCALL_PAUSE_S:
                        self._asked_s = self._clock.monotonic()
                        self._spawn_probe(worker, self.rollcall())
                case Conflict(hello=hello, message=message):
                    self._limited.warning("worker_conflict", key=hello.worker, worker=hello.worker, why=message)

    # -- watching ----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            now = self._clock.monotonic()
            if not self._bus.connected:
                self.membership.deaf(now=now)
            self._react(self.membership.tick(now=now))
            for worker, member in self.membership.members.items():
                if member.state == "suspect" and member.load is not None and self._bus.connected:
                    self._spawn_probe(worker, self._probe(member.hello, member.load))
            for hello in self.membership.specs().values():
                self._look_for(hello.spec)
            await asyncio.sleep(self.membership.next_wake(now=now) - now)

    def _spawn_probe(self, worker: WorkerId, work: Coroutine[None, None, None]) -> None:
        if worker in self._probing:
            work.close()
            return
        task = self._probing[worker] = asyncio.create_task(work, name=f"probe {worker}")
        task.add_done_callback(lambda done: self._probed(worker, done))

    def _probed(self, worker: WorkerId, task: asyncio.Task[None]) -> None:
        del self._probing[worker]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._limited.warning("probe_failed", key=worker, worker=worker, why=error)

    async def _probe(self, hello: Hello, load: Load) -> None:
        # What came after its last heartbeat is little; asked from further back it might have to send all it stores.
        since = Since(incarnation=hello.incarnation, seq=load.kv_seq)
        try:
            await self._bus.request(KV_SYNC.at(worker=hello.worker), since, timeout_s=PROBE_S)
        except NoResponders:
            self._react(self.membership.gone(hello.worker, hello.incarnation))
        except BusError as error:
            _log.debug("probe_unanswered", extra={"fields": {"worker": hello.worker, "why": error}})

    # -- tokenisers --------------------------------------------------------------------------------------------

    def _look_for(self, spec: CacheSpec) -> None:
        """Starts loading the tokeniser that ``spec`` needs, unless it is here, under way, or failed a moment ago."""
        text, refused = self._texts.get(spec.model), self._refused.get(spec.model)
        if spec.model in self._loading or (text is not None and text.model.tokenizer_digest == spec.tokenizer_digest):
            return
        if refused and refused.tokenizer_digest == spec.tokenizer_digest and self._clock.monotonic() < refused.again_s:
            return
        task = self._loading[spec.model] = asyncio.create_task(self._fit(spec), name=f"load {spec.model}")
        task.add_done_callback(lambda done: self._loaded(spec.model, done))

    def _loaded(self, model: str, task: asyncio.Task[None]) -> None:
        del self._loading[model]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("tokenizer_failed", exc_info=error, extra={"fields": {"model": model}})

    async def _fit(self, spec: CacheSpec) -> None:
        try:
            model = await self._resolve(spec.model)
            if model.tokenizer_digest != spec.tokenizer_digest:
                raise ModelError(
                    f"model {spec.model}: the tokenizer in {model.path} has digest {model.tokenizer_digest[:12]}, the "
                    f"workers use {spec.tokenizer_digest[:12]}; give gateway and workers the same model files")
            await self._load(spec.model, model)
        except ModelError as error:
            self._refused[spec.model] = _Refused(
                spec.tokenizer_digest, str(error), self._clock.monotonic() + RETRY_LOAD_S)
            self._limited.warning("model_not_served", key=spec.model, why=error)

    async def _resolve(self, name: str) -> ModelDir:
        """By name from the cache, or one of the directories that settings name when it is called so."""
        for given in self._models:
            if Path(given).name == name and given != name:
                name = given
        return await asyncio.get_running_loop().run_in_executor(self._threads, resolve, name, self._cache)

    async def _load(self, name: str, model: ModelDir) -> None:
        self._texts[name] = await asyncio.get_running_loop().run_in_executor(self._threads, ModelText, model)
        self._since.setdefault(name, int(self._clock.wall()))
        self._refused.pop(name, None)
        _log.info("model_served", extra={"fields": {"model": name, "path": model.path}})
