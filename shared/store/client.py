"""The store, for any Python program on any host: put values, get them, by key.

:class:`Client` is for programs with an event loop, :class:`SyncClient` for those without; they can do the same.
``docs/store-client.md`` shows how. What a call does is decided before anything is sent, in ``_Calls``; it then runs in
a thread (the caller's own, for :class:`SyncClient`), see :mod:`shared.store.client_core`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from math import isnan
from typing import Any, TypeVar

import numpy as np
import uvloop

from shared.errors import Bug, Unavailable
from shared.ids import BlockKey, HostId, Incarnation, fresh, tenant_fault
from shared.kv import KEY_BYTES, CacheSpec, block_keys, root_key
from shared.store.client_core import Core, Hold
from shared.store.client_directory import Directory, submit
from shared.store.client_doors import BROKEN, Call, Doors, Gone
from shared.store.client_errors import (
    BadCall,
    BadKey,
    BadMemory,
    BadTenant,
    BadUrl,
    BatchTooLarge,
    BusAway,
    NoStore,
    StoreError,
    StoreTimeout,
    WrongSize,
    counted,
)
from shared.store.client_memory import Buffer, Bytes, Part
from shared.store.door_frames import Block
from shared.store.door_line import Late
from shared.transfer import TransferSettings, host_id
from shared.transfer.addresses import host_clock_s
from shared.transfer.native import find_native

log = logging.getLogger(__name__)
logging.getLogger("shared").addHandler(logging.NullHandler())  # in a program without logs, ours are not for its stderr

MAX_BATCH = 4096
"""Keys of one call."""
MAX_CALLS = 16
"""Calls of a :class:`Client` that run at the same time; more wait their turn."""
PIN_TTL_S = 10.0
_CLOSED = "the client was closed; calls are made within its context"
_START_S = 15.0
T = TypeVar("T")
Key = str | bytes | Block
"""Of values that are no KV: any text or bytes. Of KV: a block of :meth:`Client.chain`; to look for it, its 32 bytes."""
Do = Callable[[Call], T]


class _Calls:
    """What both clients have in common: memory, keys, and each call as a function that a thread runs."""

    def __init__(self, spec: CacheSpec, directory: Directory, loop: asyncio.AbstractEventLoop,
                 settings: TransferSettings, *, client: str, incarnation: Incarnation, host: HostId,
                 tenant: str) -> None:
        self.spec = spec
        """Identity and size of the values."""
        self._directory, self._loop, self._settings = directory, loop, settings
        self._root = root_key(spec, tenant)
        self._is_opaque, self._value_root = spec.is_opaque, self._root + b"value\n"
        self._nbytes = spec.block_bytes
        self._name = client
        self._native = find_native(settings)
        if self._native is not None:
            self._native.start(client)
        self._doors = Doors(
            lambda seat, timeout_s, anew: submit(
                loop, directory.door(seat.worker, seat.incarnation, timeout_s=timeout_s, anew=anew),
                timeout_s=timeout_s + 0.5),
            client=client, incarnation=incarnation, host=host, spec=spec.digest, tenant=tenant, paths=settings.paths,
            native=self._native)
        self._core = Core(spec, directory.map, self._doors, _plain_copy if self._native is None else self._native.copy)
        directory.on_tick = self._doors.tidy
        self._buffers: dict[int, Buffer] = {}
        self._pins: set[_Kept] = set()
        self._closed = False

    @property
    def value_bytes(self) -> int:
        """Bytes of every value."""
        return self._nbytes

    def buffer(self, nbytes: int) -> Buffer:
        """New memory that workers of this host copy values out of by themselves: nothing is faster to put from."""
        self._check_open()
        if nbytes <= 0:
            raise counted(BadMemory(f"a buffer of {nbytes} bytes; it has at least one"))
        return self._keep(Buffer.allocate(nbytes, huge_pages=self._settings.huge_pages))

    def register(self, memory: Any) -> Buffer:
        """Memory that exists: a numpy array, CPU tensor, memoryview or bytearray (writable, contiguous; kept alive), or
        the descriptor of a memfd (stays the caller's). Raises :class:`BadMemory`."""
        self._check_open()
        try:
            buffer = Buffer.adopt(memory)
        except (Bug, OSError, TypeError, ValueError) as error:
            raise counted(BadMemory(f"{type(memory).__name__} cannot be registered: {error}")) from error
        return self._keep(buffer)

    def unregister(self, buffer: Buffer) -> None:
        """Lets the memory go; no call may be using it."""
        if self._buffers.pop(buffer.serial, None) is None:
            raise counted(BadMemory("this buffer is not registered here; each can be unregistered once"))
        self._doors.forget(buffer.serial)
        buffer.close()

    def chain(self, tokens: Sequence[int]) -> list[Block]:
        """The full blocks of a prompt, as keys of KV; the partial tail has none. Needs a cache spec of KV."""
        if self.spec.is_opaque:
            raise self._bad_key(f"{self.spec.model} has values that are no KV: any text or bytes are a key")
        keys = block_keys(self._root, tokens, self.spec.block_tokens)
        return [Block(key, parent, depth, self.spec.block_tokens)
                for depth, (key, parent) in enumerate(zip(keys, [self._root, *keys], strict=False))]

    # -- calls --------------------------------------------------------------------------------------------------

    def _to_put(self, keys: Sequence[Key], parts: Sequence[Part]) -> Do[list[bool]]:
        blocks = [self._block(key) for key in self._batch(keys)]
        self._fit(keys, parts)
        return lambda call: self._core.put(call, blocks, parts)

    def _to_get(self, keys: Sequence[Key], parts: Sequence[Part]) -> Do[list[bool]]:
        wanted = self._keys(keys)
        self._fit(keys, parts)
        return lambda call: self._core.get(call, wanted, parts)

    def _to_read(self, key: Key) -> Do[bytes | None]:
        part = Part(np.empty(self._nbytes, dtype=np.uint8))
        get = self._to_get([key], [part])
        return lambda call: part.array.tobytes() if get(call)[0] else None

    def _to_look(self, keys: Sequence[Key]) -> Do[list[bool]]:
        wanted = self._keys(keys)
        return lambda call: self._core.exists(call, wanted)

    def _to_remove(self, keys: Sequence[Key]) -> Do[list[bool]]:
        wanted = self._keys(keys)
        return lambda call: self._core.remove(call, wanted)

    def _to_pin(self, keys: Sequence[Key], ttl_s: float) -> Do[_Kept]:
        wanted = self._keys(keys)
        if not 0 < ttl_s <= 600:
            raise counted(BadCall(f"a pin of {ttl_s} s; more than 0 and at most 600"))

        def pin(call: Call) -> _Kept:
            kept, holds = self._core.pin(call, fresh("pin", 4), wanted, ttl_s)
            return self._renewed(_Kept(kept, holds, ttl_s))
        return pin

    def _call(self, do: Do[T], call: Call) -> T:
        """Runs ``do`` in this thread; what it raises is for users."""
        try:
            return do(call)
        except RuntimeError as error:  # the loop that it asks has ended
            if self._closed:
                raise counted(BadCall(_CLOSED)) from error
            raise
        except Late as error:
            raise counted(StoreTimeout("not done by the call's deadline")) from error
        except Gone as error:
            raise counted(NoStore(str(error))) from error
        except StoreError as error:
            counted(error)
            raise

    def _new_call(self, nvalues: int, timeout_s: float | None) -> Call:
        self._check_open()
        if timeout_s is not None and isnan(timeout_s):
            raise counted(BadCall("timeout_s is not a number of seconds"))
        return Call(host_clock_s() + self._settings.timeout_s(nvalues * self._nbytes, timeout_s))

    # -- inside -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise counted(BadCall(_CLOSED))

    def _keep(self, buffer: Buffer) -> Buffer:
        self._buffers[buffer.serial] = buffer
        return buffer

    def _batch(self, keys: Sequence[Key]) -> Sequence[Key]:
        if not isinstance(keys, Sequence) or isinstance(keys, str | bytes | bytearray | memoryview):
            raise self._bad_key(f"{type(keys).__name__} is no list of keys; give one, also for a single key")
        if len(keys) > MAX_BATCH:
            raise counted(BatchTooLarge(f"a call with {len(keys)} keys; at most {MAX_BATCH} go at once"))
        return keys

    def _fit(self, keys: Sequence[Key], parts: Sequence[Part]) -> None:
        if len(keys) != len(parts):
            raise counted(BadCall(f"{len(keys)} keys for {len(parts)} values; a value needs a key"))
        for part in parts:
            if not isinstance(part, Part):
                raise counted(BadMemory(f"{type(part).__name__} is no registered memory; see `register` and `buffer`"))
            if not part.is_alive:
                raise counted(BadMemory("this buffer was unregistered, or its client closed"))
            if part.nbytes != self._nbytes:
                raise counted(WrongSize(
                    f"a value of {part.nbytes} bytes; those of {self.spec.model} have {self._nbytes}"))

    def _keys(self, keys: Sequence[Key]) -> list[BlockKey]:
        return [self._key(key) for key in self._batch(keys)]

    def _key(self, key: Key) -> BlockKey:
        if isinstance(key, Block):
            return BlockKey(self._block(key).key)
        if self._is_opaque:
            return self._value_key(key)
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise self._bad_key(f"{key!r} is no key of KV: it has {KEY_BYTES} bytes, or is a block of a chain")
        return BlockKey(key)

    def _block(self, key: Key) -> Block:
        if isinstance(key, Block):
            if self._is_opaque:
                raise self._bad_key(f"a block of KV is no key of {self.spec.model}, whose values are none")
            return key
        if not self._is_opaque:
            raise self._bad_key(f"{key!r} does not say which block of which chain it is; see `chain`")
        return Block(self._value_key(key), self._root)

    def _bad_key(self, why: str) -> BadKey:
        return counted(BadKey(why))

    def _value_key(self, key: str | bytes) -> BlockKey:
        try:
            data = key.encode() if isinstance(key, str) else key
        except UnicodeEncodeError as error:
            raise self._bad_key(f"{key!r} is no text: it has lone surrogates; give the bytes that are meant") from error
        if not isinstance(data, bytes):
            raise self._bad_key(f"{key!r} is no key of {self.spec.model}: any text or bytes are")
        return BlockKey(hashlib.sha256(self._value_root + data).digest())

    def _renewed(self, kept: _Kept) -> _Kept:
        if kept.holds:
            self._pins.add(kept)
            kept.renewal = asyncio.run_coroutine_threadsafe(kept.renew(), self._loop)
            kept.renewal.add_done_callback(lambda _: self._pins.discard(kept))
        return kept

    def _close(self) -> None:
        self._closed = True
        for kept in list(self._pins):
            kept.end()
        self._doors.close()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
        if self._native is not None:
            self._native.close()


@contextmanager
def _as_store_error() -> Iterator[None]:
    """What the bus raises, as one of the store's own errors."""
    try:
        yield
    except Unavailable as error:
        raise counted(BusAway(str(error))) from error


class _Kept:
    """What a pin holds; :meth:`renew` runs on the client's loop until :meth:`end`."""

    def __init__(self, kept: list[bool], holds: list[Hold], ttl_s: float) -> None:
        self.kept, self.holds, self._ttl_s = kept, holds, ttl_s
        self.renewal: Future[None] | None = None

    async def renew(self) -> None:
        """Again and again, long before it would end."""
        while self.holds:
            await asyncio.sleep(self._ttl_s / 3)
            for hold in list(self.holds):
                try:
                    await asyncio.to_thread(hold.renew)
                except (Late, *BROKEN) as error:
                    log.info("action=pin_lost worker=%s why=%r", hold.visit.seat.worker, error)
                    hold.end()
                    self.holds.remove(hold)

    def end(self) -> None:
        """Idempotent."""
        if self.renewal is not None:
            self.renewal.cancel()
        while self.holds:
            self.holds.pop().end()


class Pin:
    """Values that stay where they are until :meth:`end`, or until the client ends or is not heard of for the pin's ttl.

    A context manager, plain and async.
    """

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept
        self.kept = kept.kept
        """A flag a key: was it there to be pinned?"""

    @property
    def is_held(self) -> bool:
        """False once it has ended, or the worker was lost."""
        return bool(self._kept.holds)

    def end(self) -> None:
        """Lets go. Idempotent."""
        self._kept.end()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    async def __aenter__(self) -> Pin:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()


class Client(_Calls):
    """For programs with an event loop. Calls run in threads, up to 16 at a time; the loop only waits for them.

    A call that is cancelled ends at once: from when the cancellation comes out, nobody touches its memory any more.
    """

    _threads: ThreadPoolExecutor

    @classmethod
    @asynccontextmanager
    async def open(cls, nats_url: str, spec: CacheSpec, *, tenant: str = "", name: str = "", credentials: str = "",
                   settings: TransferSettings | None = None) -> AsyncIterator[Client]:
        """A client for the values of ``spec``; see :meth:`CacheSpec.opaque` for values that are no KV.

        ``tenant`` separates: another one finds nothing of this one's. ``settings``: which paths (shm, tcp) may be
        used, checksums, deadlines. Raises :class:`BusAway` when there is no bus, :class:`BadUrl` and :class:`BadTenant`
        for what cannot be one; who lends nothing is found out about by calls.
        """
        loop = asyncio.get_running_loop()
        make = partial(_make, cls, nats_url, spec, loop=loop, tenant=tenant, name=name, credentials=credentials,
                       settings=settings)
        client, directory = make()
        opened = asyncio.Event()
        listening = asyncio.create_task(directory.run(opened.set), name="store-client")
        opening = asyncio.create_task(opened.wait(), name="store-client-opening")
        client._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix=client._name)
        try:
            await asyncio.wait({listening, opening}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                with _as_store_error():
                    listening.result()
            yield client
        finally:
            opening.cancel()
            client._closed = True
            await asyncio.to_thread(client._threads.shutdown)
            client._close()
            directory.stopping.set()
            await asyncio.wait([listening])
            if opened.is_set() and (error := listening.exception()) is not None:
                log.error("action=store_client_deaf error=%s", error)

    async def put(self, key: Key, value: bytes | bytearray | memoryview, *, timeout_s: float | None = None) -> bool:
        """Stores a value; false when the key had one already (values never change)."""
        return (await self._do(self._to_put([key], [_loose(value)]), 1, timeout_s))[0]

    async def get(self, key: Key, *, timeout_s: float | None = None) -> bytes | None:
        """A copy of the value; ``None`` when there is none."""
        return await self._do(self._to_read(key), 1, timeout_s)

    async def put_from(self, key: Key, part: Part, *, timeout_s: float | None = None) -> bool:
        """Stores the bytes of registered memory; see :meth:`put`."""
        return (await self._do(self._to_put([key], [part]), 1, timeout_s))[0]

    async def get_into(self, key: Key, part: Part, *, timeout_s: float | None = None) -> bool:
        """Fills registered memory with the value; false when there is none, and then nothing may be read there."""
        return (await self._do(self._to_get([key], [part]), 1, timeout_s))[0]

    async def batch_put(self, keys: Sequence[Key], parts: Sequence[Part], *,
                        timeout_s: float | None = None) -> list[bool]:
        """Many :meth:`put_from`: was each stored by this call? An error's ``done`` says which were."""
        return await self._do(self._to_put(keys, parts), len(keys), timeout_s)

    async def batch_get_into(self, keys: Sequence[Key], parts: Sequence[Part], *,
                             timeout_s: float | None = None) -> list[bool]:
        """Many :meth:`get_into`: which are there."""
        return await self._do(self._to_get(keys, parts), len(keys), timeout_s)

    async def exists(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """Is there a value? Its owner was asked."""
        return (await self._do(self._to_look([key]), 0, timeout_s))[0]

    async def batch_exists(self, keys: Sequence[Key], *, timeout_s: float | None = None) -> list[bool]:
        """Many :meth:`exists`."""
        return await self._do(self._to_look(keys), 0, timeout_s)

    async def remove(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """Drops every copy that nobody uses; was there one?"""
        return (await self._do(self._to_remove([key]), 0, timeout_s))[0]

    async def pin(self, keys: Sequence[Key], *, ttl_s: float = PIN_TTL_S, timeout_s: float | None = None) -> Pin:
        """Keeps values from being evicted or removed until the pin ends."""
        return Pin(await self._do(self._to_pin(keys, ttl_s), 0, timeout_s))

    async def _do(self, do: Do[T], nvalues: int, timeout_s: float | None) -> T:
        call = self._new_call(nvalues, timeout_s)
        done = self._loop.run_in_executor(self._threads, self._call, do, call)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            call.cancel()
            while not done.done():  # its thread is cut off, so it takes no time; till then it uses the caller's memory
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            if not done.cancelled() and done.exception() is None and isinstance(result := done.result(), _Kept):
                result.end()
            raise


class SyncClient(_Calls):
    """For programs without an event loop: every call blocks, in whatever thread it is made."""

    @classmethod
    @contextmanager
    def open(cls, nats_url: str, spec: CacheSpec, *, tenant: str = "", name: str = "", credentials: str = "",
             settings: TransferSettings | None = None) -> Iterator[SyncClient]:
        """See :meth:`Client.open`."""
        loop = uvloop.new_event_loop()
        try:
            client, directory = _make(cls, nats_url, spec, loop=loop, tenant=tenant, name=name,
                                      credentials=credentials, settings=settings)
        except BaseException:
            loop.close()
            raise
        opened: Future[None] = Future()

        def listen() -> None:
            try:
                loop.run_until_complete(directory.run(lambda: opened.set_result(None)))
            except BaseException as error:
                if opened.done():
                    log.error("action=store_client_deaf error=%s", error)
                else:
                    opened.set_exception(error)
            finally:
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()

        thread = threading.Thread(target=listen, name=f"{client._name}-loop", daemon=True)
        thread.start()
        try:
            with _as_store_error():
                opened.result(_START_S)
            yield client
        finally:
            client._close()
            try:
                loop.call_soon_threadsafe(directory.stopping.set)
            except RuntimeError:
                pass  # it has ended by itself
            thread.join()

    def put(self, key: Key, value: bytes | bytearray | memoryview, *, timeout_s: float | None = None) -> bool:
        """See :meth:`Client.put`."""
        return self._do(self._to_put([key], [_loose(value)]), 1, timeout_s)[0]

    def get(self, key: Key, *, timeout_s: float | None = None) -> bytes | None:
        """See :meth:`Client.get`."""
        return self._do(self._to_read(key), 1, timeout_s)

    def put_from(self, key: Key, part: Part, *, timeout_s: float | None = None) -> bool:
        """See :meth:`Client.put_from`."""
        return self._do(self._to_put([key], [part]), 1, timeout_s)[0]

    def get_into(self, key: Key, part: Part, *, timeout_s: float | None = None) -> bool:
        """See :meth:`Client.get_into`."""
        return self._do(self._to_get([key], [part]), 1, timeout_s)[0]

    def batch_put(self, keys: Sequence[Key], parts: Sequence[Part], *, timeout_s: float | None = None) -> list[bool]:
        """See :meth:`Client.batch_put`."""
        return self._do(self._to_put(keys, parts), len(keys), timeout_s)

    def batch_get_into(self, keys: Sequence[Key], parts: Sequence[Part], *,
                       timeout_s: float | None = None) -> list[bool]:
        """See :meth:`Client.batch_get_into`."""
        return self._do(self._to_get(keys, parts), len(keys), timeout_s)

    def exists(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """See :meth:`Client.exists`."""
        return self._do(self._to_look([key]), 0, timeout_s)[0]

    def batch_exists(self, keys: Sequence[Key], *, timeout_s: float | None = None) -> list[bool]:
        """See :meth:`Client.batch_exists`."""
        return self._do(self._to_look(keys), 0, timeout_s)

    def remove(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """See :meth:`Client.remove`."""
        return self._do(self._to_remove([key]), 0, timeout_s)[0]

    def pin(self, keys: Sequence[Key], *, ttl_s: float = PIN_TTL_S, timeout_s: float | None = None) -> Pin:
        """See :meth:`Client.pin`."""
        return Pin(self._do(self._to_pin(keys, ttl_s), 0, timeout_s))

    def _do(self, do: Do[T], nvalues: int, timeout_s: float | None) -> T:
        return self._call(do, self._new_call(nvalues, timeout_s))


C = TypeVar("C", bound=_Calls)


def _make(kind: type[C], nats_url: str, spec: CacheSpec, *, loop: asyncio.AbstractEventLoop, tenant: str, name: str,
          credentials: str, settings: TransferSettings | None) -> tuple[C, Directory]:
    if fault := tenant_fault(tenant):
        raise counted(BadTenant(fault))
    if not nats_url.strip(", "):
        raise counted(BadUrl(f"{nats_url!r} is no address of NATS; one is like nats://127.0.0.1:4222"))
    settings = settings or TransferSettings()
    client, incarnation = name or fresh("client", 4), Incarnation(fresh())
    host = HostId(settings.host_id) if settings.host_id else host_id()
    directory = Directory(nats_url, spec, client=client, incarnation=incarnation, host=host, tenant=tenant,
                          credentials=credentials)
    return kind(spec, directory, loop, settings, client=client, incarnation=incarnation, host=host,
                tenant=tenant), directory


def _plain_copy(to: Bytes, source: Bytes, length: int, count: int, stride: int) -> None:
    """One part, as :attr:`Native.copy` does it."""
    np.copyto(to[:length], source[:length])


def _loose(value: bytes | bytearray | memoryview) -> Part:
    """Memory that is only read, and only by this call."""
    try:
        return Part(np.frombuffer(value, dtype=np.uint8))
    except (TypeError, ValueError) as error:
        raise counted(BadMemory(f"{type(value).__name__} is no value: contiguous bytes are ({error})")) from error
