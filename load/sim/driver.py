"""Runs a machine under virtual time: what ``shared.driver`` does with asyncio and the bus, done with the loop.

Messages take ``delay_s``; effects are performed in order; ``Woke`` comes at the time the machine named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from load.sim.loop import Loop
from shared.machine import Answered, Asked, Effect, Machine, Publish, Reply, Request, Unanswered, Woke

Publisher = Callable[[Any, Any], None]
"""Takes address and message of a ``Publish``."""
Answerer = Callable[[Any, Any], Any]
"""Takes address and message of a ``Request``; ``None`` when nobody is there."""


class VirtualDriver:
    """Drives one machine; see the module. ``log`` gets every (seconds, event) that goes in, for replays."""

    def __init__(self, machine: Machine[Any], loop: Loop, *, delay_s: float, publish: Publisher, answer: Answerer,
                 log: Callable[[float, Any, Any], None] | None = None) -> None:
        self.machine = machine
        self._loop, self._delay_s, self._publish, self._answer, self._log = loop, delay_s, publish, answer, log
        self._tokens = itertools.count(1)
        #: {token of Asked: who waits for its Reply}
        self._askers: dict[int, Callable[[Any], None]] = {}
        self._wake_s: float | None = None

    def feed(self, event: Any) -> None:
        """The machine handles ``event`` now, and before it what it wanted to be woken for by now."""
        now = self._loop.now
        if self._wake_s is not None and self._wake_s <= now:
            self._woke(self._wake_s)
        effects = self.machine.handle(event, now=now)
        if self._log is not None:
            self._log(now, event, effects)
        for effect in effects:
            self._perform(effect)
        wake_s = self.machine.next_wake()
        if wake_s is not None and (self._wake_s is None or wake_s < self._wake_s):
            self._wake_s = wake_s
            self._loop.at(wake_s, self._woke, wake_s)

    def ask(self, message: Any, reply: Callable[[Any], None]) -> None:
        """Asks the machine; ``reply`` is called with its answer, one delay after it gave it."""
        token = next(self._tokens)
        self._askers[token] = reply
        self.feed(Asked(token, message))

    def _woke(self, wake_s: float) -> None:
        if wake_s == self._wake_s:
            self._wake_s = None
            self.feed(Woke())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reply(token=token, message=message):
                self._loop.after(self._delay_s, self._askers.pop(token), message)
            case Publish(address=address, message=message):
                self._publish(address, message)
            case Request(address=address, message=message, tag=tag):
                self._loop.after(self._delay_s, self._ask_away, address, message, tag)
            case _:
                pass  # what a service adds (Converged) concerns its shell only

    def _ask_away(self, address: Any, message: Any, tag: Any) -> None:
        answer = self._answer(address, message)
        event = Unanswered(tag, f"nobody answers on {address}", gone=True) if answer is None else Answered(tag, answer)
        self._loop.after(self._delay_s, self.feed, event)
