"""Silence, and whose fault it is: what a conductor makes of workers that stop or die, and of its own stall."""

from __future__ import annotations

from shared.machine import Asked, Reply, Woke
from shared.messages import WorkersQuery, WorkersReply
from tests.support.playbook import Playbook, after
from tests.unit.conductor.builders import chain, hello, load, stage, stored


def playing() -> Playbook:
    """A conductor that knows four blocks of ``p1``."""
    play = stage(hello("p1"))
    play.run([stored("p1", 1, chain("x", 4))])
    return play


def state(play: Playbook) -> tuple[str, int]:
    """(state, blocks indexed) of ``p1``."""
    play.take()
    play >> Asked(0, WorkersQuery())
    (reply,) = play.take()
    assert isinstance(reply, Reply) and isinstance(reply.message, WorkersReply)
    (row,) = reply.message.workers
    return row.state, row.indexed_blocks


def test_three_seconds_of_silence_drop_no_block() -> None:
    play = playing()
    assert state(play) == ("alive", 4)
    play >> after(3.0)
    assert state(play) == ("suspect", 4), "SIGSTOP of a worker: no new work, and everything kept"
    play >> load("p1")
    assert state(play) == ("alive", 4)


def test_death_drops_its_blocks_within_ten_seconds() -> None:
    play = playing()
    play >> after(10.0)
    assert state(play) == ("dead", 0)


def test_a_conductor_that_stalled_expires_nobody() -> None:
    play = playing()
    play.now += 15.0  # SIGSTOP, or a loop that lagged: it neither heard nor acted
    play >> Woke()
    assert state(play)[0] != "dead" and state(play)[1] == 4
    play >> after(1.0)
    play.take()
    play >> load("p1")
    assert state(play) == ("alive", 4)
