"""The slot files against crashes: whatever was written by then, torn or flipped, no wrong byte comes back."""

from __future__ import annotations

import errno
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import SettingError
from shared.ids import BlockKey
from shared.store.ssd.files import DiskFiles, Files
from shared.store.ssd.record import RECORD_BYTES, Damaged
from shared.store.ssd.slots import SlotFiles, check_directory, read_spec, slots_for, stride_of
from tests.support.blocks import SPEC, make_chain, payload
from tests.support.faulty_files import FaultyFiles

SLOTS = 24


def open_slots(directory: Path, *, max_slots: int = SLOTS, files: Files | None = None) -> SlotFiles:
    return SlotFiles.open(directory, SPEC, max_slots=max_slots, files=files or DiskFiles())


def fill(slots: SlotFiles, *lengths: int) -> None:
    slots.grow()
    slot = 0
    for number, length in enumerate(lengths):
        for block in make_chain(str(number), length):
            slots.write(slot, block, memoryview(payload(block.key)))
            slot += 1


def check(directory: Path, *, max_slots: int = SLOTS) -> dict[BlockKey, bool]:
    """Opens what is there: {key of a block found: do its bytes come back}. Fails on a hole and on a wrong byte."""
    slots = open_slots(directory, max_slots=max_slots)
    found: dict[BlockKey, bool] = {}
    buffer = memoryview(bytearray(SPEC.block_bytes))
    for slot, record in slots.found.records:
        assert record.block.depth == 0 or record.block.parent in found
        assert record.block.key not in found
        try:
            slots.read(slot, buffer)
        except Damaged:
            found[record.block.key] = False
        else:
            assert buffer == payload(record.block.key)
            found[record.block.key] = True
    slots.close()
    return found


@pytest.fixture(scope="module")
def written() -> Iterator[list[tuple[str, int, bytes]]]:
    """Every write of a history in which slots are filled, replaced by other chains, and erased."""
    files = FaultyFiles()
    with tempfile.TemporaryDirectory() as directory:
        slots = open_slots(Path(directory), files=files)
        slots.grow()
        for slot, block in enumerate(make_chain("a", 6) + make_chain("b", 4)):
            slots.write(slot, block, memoryview(payload(block.key)))
        slots.erase(5)
        for slot, block in zip((5, 9, 8), make_chain("c", 3), strict=True):
            slots.write(slot, block, memoryview(payload(block.key)))
        slots.close()
    yield files.log


def replay(directory: Path, log: list[tuple[str, int, bytes]]) -> None:
    files = {name: (directory / name).open("w+b") for name in ("index", "blocks")}
    files["blocks"].truncate(SLOTS * stride_of(SPEC))
    for name, offset, data in log:
        files[name].seek(offset)
        files[name].write(data)
    for file in files.values():
        file.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_killed_in_the_middle_of_a_write(written: list[tuple[str, int, bytes]], data: st.DataObject) -> None:
    """A killed process leaves a first part of its writes; what was whole by then is served."""
    count = data.draw(st.integers(0, len(written)))
    log = written[:count]
    if log:
        name, offset, last = log[-1]
        log[-1] = name, offset, last[:data.draw(st.integers(0, len(last)))]
    with tempfile.TemporaryDirectory() as directory:
        replay(Path(directory), log)
        assert all(check(Path(directory)).values()), "nothing is even announced that does not come back"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_power_lost(written: list[tuple[str, int, bytes]], data: st.DataObject) -> None:
    """Any of the writes may never have reached the disk, or only a part of it."""
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    log = [(name, offset, raw if chance.random() < 0.8 else raw[:chance.randrange(len(raw))])
           for name, offset, raw in written if chance.random() < data.draw(st.sampled_from([0.5, 0.9, 0.98]))]
    with tempfile.TemporaryDirectory() as directory:
        replay(Path(directory), log)
        check(Path(directory))


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(["index", "blocks"]), cut=st.integers(0, 2**17),
       flips=st.lists(st.integers(0, 2**20), max_size=8), truncate=st.booleans())
def test_files_that_rot(written: list[tuple[str, int, bytes]], name: str, cut: int, flips: list[int],
                        truncate: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        replay(Path(directory), written)
        path = Path(directory) / name
        raw = bytearray(path.read_bytes())
        for bit in flips:
            raw[bit // 8 % len(raw)] ^= 1 << bit % 8
        path.write_bytes(raw[:cut] if truncate else raw)
        check(Path(directory))


def test_a_restart_finds_all_of_it_in_order(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    fill(slots, 5, 3)
    slots.close()
    assert list(check(tmp_path).values()) == [True] * 8
    slots = open_slots(tmp_path)
    assert [record.generation for _, record in slots.found.records] == list(range(1, 9))
    assert read_spec(tmp_path) == SPEC and read_spec(tmp_path / "other") is None
    block = make_chain("later", 1)[0]
    slots.write(20, block, memoryview(payload(block.key)))
    slots.close()
    slots = open_slots(tmp_path)
    assert slots.found.records[-1][1].generation == 9, "the count goes on over restarts"
    slots.close()


def test_what_lost_its_parent_goes_with_it_and_stays_away(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    fill(slots, 5, 3)
    slots.close()
    with (tmp_path / "index").open("r+b") as index:
        index.seek(2 * RECORD_BYTES + 30)
        index.write(b"!")
    slots = open_slots(tmp_path)
    assert (len(slots.found.records), slots.found.damaged, slots.found.orphans) == (5, 1, 2)
    slots.close()
    slots = open_slots(tmp_path)
    assert (len(slots.found.records), slots.found.damaged, slots.found.orphans) == (5, 0, 0)
    slots.close()


def test_a_smaller_bound_gives_disk_back(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    fill(slots, 5, 3)
    slots.close()
    assert len(check(tmp_path, max_slots=6)) == 6
    assert (tmp_path / "blocks").stat().st_size == 6 * stride_of(SPEC)
    assert len(check(tmp_path, max_slots=SLOTS)) == 6


def test_a_directory_has_one_user(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    with pytest.raises(SettingError, match="no other process uses") as caught:
        open_slots(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    slots.close()
    open_slots(tmp_path).close()


def test_a_place_that_is_no_directory_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="a writable directory"):
        open_slots(tmp_path / "file" / "x")
    for nowhere in ("/proc/kv", "/proc/self/kv/deep"):
        with pytest.raises(SettingError, match="a writable directory"):
            check_directory(nowhere)


def test_a_disk_that_fails_at_the_start_is_no_mistake_of_a_person(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    fill(slots, 2)
    slots.close()
    with pytest.raises(OSError, match="injected"):
        open_slots(tmp_path, files=FaultyFiles(read_errno=errno.EIO))
    open_slots(tmp_path).close()  # nobody holds the lock


def test_bounds_in_bytes_and_in_blocks() -> None:
    assert slots_for(SPEC, nbytes=10 * (4096 + 256) + 1, blocks=0) == 10
    assert slots_for(SPEC, nbytes=1 << 30, blocks=7) == 7
    assert slots_for(SPEC, nbytes=4096, blocks=0) == 0
