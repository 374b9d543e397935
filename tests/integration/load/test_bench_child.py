"""Processes that answer, hang, break and leave others behind."""

from __future__ import annotations

import os
import sys
import time

import pytest

from load.bench.child import Child, ChildLost
from load.bench.processes import Footprint, cpu_seconds
from tests.support.eventually import eventually

ECHO = """
import sys
print('"ready"', flush=True)
for line in sys.stdin:
    print(line.strip(), flush=True)
"""
DEAF = "import sys, time; print('1', flush=True); time.sleep(600)"
BROKEN = "import sys; print('1', flush=True); sys.stdin.readline(); sys.exit('the disk is on fire')"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print(child.pid, flush=True)
sys.stdin.read()
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


async def test_questions_are_answered_in_turn() -> None:
    async with Child.start("echo", python(ECHO)) as child:
        assert child.greeting == "ready"
        for question in ({"n": 1}, [2], "x" * 200_000):
            assert await child.ask(question, timeout_s=10) == question
        held = Footprint.of(child.pid)
        assert held.threads == 1 and held.descriptors >= 3 and held.rss_bytes > 1 << 20
        assert 0 < cpu_seconds([child.pid]) < 30
    with pytest.raises(OSError):
        cpu_seconds([child.pid])


def test_cpu_time_is_that_of_the_process_clock() -> None:
    before_s = time.process_time()
    assert before_s <= cpu_seconds([os.getpid()]) <= time.process_time()


async def test_one_that_hangs_is_killed_at_the_deadline() -> None:
    async with Child.start("deaf", python(DEAF)) as child:
        with pytest.raises(ChildLost, match=r"deaf did not answer within 0\.1 s"):
            await child.ask(1, timeout_s=0.1)
        with pytest.raises(ChildLost, match="deaf ended"):
            await child.ask(1, timeout_s=10)


async def test_the_last_words_of_one_that_breaks_are_told() -> None:
    async with Child.start("broken", python(BROKEN)) as child:
        with pytest.raises(ChildLost, match="broken ended; its last words: the disk is on fire"):
            await child.ask(1, timeout_s=10)


async def test_one_that_cannot_start_or_greet_is_lost() -> None:
    for command in (["/nowhere/program"], python("pass")):
        with pytest.raises(ChildLost, match="absent"):
            async with Child.start("absent", command):
                pytest.fail("it has not started")


async def test_its_own_children_end_with_it() -> None:
    async with Child.start("parent", python(PARENT)) as child:
        grandchild = int(child.greeting)
        assert _runs(grandchild)
    await eventually(lambda: not _runs(grandchild))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
