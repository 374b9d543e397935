"""Pure: settings and what the machine has → the units of a stack, in order.

The order of the tuple is the order of a reader and, backwards, of stopping; what may start side by side is
said by ``after`` alone. A value that is only known once another unit is ready (a URL) is a :class:`Fact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from services.launcher.resources import Resources
from services.launcher.settings import Settings

MEMORY_SHARE = 0.25
"""Part of the free memory that all KV pools together take: models and everything else need the rest."""
LEAST_POOL_BYTES = 256 * 2**20
MOST_POOL_BYTES = 2 * 2**30

WORKER_START_S = 300.0
"""A worker imports torch and loads a model; slow disks need minutes."""
SERVICE_START_S = 120.0
"""A machine that does other things too."""
PASSED_ON = ("otlp_endpoint", "log_level", "drain_s", "heartbeat_s", "suspect_after_s", "dead_after_s")
"""Common settings of the launcher that hold for every service too."""
WORKERS = frozenset({"prefill", "decode", "store"})
ESSENTIAL = frozenset({"prefill", "decode", "gateway", "conductor"})
"""Without any instance of these nothing is served; the store-manager and stores are off the request path."""


@dataclass(frozen=True)
class Fact:
    """Something ``unit`` says when it is ready."""

    unit: str
    name: str


@dataclass(frozen=True)
class Unit:
    """One thing to start.

    ``server``: opened in the launcher, fact ``url``. ``task``: a process that must end with exit code 0.
    ``service``: a process that prints a ready line and stays.
    """

    name: str
    service: str
    kind: Literal["server", "task", "service"]
    argv: tuple[str, ...] = ()
    env: Mapping[str, str | Fact] = field(default_factory=dict)
    """What holds it together with the others; wins over the launcher's own environment."""
    defaults: Mapping[str, str | Fact] = field(default_factory=dict)
    """What the launcher would choose; a value of the same name in its own environment wins."""
    after: tuple[str, ...] = ()
    start_timeout_s: float = SERVICE_START_S
    essential: bool = True
    """Without any instance of the service the stack is of no use."""
    stops_with: str = ""
    """Neighbours in the plan with the same word here are stopped together; empty for the service's own name."""


def plan_stack(settings: Settings, resources: Resources, *, python: str, socket_dir: str = "") -> tuple[Unit, ...]:
    """The embedded stack; ``python`` is the interpreter the services run under, workers meet in ``socket_dir``."""
    nats, postgres = Fact("nats", "url"), Fact("postgres", "url")
    workers = settings.prefill + settings.decode
    threads = settings.threads or max(1, resources.cores // workers)
    pool_bytes = settings.pool_bytes or pool_share(resources.memory_bytes, workers + settings.store)
    # In the name for all, which gives way to either name in the launcher's own environment.
    meeting = {"MOONBUS_TRANSFER_SOCKET_DIR": socket_dir}

    def service(name: str, of: str, *, after: tuple[str, ...], env: Mapping[str, str | Fact] | None = None,
                defaults: Mapping[str, str | Fact] | None = None, start_timeout_s: float = SERVICE_START_S) -> Unit:
        common: dict[str, Any] = {
            "nats_url": nats,
            "cache_dir": settings.cache_path(),
            "trace_file": settings.trace_path,
            "admin_host": "127.0.0.1",
            "admin_port": 0,
        }
        chosen = {name: getattr(settings, name) for name in PASSED_ON}
        return Unit(
            name=name, service=of, kind="service", argv=(python, "-m", "services.cli", "serve", of),
            env={**environment(of, common), **(env or {})},
            defaults={**environment(of, chosen), **(defaults or {})}, after=after, start_timeout_s=start_timeout_s,
            essential=of in ESSENTIAL, stops_with="workers" if of in WORKERS else "",
        )

    def worker(role: str, number: int) -> Unit:
        name = f"{role}-{number}"
        own = {"worker_id": name, "model": settings.model}
        chosen = {"block_tokens": settings.block_tokens, "threads": threads, "pool_bytes": pool_bytes,
                  "elastic": settings.elastic}
        omp = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        return service(name, role, after=("nats",), env=environment(role, own),
                       defaults={**environment(role, chosen), **meeting, **omp}, start_timeout_s=WORKER_START_S)

    def store(number: int) -> Unit:
        name = f"store-{number}"
        return service(name, "store", after=("nats",), env=environment("store", {"worker_id": name}),
                       defaults={**environment("store", {"pool_bytes": pool_bytes}), **meeting})

    return (
        Unit("nats", "nats", "server"),
        Unit("postgres", "postgres", "server"),
        Unit("migrate", "migrate", "task", argv=(python, "-m", "services.cli", "migrate"),
             after=("postgres",), env=environment("store-manager", {"postgres_url": postgres})),
        service("store-manager", "store-manager", after=("nats", "migrate"),
                env=environment("store-manager", {"postgres_url": postgres})),
        service("conductor", "conductor", after=("nats",)),
        *(worker("prefill", number) for number in range(1, settings.prefill + 1)),
        *(worker("decode", number) for number in range(1, settings.decode + 1)),
        *(store(number) for number in range(1, settings.store + 1)),
        service("gateway", "gateway", after=("nats",),
                env=environment("gateway", {"host": settings.host, "port": settings.port, "models": settings.model})),
    )


def environment(service: str, values: Mapping[str, Any]) -> dict[str, str | Fact]:
    """Settings of ``service`` as its environment: in its own name, which wins over names for all."""
    prefix = f"MOONBUS_{service.upper().replace('-', '_')}_"
    return {
        prefix + name.upper(): value if isinstance(value, Fact) else str(value)
        for name, value in values.items()
    }


def pool_share(memory_bytes: int, workers: int) -> int:
    """KV pool of one of ``workers`` on a machine with so much free memory."""
    return int(min(MOST_POOL_BYTES, max(LEAST_POOL_BYTES, memory_bytes * MEMORY_SHARE / workers)))
