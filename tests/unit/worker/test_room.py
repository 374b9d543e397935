"""Elastic workers that share requests among themselves: whoever was taken ends, whatever else was taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shared.errors import Bug
from shared.ids import OperationId
from shared.worker.room import Room

TOTAL = 8


@dataclass(eq=False)
class Request:
    name: OperationId
    prompt: int
    answer: int
    """Blocks of the prompt, and of prompt and answer."""
    lost: int = 0
    """Slots that its prompt loses to a writer while owners push."""
    held: int = 0
    """Blocks it holds where it decodes."""


@dataclass(eq=False)
class Node:
    """A worker that keeps the room's promises and does nothing by itself."""

    room: Room = field(default_factory=lambda: Room(TOTAL))
    free: int = TOTAL
    #: prompts without slots, and with
    queue: list[Request] = field(default_factory=list)
    computing: list[Request] = field(default_factory=list)
    #: prompts whose owners push; prompts that have lost slots meanwhile; how many each writer keeps
    bringing: list[Request] = field(default_factory=list)
    short: list[Request] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    #: answers whose prompts are computed elsewhere, that run, that have lost their slots
    reserved: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    evicted: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room.answers_wait = lambda: bool(self.evicted)

    def reserve(self, request: Request) -> bool:
        if self.room.refuses_answer(request.prompt) or request.prompt > self.free:
            return False
        self.room.reserved(request.name, request.prompt)
        self.free -= request.prompt
        request.held = request.prompt
        self.reserved.append(request)
        return True

    def forget(self, request: Request) -> None:
        self.reserved.remove(request)
        self.room.started(request.name)
        self.free += request.held

    def take(self, request: Request) -> bool:
        if self.room.refuses_prompt(request.prompt):
            return False
        self.room.prompt_taken(request.name, request.prompt)
        self.queue.append(request)
        return True

    def step(self, others: list[Node]) -> bool:
        """One thing that this worker can do without anybody's leave; false when there is none."""
        if self.queue and self.queue[0].prompt > self.free:
            self.room.prompt_waits(self.queue[0].name)
        elif self.queue:
            request = self.queue.pop(0)
            self.free -= request.prompt
            self.room.prompt_fits(request.name)
            self.bringing.append(request)
            if request.lost:
                self.stuck.append(request.lost)
            return True
        for request in [request for request in self.short if request.lost <= self.free]:
            self.short.remove(request)
            self._serve(request, request.lost)
            return True
        if self.stuck:
            self.free += self.stuck.pop()
            return True
        if self.bringing:
            request = self.bringing.pop(0)
            if request.lost > self.free:
                self.room.prompt_waits(request.name)
                self.short.append(request)
            else:
                self._serve(request, request.lost)
            return True
        if self.computing:
            request = self.computing.pop(0)
            self.free += request.prompt
            decode = next(node for node in others if request in node.reserved)
            decode.reserved.remove(request)
            decode.room.started(request.name)
            decode.running.append(request)
            return True
        if self.evicted:
            request = self.evicted[0]
            need = min(request.held + 1, request.answer)
            if need + len(self.running) <= self.free:  # or it would be evicted again at once
                self.evicted.remove(request)
                request.held = need
                self.free -= need
                self.running.append(request)
                return True
        if self.running:
            request = self.running[0]
            if request.held == request.answer:
                self.running.remove(request)
                self.free += request.held
            elif self.free:
                self.free -= 1
                request.held += 1
            else:
                victim = self.running.pop()
                self.free += victim.held
                self.evicted.insert(0, victim)
            return True
        return False

    def _serve(self, request: Request, missing: int) -> None:
        self.free -= missing
        self.room.prompt_served(request.name)
        self.computing.append(request)

    @property
    def is_idle(self) -> bool:
        return self.free == TOTAL and not (self.queue or self.short or self.reserved or self.evicted)


ASKS = st.lists(st.tuples(
    st.integers(0, 2), st.integers(1, 2), st.integers(1, TOTAL), st.integers(0, TOTAL), st.integers(0, TOTAL),
    st.integers(0, 3), st.integers(0, 4)), max_size=40)


@given(ASKS)
def test_whoever_was_taken_ends(asks: list[tuple[int, int, int, int, int, int, int]]) -> None:
    """Requests are reserved, and their prompts taken when others may have come between; prompts lose slots."""
    nodes = [Node() for _ in range(3)]
    under_way: list[tuple[int, Request, Node, Node]] = []
    last = [(0, 1, TOTAL + 1, 0, 0, 0, 0)] * 4
    for number, (home, apart, prompt, more, lost, later, steps) in enumerate([*asks, *last]):
        prefill, decode = nodes[home], nodes[(home + apart) % 3]
        request = Request(OperationId(str(number)), prompt, min(prompt + more, TOTAL), min(lost, prompt))
        if decode.reserve(request):
            under_way.append((number + later, request, prefill, decode))
        for due in [entry for entry in under_way if entry[0] <= number]:
            under_way.remove(due)
            if not due[2].take(due[1]):
                due[3].forget(due[1])
        for step in range(steps):
            nodes[(number + step) % 3].step(nodes)
    for _ in range(2_000):
        if not any([node.step(nodes) for node in nodes]):
            break
    assert all(node.is_idle for node in nodes)
    assert all(node.room.reserved_blocks == 0 and not node.room.refuses_answer() for node in nodes)


def test_what_a_prompt_may_lose_is_not_promised_to_an_answer() -> None:
    """The slots come back before it misses them."""
    node = Node()
    assert node.take(Request(OperationId("prompt"), 6, 6, lost=3)) and node.step([])
    assert node.step([]) and node.free == 5 and not node.stuck
    assert not node.reserve(Request(OperationId("large"), 3, 3)) and node.reserve(Request(OperationId("small"), 2, 2))
    assert node.step([]) and not node.short and node.free == 0


def test_a_worker_of_one_kind_may_promise_more_than_it_has() -> None:
    prefill, decode = Room(TOTAL), Room(TOTAL)
    for number in range(20):
        assert not prefill.refuses_prompt(TOTAL)
        prefill.prompt_taken(OperationId(str(number)), TOTAL)
        assert not decode.refuses_answer(TOTAL)
        decode.reserved(OperationId(str(number)), TOTAL)


def test_a_refusal_says_the_numbers() -> None:
    room = Room(TOTAL)
    assert room.refuses_prompt(9) == "it needs 9 of 8 blocks"
    room.reserved(OperationId("answer"), 3)
    assert room.refuses_prompt(6) == "it needs 6 of 8 blocks, 3 are reserved for answers"
    assert room.refuses_prompt(5) == ""
    room.prompt_taken(OperationId("prompt"), 4)
    assert (room.refuses_answer(1), room.refuses_answer(2)) == ("", "a prompt was taken that needs 4 of 8 blocks")
    room.answers_wait = lambda: True
    assert room.refuses_prompt(5) == room.refuses_answer() == "an answer waits for memory"
    room.prompt_waits(OperationId("prompt"))
    assert room.refuses_answer() == "1 prompts wait for memory"
    room.answers_wait = lambda: False
    room.prompt_fits(OperationId("prompt"))
    assert (room.refuses_answer(1), room.refuses_answer(2)) == ("", "a prompt was taken that needs 4 of 8 blocks")
    room.prompt_served(OperationId("prompt"))
    assert room.refuses_answer(5) == ""
    with pytest.raises(Bug):
        room.reserved(OperationId("answer"), 3)
