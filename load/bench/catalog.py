"""The catalog under load: a real Postgres, a real NATS with JetStream, a real store-manager, and a feed made up.

Two questions. Does the store-manager keep up with so many block events a second: how far behind is it at the end, and
how old is what it writes? And how long does the lineage of a deep block take in a table of so many blocks?
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from load.bench.catalog_feed import Feed, block_events
from load.bench.rounds import Target
from services.launcher import embedded
from shared.bus.nats import NatsBus
from shared.bus.streams import CATALOG_CONSUMER, STREAMS
from shared.bus.subjects import BYE, DONE, HELLO, KV_EVICTED, KV_STORED, Address
from shared.catalog.migrate import upgrade_database
from shared.catalog.repository import Catalog
from shared.catalog.session import connect
from shared.errors import UserError
from shared.messages import Bye, Evicted, Hello, RequestDone, Stored

DEPTH = 256
"""Blocks of each chain in the filled table."""
LINEAGES = 200
READY_S, STOP_S = 60.0, 60.0
SETTLE_S = 300.0
"""Longest wait for the store-manager to write what is left."""
TICK_S = 0.02
PROBE_S, POLL_S = 0.5, 0.02
TOO_LATE_S = 5.0
"""Lag (p99) above which it has fallen behind."""
CHUNK = 500_000


@dataclass(frozen=True)
class Options:
    """What to measure."""

    seconds: float
    rate: float
    """Block events a second."""
    blocks: int
    """In the table before; 0 leaves the lineage out."""


@dataclass
class Told:
    """What was published, and what became of it."""

    events: int = 0
    requests: int = 0
    behind_s: float = 0.0
    """The publisher itself was this late, at most."""
    pending: list[int] = field(default_factory=list)
    """Messages not yet written, once a second."""
    lags_s: list[float] = field(default_factory=list)


async def bench(options: Options, progress: Callable[[str], None]) -> dict[str, list[float]]:
    """{row: its one value}."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonbus-bench-")))
        os.chmod(directory, 0o755)  # the unprivileged account of Postgres has to pass
        nats = await stack.enter_async_context(embedded.nats_server(directory / "nats"))
        postgres = await stack.enter_async_context(embedded.postgres_server(directory / "postgres"))
        rows: dict[str, list[float]] = {}
        async with connect(postgres.url) as database:
            await upgrade_database(database)
            if options.blocks:
                began_s = time.monotonic()
                tails = await fill(postgres.url, options.blocks, progress)
                progress(f"filled in {time.monotonic() - began_s:.0f} s")
                rows |= await measure_lineage(Catalog(database), tails, "catalog/lineage")
            bus = await stack.enter_async_context(NatsBus.connect(nats.url, name="bench"))
            await bus.ensure(STREAMS, (CATALOG_CONSUMER,))
            async with store_manager(nats.url, postgres.url) as manager:
                pids = {"store-manager": manager, "postgres": postgres.pid or 0, "nats": nats.pid or 0}
                rows |= await measure_ingest(bus, Catalog(database), postgres.url, options, pids, progress)
            if options.blocks:
                rows |= await measure_lineage(Catalog(database), tails, "catalog/lineage-after")
            rows |= await measure_sizes(postgres.url)
    return rows


def targets(options: Options) -> list[Target]:
    """What the platform has to reach."""
    return [Target("catalog/events", at_least=0.99 * options.rate),
            Target("catalog/lag/p99", at_most=TOO_LATE_S * 1e3),
            Target("catalog/lineage/p50", at_most=50.0), Target("catalog/lineage/p99", at_most=50.0),
            Target("catalog/lineage-after/p99", at_most=50.0)]


# Ingest.

async def measure_ingest(bus: NatsBus, catalog: Catalog, url: str, options: Options, pids: Mapping[str, int],
                         progress: Callable[[str], None]) -> dict[str, list[float]]:
    """Publishes at the rate asked for, then waits until all of it is written."""
    feed, told, stop = Feed(seed=os.getpid()), Told(), asyncio.Event()
    watching = asyncio.create_task(_watch(bus, told, stop), name="bench backlog")
    probing = asyncio.create_task(_probe(bus, url, told, stop), name="bench probes")
    began_s, cpu_before = time.monotonic(), {name: tree_cpu_s(pid) for name, pid in pids.items()}
    await _publish(bus, feed, told, options, progress)
    told_s = time.monotonic() - began_s
    cpu = {name: (tree_cpu_s(pid) - cpu_before[name]) / told_s for name, pid in pids.items()}
    left = await bus.pending(CATALOG_CONSUMER)
    while await bus.pending(CATALOG_CONSUMER):
        if time.monotonic() - began_s > told_s + SETTLE_S:
            raise UserError(f"the store-manager still had {await bus.pending(CATALOG_CONSUMER)} messages to write "
                            f"{SETTLE_S:g} s after the last one was published")
        await asyncio.sleep(0.05)
    written_s = time.monotonic() - began_s
    stop.set()
    await asyncio.gather(watching, probing)
    stats = await catalog.stats(feed_pending=0)
    if stats.requests < told.requests:
        raise UserError(f"{told.requests} requests were published and {stats.requests} are in the catalog")
    lags = sorted(told.lags_s)
    half = told.pending[len(told.pending) // 2:] or [0]
    return {
        "catalog/events": [told.events / written_s],
        "catalog/published/events": [told.events / told_s],
        "catalog/lag/p50": [_at(lags, 0.5) * 1e3], "catalog/lag/p99": [_at(lags, 0.99) * 1e3],
        "catalog/backlog/messages": [float(max(half))], "catalog/backlog-at-end/messages": [float(left)],
        **{f"catalog/{name}/cores": [share] for name, share in cpu.items()},
    }


async def _publish(bus: NatsBus, feed: Feed, told: Told, options: Options, progress: Callable[[str], None]) -> None:
    began_s = time.monotonic()
    for hello in feed.begin(at_s=time.time()):
        await bus.publish(_address(hello), hello)
    shown_s = began_s
    while (now_s := time.monotonic()) < began_s + options.seconds:
        due = int((now_s - began_s) * options.rate)
        while told.events < due:
            for message in feed.request(at_s=time.time()):
                await bus.publish(_address(message), message)
                told.events += block_events(message)
                told.requests += isinstance(message, RequestDone)
        told.behind_s = max(told.behind_s, time.monotonic() - now_s)
        if now_s - shown_s >= 10.0:
            shown_s = now_s
            progress(f"{now_s - began_s:4.0f} s: {told.events:,} events, "
                     f"{told.pending[-1] if told.pending else 0:,} messages not written")
        await asyncio.sleep(TICK_S)
    for holder in (*feed.prefill, *feed.decode):
        bye = Bye(worker=holder.hello(at_s=0).worker, incarnation=holder.incarnation, at_s=time.time(), reason="bench")
        await bus.publish(BYE.at(worker=holder.name), bye)


def _address(message: object) -> Address:
    match message:
        case Stored():
            return KV_STORED.at(worker=message.worker)
        case Evicted():
            return KV_EVICTED.at(worker=message.worker)
        case Hello():
            return HELLO.at(worker=message.worker)
        case _:
            return DONE.at()


async def _watch(bus: NatsBus, told: Told, stop: asyncio.Event) -> None:
    while not stop.is_set():
        told.pending.append(await bus.pending(CATALOG_CONSUMER))
        await _sleep(1.0, stop)


async def _probe(bus: NatsBus, url: str, told: Told, stop: asyncio.Event) -> None:
    """From publishing the end of a request to the moment it can be read."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        number = 0
        while not stop.is_set():
            number += 1
            name, sent_s = f"probe-{os.getpid()}-{number}", time.time()
            began_s = time.monotonic()
            await bus.publish(DONE.at(), RequestDone(
                request=name, gateway="bench", model="bench", spec="bench", tenant="probe", received_at_s=sent_s,  # type: ignore[arg-type]
                duration_s=0.0, outcome="ok"))
            told.requests += 1
            seen = False
            while not seen and not stop.is_set():
                seen = await connection.fetchval(
                    "SELECT EXISTS (SELECT FROM request_done WHERE request = $1)", name)
                if not seen:
                    await _sleep(POLL_S, stop)
            if seen:
                told.lags_s.append(time.monotonic() - began_s)
            await _sleep(PROBE_S, stop)
    finally:
        await connection.close()


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


@asynccontextmanager
async def store_manager(nats_url: str, postgres_url: str) -> AsyncIterator[int]:
    """A store-manager process, as a stack runs it; its pid."""
    env = {**{name: value for name, value in os.environ.items() if not name.startswith("MOONBUS_")},
           "MOONBUS_NATS_URL": nats_url, "MOONBUS_POSTGRES_URL": postgres_url, "MOONBUS_LOG_LEVEL": "warning"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.store_manager", env=env, stdout=PIPE)
    try:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(READY_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise UserError(f"the store-manager was not ready within {READY_S:g} s") from None
        if not line or "ready" not in json.loads(line):
            raise UserError("the store-manager did not start; what it said is above")
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


# Lineage.

_DROP = ("ALTER TABLE kv_block DROP CONSTRAINT kv_block_pkey",
         "DROP INDEX kv_block_parent, kv_block_created_at, kv_block_depth",
         "ALTER TABLE kv_copy DROP CONSTRAINT kv_copy_pkey", "DROP INDEX kv_copy_life")
# Rows that come one by one leave an index of hashes 70 % full. Made fuller, it would take a year's page splits at once.
_MAKE = ("SET LOCAL maintenance_work_mem = '512MB'",
         "ALTER TABLE kv_block ADD CONSTRAINT kv_block_pkey PRIMARY KEY (key) WITH (fillfactor = 70)",
         "CREATE INDEX kv_block_parent ON kv_block (substring(parent, 1, 8)) WITH (fillfactor = 70)",
         "CREATE INDEX kv_block_created_at ON kv_block (created_at)",
         "CREATE INDEX kv_block_depth ON kv_block (depth)",
         "ALTER TABLE kv_copy ADD CONSTRAINT kv_copy_pkey PRIMARY KEY (key, life, tier) WITH (fillfactor = 70)",
         "CREATE INDEX kv_copy_life ON kv_copy (life)")
_KEY = "sha256(convert_to('fill ' || (n / {depth}) || ' ' || {at}, 'UTF8'))"
_BLOCKS = f"""
    INSERT INTO kv_block
    SELECT {_KEY.format(depth=DEPTH, at=f"(n % {DEPTH})")},
        CASE WHEN n % {DEPTH} = 0 THEN '\\x00'::bytea ELSE {_KEY.format(depth=DEPTH, at=f"(n % {DEPTH} - 1)")} END,
        n % {DEPTH}, 'filled', 'tenant-' || (n / {DEPTH} % 8), 512, 2097152, true, 'filled', '0',
        now() - interval '1 day' + n * interval '1 microsecond', 'fill-' || (n / {DEPTH})
    FROM generate_series($1::bigint, $2::bigint - 1) AS n"""
_COPIES = f"""
    INSERT INTO kv_copy
    SELECT {_KEY.format(depth=DEPTH, at=f"(n % {DEPTH})")}, $3, 'dram', 2097152, 1 + n / {DEPTH}, now(), 'computed', '',
        'fill-' || (n / {DEPTH})
    FROM generate_series($1::bigint, $2::bigint - 1) AS n"""


async def fill(url: str, blocks: int, progress: Callable[[str], None]) -> list[bytes]:
    """Chains of ``DEPTH`` blocks, each block with a copy, in an empty catalog; the last keys of some chains."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""), command_timeout=3_600.0)
    try:
        life = await connection.fetchval(
            "INSERT INTO life (worker, incarnation) VALUES ('filled', '0') RETURNING life")
        async with connection.transaction():
            for statement in _DROP:
                await connection.execute(statement)
            for start in range(0, blocks, CHUNK):
                stop = min(blocks, start + CHUNK)
                await connection.execute(_BLOCKS, start, stop)
                await connection.execute(_COPIES, start, stop, life)
                progress(f"filled {stop:,} of {blocks:,} blocks")
            for statement in _MAKE:
                await connection.execute(statement)
        await connection.execute("VACUUM ANALYZE kv_block")
        await connection.execute("VACUUM ANALYZE kv_copy")
        return [row["key"] for row in await connection.fetch(
            f"SELECT {_KEY.format(depth=1, at=str(DEPTH - 1))} AS key FROM "
            f"(SELECT floor(random() * $1)::bigint AS n FROM generate_series(1, $2)) AS chosen",
            max(1, blocks // DEPTH), LINEAGES)]
    finally:
        await connection.close()


async def measure_lineage(catalog: Catalog, tails: list[bytes], name: str) -> dict[str, list[float]]:
    """Each chain once, from the deepest block to the root, with its copies."""
    taken = []
    for tail in tails:
        began_s = time.perf_counter()
        reply = await catalog.lineage(tail.hex())
        taken.append(time.perf_counter() - began_s)
        if len(reply.blocks) != DEPTH:
            raise UserError(f"the lineage of {tail.hex()[:12]} has {len(reply.blocks)} blocks instead of {DEPTH}")
    taken.sort()
    return {f"{name}/p50": [_at(taken, 0.5) * 1e3], f"{name}/p99": [_at(taken, 0.99) * 1e3]}


async def measure_sizes(url: str) -> dict[str, list[float]]:
    """What the tables take, with their indexes."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        found = await connection.fetch("""
            SELECT c.relname, coalesce((SELECT sum(pg_total_relation_size(p.relid)) FROM pg_partition_tree(c.oid) p),
                pg_total_relation_size(c.oid)) AS nbytes
            FROM pg_class c WHERE c.relname IN ('kv_block', 'kv_copy', 'kv_evicted', 'request_done')""")
    finally:
        await connection.close()
    return {f"catalog/{row['relname']}/size": [float(row["nbytes"]) / 1e6] for row in found if row["nbytes"]}


def tree_cpu_s(pid: int) -> float:
    """User and system time of a process, its children, and those that ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    total = ticks.get(pid, 0)
    total += sum(ticks[child] for child, parent in parents.items() if parent == pid)
    return total / os.sysconf("SC_CLK_TCK")


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
