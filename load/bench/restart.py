"""`moonbus load bench-restart`: a worker with a full SSD is killed; how soon is it of use again?

The worker is a store (`moonbus serve store`), so that no model's loading is measured. Its SSD is filled once, through
the same files it uses; each round starts it, kills it and drops its files from the page cache. What a round measures
begins with the start of the process, the interpreter's included:

* ``ready``: it said hello;
* ``told``: a reader has its whole inventory, as a conductor asks for it;
* ``served``: a chain was read from the disk and pushed into our memory (that its bytes are right is looked at later).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from load.bench.bus import nats_server
from load.bench.child import Child
from load.bench.rounds import Outcome, Probe, Target, measure_rounds
from shared.bus.bus import Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import HELLO, KV_SYNC, PUSH
from shared.errors import UserError
from shared.ids import BlockKey, Incarnation, OperationId, RequestId, WorkerId, fresh
from shared.kv import CacheSpec, Tier, pack_keys
from shared.messages import Hello, PushBlocks, Range, Since, SnapshotPage, Stored, StoredBlock
from shared.store.settings import SsdSettings
from shared.store.ssd.files import DiskFiles
from shared.store.ssd.slots import SlotFiles
from shared.transfer import TransferEngine
from shared.units import format_bytes

SPEC = CacheSpec(model="bench", weights_digest="", tokenizer_digest="", dtype="float32", layers=30, kv_heads=3,
                 head_dim=64, block_tokens=64, max_context=8192)
"""The shape of SmolLM2-135M: blocks of 2.8 MiB."""
CHAIN_BLOCKS = 64
ROOT = BlockKey(bytes(32))
STORE = "bench-store"
WORKER = WorkerId(f"{STORE}-{SPEC.digest[:8]}")
SERVED_WITHIN_S = 5.0
DEADLINE_S = 120.0
_LANDING = "landing"


@dataclass(frozen=True, slots=True)
class RestartOptions:
    """What `moonbus load bench-restart` was asked to do."""

    nbytes: int
    """Of blocks on the SSD."""
    directory: Path
    rounds: int


def targets() -> list[Target]:
    """What has to be reached."""
    return [Target("restart/served", at_most=SERVED_WITHIN_S)]


async def bench(options: RestartOptions, console: Console) -> Outcome:
    """Fills the SSD, then measures; the files are removed at the end. Raises :class:`UserError`."""
    blocks = options.nbytes // SPEC.block_bytes
    if blocks < CHAIN_BLOCKS:
        raise UserError(f"--gib is too small: {format_bytes(options.nbytes)} are {blocks} blocks, a chain needs "
                        f"{CHAIN_BLOCKS}")
    home = SsdSettings(dir=str(options.directory)).directory(WORKER, SPEC.digest)
    if home.exists():
        raise UserError(f"{home} exists; choose another --dir, or remove it")
    try:
        console.print(f"filling {home} with {blocks} blocks of {format_bytes(SPEC.block_bytes)}")
        await asyncio.to_thread(_fill, home, blocks)
        async with nats_server() as url, _Reader.open(url) as reader:
            async def measure() -> Mapping[str, float]:
                _drop_cached(home)
                return await _restart(reader, url, options, blocks)

            return await measure_rounds([Probe("restart", measure)], rounds=options.rounds, deadline_s=DEADLINE_S,
                                        progress=lambda number: console.print(f"round {number + 1}"))
    finally:
        await asyncio.to_thread(_remove, home)


async def _restart(reader: _Reader, url: str, options: RestartOptions, blocks: int) -> Mapping[str, float]:
    began_s = time.monotonic()
    room = 2 * CHAIN_BLOCKS * SPEC.block_bytes
    env = {"NATS_URL": url, "WORKER_ID": STORE, "SSD_DIR": str(options.directory), "POOL_BYTES": str(room),
           "SSD_BYTES": str(2 * options.nbytes), "STORE_MAX_SPECS": "1"}
    command = (sys.executable, "-m", "services.store")
    async with Child.start("store", command, env={f"MOONBUS_{name}": value for name, value in env.items()}):
        hello = await reader.wait_hello()
        ready_s = time.monotonic()
        held = await reader.inventory(hello)
        told_s = time.monotonic()
        if held != blocks:
            raise UserError(f"the store found {held} of {blocks} blocks again")
        served_s = await reader.fetch(hello, _chain(0))
    return {"ready": ready_s - began_s, "told": told_s - began_s, "served": served_s - began_s,
            "rate": CHAIN_BLOCKS * SPEC.block_bytes / (served_s - told_s) / 1e9}


class _Reader:
    """Hears the store, and has blocks pushed into memory of its own."""

    def __init__(self, bus: NatsBus, transfer: TransferEngine) -> None:
        self._bus, self._transfer = bus, transfer
        self._landing = transfer.register(_LANDING, CHAIN_BLOCKS * SPEC.block_bytes)
        self._hellos: asyncio.Queue[Hello] = asyncio.Queue(maxsize=64)
        self._seen: set[Incarnation] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[_Reader]:
        """Listens while the context is open."""
        async with (NatsBus.connect(url, name="bench-reader") as bus,
                    TransferEngine.open(worker=WorkerId("bench-reader"), incarnation=Incarnation(fresh())) as transfer):
            reader = cls(bus, transfer)
            listening = await bus.subscribe(HELLO.any(), reader._on_hello)
            try:
                yield reader
            finally:
                await listening.close()

    async def _on_hello(self, delivery: Delivery) -> None:
        hello: Hello = delivery.message
        if hello.incarnation not in self._seen:
            self._seen.add(hello.incarnation)
            await self._hellos.put(hello)

    async def wait_hello(self) -> Hello:
        """Of a life that was not heard before; the caller bounds the wait."""
        return await self._hellos.get()

    async def inventory(self, hello: Hello) -> int:
        """How many blocks it has on its SSD."""
        held, ask = 0, Since(incarnation=hello.incarnation, seq=0)
        while True:
            reply = await self._bus.request(KV_SYNC.at(worker=hello.worker), ask, timeout_s=DEADLINE_S)
            if not isinstance(reply, SnapshotPage):
                return sum(block.tier is Tier.SSD for event in reply.events if isinstance(event, Stored)
                           for block in event.blocks)
            held += sum(block.tier is Tier.SSD for block in reply.blocks)
            if reply.page + 1 == reply.pages:
                return held
            ask = Since(incarnation=hello.incarnation, seq=0, snapshot=reply.snapshot, page=reply.page + 1)

    async def fetch(self, hello: Hello, blocks: list[StoredBlock]) -> float:
        """Has the blocks pushed here; when they were. Raises :class:`UserError` when they do not come, or have other
        bytes than they had."""
        operation = OperationId(fresh("fetch", 4))
        ranges = [Range(segment=_LANDING, offset=slot * SPEC.block_bytes, length=SPEC.block_bytes)
                  for slot in range(len(blocks))]
        ask = PushBlocks(operation=operation, request=RequestId(""), keys=pack_keys([block.key for block in blocks]),
                         endpoint=self._transfer.endpoint, slots=ranges, deadline_s=DEADLINE_S,
                         grant=self._transfer.grant(operation, ranges, ttl_s=DEADLINE_S))
        reply = await self._bus.request(PUSH.at(worker=hello.worker), ask, timeout_s=DEADLINE_S)
        served_s = time.monotonic()
        await self._transfer.release(operation)
        if reply.blocks != len(blocks):
            raise UserError(f"{reply.blocks} of {len(blocks)} blocks were served: {reply.why}")
        for slot, block in enumerate(blocks):
            landed = self._landing.array[slot * SPEC.block_bytes:(slot + 1) * SPEC.block_bytes]
            if not np.array_equal(landed, _payload(block.key)):
                raise UserError(f"block {slot} came back with other bytes")
        return served_s


def _chain(number: int) -> list[StoredBlock]:
    blocks: list[StoredBlock] = []
    parent = ROOT
    for depth in range(CHAIN_BLOCKS):
        key = BlockKey(hashlib.sha256(f"{number}/{depth}".encode()).digest())
        blocks.append(StoredBlock(key=key, parent=parent, depth=depth, nbytes=SPEC.block_bytes,
                                  tokens=SPEC.block_tokens, tenant="bench"))
        parent = key
    return blocks


_NOISE = np.random.default_rng(1).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


def _payload(key: BlockKey) -> npt.NDArray[np.uint8]:
    """Other bytes for every block, made fast."""
    return _NOISE ^ np.uint8(key[0]) if key[1] % 2 else np.roll(_NOISE, key[2] + 1)


def _fill(home: Path, blocks: int) -> None:
    slots = SlotFiles.open(home, SPEC, max_slots=blocks, files=DiskFiles())
    try:
        chain: list[StoredBlock] = []
        for slot in range(blocks):
            if not chain:
                chain = _chain(slot // CHAIN_BLOCKS)
            if slot >= slots.ready_slots:
                slots.grow()
            block = chain.pop(0)
            slots.write(slot, block, memoryview(_payload(block.key)))  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"--dir {home}: {error.strerror}") from error
    finally:
        slots.close()


def _drop_cached(home: Path) -> None:
    """What follows reads from the disk, as after a start of the machine."""
    for name in ("index", "blocks"):
        fd = os.open(home / name, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _remove(home: Path) -> None:
    """Only what we made, and directories only when they are empty then."""
    for name in ("index", "blocks", "spec", "lock"):
        (home / name).unlink(missing_ok=True)
    for directory in (home, home.parent):
        if directory.exists() and not any(directory.iterdir()):
            directory.rmdir()
