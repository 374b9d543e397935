"""The files of one directory: equal slots in ``blocks``, a record a slot in ``index``.

::

    <ssd_dir>/<worker>/<digest of the cache spec>/
        lock     held by the one process that uses the directory
        spec     the cache spec, JSON: what these blocks are of
        index    record i (:mod:`shared.store.ssd.record`) at i * 256
        blocks   slot i at i * stride, the block's size rounded up to a page; grows by extents, never by a block

All calls block and are for threads. A slot is filled in three writes: its record becomes empty, the bytes, the new
record. So a process that is killed at any point leaves the old block, nothing, or the new block; bytes that never
reached the disk, because the machine lost its power, do not match the checksum in the record and are found out when
they are read. Nothing is ever synced: a killed process loses nothing that was written, a loss of power at most what the
kernel had not written back yet.

Reading the index is all that a restart takes; no block is read before somebody wants it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
import xxhash
from filelock import FileLock, Timeout

from shared.errors import SettingError
from shared.ids import BlockKey
from shared.kv import CacheSpec
from shared.messages import StoredBlock
from shared.store.ssd.files import FULL, File, Files
from shared.store.ssd.record import EMPTY, RECORD_BYTES, Damaged, Record, decode, encode

PAGE_BYTES = 4096
EXTENT_BYTES = 64 << 20
"""The blocks' file grows by so much, or by a slot when that is larger."""
SPEC_FILE = "spec"
_CHUNK_RECORDS = 4096
_MISTAKES = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST,
                       errno.ENAMETOOLONG, errno.EISDIR, errno.ELOOP})


class DirectoryTaken(SettingError):
    """Another process keeps blocks in the directory under the same worker_id."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a directory held when it was opened."""

    records: list[tuple[int, Record]]
    """(slot, record) of every usable block, oldest first, and so parents before children."""
    damaged: int
    """Records that were torn or flipped, or whose slot is missing."""
    orphans: int
    """Good records whose parent is lost."""


class SlotFiles:
    """The directory of one worker and cache spec, locked as long as it is open; made by :meth:`open`.

    Different slots may be read and written at the same time; :meth:`write`, :meth:`erase` and :meth:`grow` are for
    one thread.
    """

    def __init__(self, lock: FileLock, index: File, blocks: File, spec: CacheSpec, max_slots: int) -> None:
        self._lock, self._index, self._blocks = lock, index, blocks
        self._block_bytes = spec.block_bytes
        self._max_slots = max_slots
        self.stride = stride_of(spec)
        self._extent = max(1, EXTENT_BYTES // self.stride)
        self._checksums: dict[int, int] = {}
        """{slot: xxh3-64 of what was written there}; all and only slots whose record is not empty."""
        self._generation = 0
        self._ready = 0
        self.found = Found([], 0, 0)

    @classmethod
    def open(cls, directory: Path, spec: CacheSpec, *, max_slots: int, files: Files) -> SlotFiles:
        """Locks ``directory``, made if need be, and reads its index.

        Raises :class:`SettingError` when it is not for us to use, or another process uses it
        (:class:`DirectoryTaken`); ``OSError`` when the disk fails.
        """
        lock = _locked(directory)
        opened: list[File] = []
        try:
            _write_spec(directory / SPEC_FILE, spec)
            opened.append(index := files.open(directory / "index"))
            opened.append(blocks := files.open(directory / "blocks"))
            slots = cls(lock, index, blocks, spec, max_slots)
            slots._recover()
        except BaseException as error:
            _close_all(opened, lock)
            if isinstance(error, OSError):
                raise _explained(directory, error) from error
            raise
        return slots

    @property
    def ready_slots(self) -> int:
        """Slots ``[0, ready_slots)`` have room on the disk."""
        return self._ready

    def grow(self) -> int:
        """Makes room for another extent of slots, or what the disk has room for; how many are ready now.

        Raises ``OSError``, also when there is no room for a single one.
        """
        more = min(self._extent, self._max_slots - self._ready)
        while True:
            try:
                self._index.allocate((self._ready + more) * RECORD_BYTES)
                self._blocks.allocate((self._ready + more) * self.stride)
            except OSError as error:
                if error.errno not in FULL or more <= 1:
                    raise
                more //= 2
            else:
                self._ready += more
                return self._ready

    def write(self, slot: int, block: StoredBlock, payload: memoryview) -> None:
        """Fills a slot. Raises ``OSError``, after which the slot is empty or holds what it held."""
        checksum = xxhash.xxh3_64_intdigest(payload)
        if slot in self._checksums:
            self.erase(slot)
        self._generation += 1
        self._blocks.write(payload, slot * self.stride)
        self._index.write(encode(Record(block, self._generation, checksum)), slot * RECORD_BYTES)
        self._checksums[slot] = checksum

    def read(self, slot: int, payload: memoryview) -> None:
        """Fills ``payload`` with the slot's block. Raises ``OSError``, or :class:`Damaged` for other bytes."""
        expected = self._checksums.get(slot)
        if expected is None:
            raise Damaged(f"slot {slot} is empty")
        count = self._blocks.read(payload, slot * self.stride)
        if count != len(payload):
            raise Damaged(f"slot {slot} has {count} of {len(payload)} bytes")
        if xxhash.xxh3_64_intdigest(payload) != expected:
            raise Damaged(f"slot {slot} does not hold what was written")

    def erase(self, slot: int) -> None:
        """Forgets what a slot holds. Raises ``OSError``."""
        self._index.write(EMPTY, slot * RECORD_BYTES)
        self._checksums.pop(slot, None)

    def close(self) -> None:
        """Gives the directory back."""
        _close_all([self._blocks, self._index], self._lock)

    def _recover(self) -> None:
        """Reads the index; forgets what cannot be used, there and on the disk."""
        self._blocks_fit()
        newest: dict[BlockKey, tuple[int, Record]] = {}
        useless: list[int] = []
        damaged = 0
        for slot, record in self._records():
            if record is None or record.block.nbytes != self._block_bytes or slot >= self._ready:
                damaged += slot < self._max_slots
                useless.append(slot)
                continue
            self._generation = max(self._generation, record.generation)
            twin = newest.get(record.block.key)
            if twin is not None and twin[1].generation > record.generation:
                useless.append(slot)
                continue
            if twin is not None:
                useless.append(twin[0])
            newest[record.block.key] = slot, record
        usable, orphans = _whole_chains(newest.values())
        for slot in (*useless, *orphans):
            self.erase(slot)
        self._checksums.update((slot, record.payload_xxh3) for slot, record in usable)
        self.found = Found(usable, damaged, len(orphans))

    def _blocks_fit(self) -> None:
        """A directory that may hold less than it did gives the rest back."""
        most = self._max_slots * self.stride
        if self._blocks.size() > most:
            self._blocks.truncate(most)
        if self._index.size() > self._max_slots * RECORD_BYTES:
            self._index.truncate(self._max_slots * RECORD_BYTES)
        self._ready = min(self._blocks.size() // self.stride, self._max_slots)

    def _records(self) -> Iterable[tuple[int, Record | None]]:
        """Every slot whose record is not empty; ``None`` for a damaged one."""
        total = -(-self._index.size() // RECORD_BYTES)
        chunk = memoryview(bytearray(_CHUNK_RECORDS * RECORD_BYTES))
        empty = bytes(len(chunk))
        for first in range(0, total, _CHUNK_RECORDS):
            count = self._index.read(chunk, first * RECORD_BYTES)
            if chunk[:count] == empty[:count]:
                continue
            for at in range(0, count, RECORD_BYTES):
                try:
                    record = decode(chunk[at:min(at + RECORD_BYTES, count)])
                except Damaged:
                    yield first + at // RECORD_BYTES, None
                else:
                    if record is not None:
                        yield first + at // RECORD_BYTES, record


def stride_of(spec: CacheSpec) -> int:
    """Bytes from one slot of a block to the next."""
    return -(-spec.block_bytes // PAGE_BYTES) * PAGE_BYTES


def slots_for(spec: CacheSpec, *, nbytes: int, blocks: int) -> int:
    """How many slots ``nbytes`` of disk are, index included, and at most ``blocks`` unless that is 0."""
    slots = nbytes // (stride_of(spec) + RECORD_BYTES)
    return min(slots, blocks) if blocks else slots


def _whole_chains(found: Iterable[tuple[int, Record]]) -> tuple[list[tuple[int, Record]], list[int]]:
    """What has all its ancestors, oldest first and so parents first; and the slots of the others.

    A block is written after its parent, and its parent stays until it is gone: so generations are an order of both.
    """
    depths: dict[BlockKey, int] = {}
    usable: list[tuple[int, Record]] = []
    orphans: list[int] = []
    for slot, record in sorted(found, key=lambda item: item[1].generation):
        block = record.block
        if block.depth == 0 or depths.get(block.parent) == block.depth - 1:
            depths[block.key] = block.depth
            usable.append((slot, record))
        else:
            orphans.append(slot)
    return usable, orphans


def _close_all(files: Iterable[File], lock: FileLock) -> None:
    for file in files:
        file.close()
    lock.release()


def read_spec(directory: Path) -> CacheSpec | None:
    """Of what spec the blocks in ``directory`` are; ``None`` when it is no directory of ours."""
    try:
        return msgspec.json.decode((directory / SPEC_FILE).read_bytes(), type=CacheSpec)
    except (OSError, msgspec.MsgspecError):
        return None


def _write_spec(path: Path, spec: CacheSpec) -> None:
    text = msgspec.json.format(msgspec.json.encode(spec))
    if not path.exists() or path.read_bytes() != text:  # a full disk must not keep us from what is there already
        path.write_bytes(text)


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Keeps ``directory``, made if need be, from other processes. Raises :class:`SettingError` as
    :meth:`SlotFiles.open` does; a disk that fails is found out about by whoever opens files on it."""
    try:
        lock = _locked(directory)
    except OSError:
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _locked(directory: Path) -> FileLock:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / "lock", timeout=0, thread_local=False)
        lock.acquire()
    except Timeout as error:
        raise DirectoryTaken("ssd_dir", str(directory), "a directory that no other process uses; "
                             "give every worker a worker_id of its own") from error
    except OSError as error:
        raise _explained(directory, error) from error
    return lock


def check_directory(given: str) -> None:
    """Makes the directory that a person named if need be; raises :class:`SettingError` when we may not write there.

    A disk that fails is no mistake of that person, and is found out about again when it is used.
    """
    directory = Path(given).expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno in _MISTAKES:
            raise SettingError("ssd_dir", given, f"a writable directory ({error.strerror})") from error


def _explained(directory: Path, error: OSError) -> Exception:
    """A disk that fails is no person's mistake."""
    if error.errno in _MISTAKES:
        return SettingError("ssd_dir", str(directory), f"a writable directory ({error.strerror})")
    return error
