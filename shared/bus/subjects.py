"""Every subject as a value: what travels there, what comes back, which stream keeps it, who speaks and who hears.

Code never joins strings with dots: ``KV_STORED.at(worker=w)`` renders an address, ``KV_STORED.any()`` a pattern,
``KV_STORED.params("mb.v1.kv.w1.stored")`` takes one apart. ``docs/messages.md`` is generated from this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from shared import messages as m

PREFIX = "mb.v1."
_PARAM = re.compile(r"\{(\w+)\}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


@cache
def _pattern(template: str) -> re.Pattern[str]:
    pattern = re.escape(PREFIX + template)
    for name in _PARAM.findall(template):
        pattern = pattern.replace(re.escape("{" + name + "}"), f"(?P<{name}>[^.]+)")
    return re.compile(pattern)


@dataclass(frozen=True)
class Subject:
    """One kind of conversation.

    ``payload`` and ``reply`` are a message type or a union of them; ``reply`` ``None`` means publish only;
    ``stream`` names the JetStream stream (:mod:`shared.bus.streams`) that also keeps what is published.
    """

    template: str
    payload: Any
    reply: Any = None
    stream: str = ""
    speaks: str = ""
    hears: str = ""
    about: str = ""

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of the template's holes, in order."""
        return tuple(_PARAM.findall(self.template))

    def at(self, **params: str) -> Address:
        """The address with every hole filled; a value that could change the subject's shape is refused."""
        if set(params) != set(self.param_names):
            raise ValueError(f"{self.template} takes {self.param_names}, got {tuple(params)}")
        self._check(params)
        return Address(PREFIX + self.template.format(**params), self)

    def any(self, **params: str) -> Address:
        """The pattern that matches every address of this subject, or every one with these ``params``."""
        self._check(params)
        return Address(PREFIX + self.template.format(**dict.fromkeys(self.param_names, "*") | params), self)

    @staticmethod
    def _check(params: Mapping[str, str]) -> None:
        for name, value in params.items():
            if not _TOKEN.fullmatch(value):
                raise ValueError(f"{name}={value!r} cannot stand in a subject: use letters, digits, - and _")

    def params(self, text: str) -> Mapping[str, str]:
        """The holes' values in a rendered address."""
        match = _pattern(self.template).fullmatch(text)
        if match is None:
            raise ValueError(f"{text} is not of the form {PREFIX}{self.template}")
        return match.groupdict()


def tenant_token(tenant: str) -> str:
    """A tenant as a part of a subject: its name if that can stand there, else ``x-`` and the name in hexadecimal."""
    if _TOKEN.fullmatch(tenant) and not tenant.startswith("x-"):
        return tenant
    return f"x-{tenant.encode().hex()}"


@dataclass(frozen=True)
class Address:
    """A rendered subject (or a pattern), which still knows what travels there."""

    text: str
    subject: Subject

    def __str__(self) -> str:
        return self.text


PLACE = Subject("conductor.place", m.PlaceRequest, m.Placement | m.Rejection,
                speaks="gateway", hears="conductor (queue group)", about="where shall this request run?")
WORKERS = Subject("conductor.workers", m.WorkersQuery, m.WorkersReply,
                  speaks="CLI", hears="conductor (queue group)", about="the cluster as a conductor sees it")
PLACED = Subject("placed", m.Placed, speaks="conductor", hears="conductor",
                 about="decisions, so that replicas share in-flight load")

JOB = Subject("worker.{worker}.job", m.DecodeJob | m.PrefillJob | m.Handover | m.Inquiry,
              m.Reserved | m.Accepted | m.Refused | m.JobState, speaks="gateway, prefill", hears="that worker",
              about="work, and the answer whether it is taken; what became of it")
PUSH = Subject("worker.{worker}.push", m.PushBlocks, m.Pushed,
               speaks="prefill", hears="the owner of the blocks", about="write your blocks into my memory")
HELLO = Subject("worker.{worker}.hello", m.Hello, stream="KV", speaks="worker",
                hears="gateway, conductor, store-manager", about="registration: cache spec, endpoints")
LOAD = Subject("worker.{worker}.load", m.Load, speaks="worker", hears="gateway, conductor, store-manager",
               about="heartbeat and load")
BYE = Subject("worker.{worker}.bye", m.Bye, stream="KV", speaks="worker", hears="gateway, conductor, store-manager",
              about="orderly leave")
REFUSE = Subject("worker.{worker}.refuse", m.Refuse, speaks="conductor", hears="that worker",
                 about="this worker's cache spec does not fit; it must stop")
ROLLCALL = Subject("rollcall", m.Rollcall, speaks="gateway, conductor, store-manager, a client of the store",
                   hears="worker", about="who is there? every worker says hello")

KV_STORED = Subject("kv.{worker}.stored", m.Stored, stream="KV", speaks="worker", hears="conductor, store-manager",
                    about="blocks became reusable")
KV_EVICTED = Subject("kv.{worker}.evicted", m.Evicted, stream="KV", speaks="worker", hears="conductor, store-manager",
                     about="blocks are gone")
KV_SYNC = Subject("kv.{worker}.sync", m.Since, m.SyncEvents | m.SnapshotPage,
                  speaks="gateway, conductor, store-manager", hears="that worker",
                  about="what did I miss? A gateway only wants to know whether anybody answers")
KV_DIGEST = Subject("kv.{worker}.digest", m.DigestQuery, m.DigestReply | m.SnapshotPage, speaks="store-manager",
                    hears="that worker", about="do I know what you hold? If not, the blocks of these buckets")

TOKENS = Subject("gateway.{gateway}.tokens", m.TokenBatch, speaks="decode, prefill", hears="that gateway",
                 about="tokens and failures")
CANCEL = Subject("cancel", m.Cancel, speaks="gateway", hears="conductor, prefill, decode",
                 about="free everything of a request")
PROGRESS = Subject("request.progress", m.Progress, speaks="prefill, decode", hears="conductor",
                   about="a stage of a request is over")
DONE = Subject("request.done", m.RequestDone, stream="KV", speaks="gateway", hears="conductor, store-manager",
               about="how a request ended")

POOL = Subject("worker.{worker}.pool", m.Replicate | m.Trim | m.Protect | m.Retire,
               m.Replicated | m.Trimmed | m.Protected | m.Retired | m.Failure, speaks="store-manager",
               hears="that worker", about="copy blocks, drop copies, keep them, empty yourself")
DOOR = Subject("worker.{worker}.door.{tenant}", m.OpenDoor, m.DoorOpened | m.DoorRefused,
               speaks="a client of the store", hears="that worker",
               about="let me put and get this tenant's values at your door")
QUOTAS = Subject("worker.{worker}.quotas", m.Quotas, speaks="store-manager", hears="that worker",
                 about="how much of its memory each tenant may take")

LINEAGE = Subject("store.lineage", m.LineageQuery, m.LineageReply | m.Failure, speaks="CLI",
                  hears="store-manager (queue group)", about="the chain of a block")
BLOCKS = Subject("store.blocks", m.BlocksQuery, m.BlocksReply | m.Failure, speaks="CLI",
                 hears="store-manager (queue group)", about="blocks of the catalog")
STATS = Subject("store.stats", m.StatsQuery, m.StatsReply | m.Failure, speaks="CLI",
                hears="store-manager (queue group)", about="totals of the catalog")
DRAIN = Subject("store.drain", m.DrainAsk, m.DrainReply | m.Failure, speaks="CLI",
                hears="store-manager (queue group)", about="empty a worker, or how far that is")
QUOTA = Subject("store.quota", m.QuotaAsk, m.QuotaReply | m.Failure, speaks="CLI",
                hears="store-manager (queue group)", about="tenants' quotas: list, set, take away")
COPIES = Subject("store.copies", m.CopiesQuery, m.CopiesReply | m.Failure, speaks="CLI",
                 hears="store-manager (queue group)", about="hot prefixes, what workers hold, what was decided")

HOT = Subject("store.hot", m.HotQuery, m.HotReply | m.Failure, speaks="CLI",
              hears="store-manager (queue group)", about="the prefixes reused most")
DESCENDANTS = Subject("store.descendants", m.DescendantsQuery, m.DescendantsReply | m.Failure, speaks="CLI",
                      hears="store-manager (queue group)", about="what continues a block")
EVICTIONS = Subject("store.evictions", m.EvictionsQuery, m.EvictionsReply | m.Failure, speaks="CLI",
                    hears="store-manager (queue group)", about="who evicted what, and why")
REUSE = Subject("store.reuse", m.ReuseQuery, m.ReuseReply | m.Failure, speaks="CLI",
                hears="store-manager (queue group)", about="prompt tokens not computed, by tenant, model or day")
REQUESTS = Subject("store.requests", m.RequestsQuery, m.RequestsReply | m.Failure, speaks="CLI",
                   hears="store-manager (queue group)", about="requests of the past")
REQUEST = Subject("store.request", m.RequestQuery, m.RequestReply | m.Failure, speaks="CLI",
                  hears="store-manager (queue group)", about="one request of the past")
STORAGE = Subject("store.storage", m.StorageQuery, m.StorageReply | m.Failure, speaks="CLI",
                  hears="store-manager (queue group)", about="what workers held over time")

ALL: tuple[Subject, ...] = (
    PLACE, WORKERS, PLACED, JOB, PUSH, HELLO, LOAD, BYE, REFUSE, ROLLCALL, KV_STORED, KV_EVICTED, KV_SYNC,
    KV_DIGEST, TOKENS, CANCEL, PROGRESS, DONE, POOL, DOOR, QUOTAS, LINEAGE, BLOCKS, STATS,
    DRAIN, QUOTA, COPIES,
    HOT, DESCENDANTS, EVICTIONS, REUSE, REQUESTS, REQUEST, STORAGE,
)
"""Every subject there is, in the order of the docs table."""


def find(text: str) -> Subject | None:
    """The subject of which ``text`` is a rendered address; ``None`` when it is of another version or nobody's."""
    for subject in ALL:
        try:
            subject.params(text)
        except ValueError:
            continue
        return subject
    return None
