"""Tests of machines written as a script: ``>>`` an event in, ``<<`` an effect that must come out.

::

    (Playbook(conductor)
        >> hello("p1") << like(Request, message=like(Since, seq=0))
        >> after(0.5)
        >> asked(REQUEST) << like(Reply, message=like(Placement, prefill="p1")))

Effects come in order and none may be left over when the next event goes in, except of kinds that the playbook was
told to ignore. Time stands still but for ``after``, which wakes the machine whenever it wanted. The machine's
invariants are checked after every event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.machine import Machine, Woke


@dataclass(frozen=True)
class after:
    """Moves time forward by so many seconds, waking the machine as it asks for."""

    seconds: float


class like:
    """Equals a value of ``kind`` whose named fields are equal; a callable field is a predicate."""

    def __init__(self, kind: type, **fields: Any) -> None:
        self.kind, self.fields = kind, fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self.kind) and all(
            wanted(getattr(other, name)) if callable(wanted) else wanted == getattr(other, name)
            for name, wanted in self.fields.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"like({self.kind.__name__}{''.join(f', {name}={value!r}' for name, value in self.fields.items())})"


class Playbook:
    """Runs one machine through a script."""

    def __init__(self, machine: Machine[Any], *, now: float = 1000.0, ignore: tuple[type, ...] = ()) -> None:
        self.machine, self.now = machine, now
        self._ignore = ignore
        self._effects: list[Any] = []
        self.story: list[Any] = []
        """Every event and every effect so far."""

    def __rshift__(self, event: Any) -> Playbook:
        self.done()
        if isinstance(event, after):
            self._pass(event.seconds)
        else:
            self._feed(event)
        return self

    def __lshift__(self, expected: Any) -> Playbook:
        assert self._effects, self._tell(f"expected {expected!r}, nothing came")
        effect = self._effects.pop(0)
        assert expected == effect, self._tell(f"expected {expected!r}, came {effect!r}")
        return self

    def done(self) -> Playbook:
        """Nothing unexpected may be left."""
        assert not self._effects, self._tell(f"unexpected effects {self._effects!r}")
        return self

    def take(self) -> list[Any]:
        """The effects that wait, for a test that answers them itself."""
        effects, self._effects = self._effects, []
        return effects

    def run(self, events: Sequence[Any]) -> Playbook:
        """Feeds events whose effects do not matter."""
        for event in events:
            self.take()
            self >> event
        self.take()
        return self

    def _pass(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(100_000):
            wake = self.machine.next_wake()
            if wake is None or wake > end:
                self.now = end
                return
            self.now = max(self.now, wake)
            self._feed(Woke())
        raise AssertionError(self._tell(f"the machine wakes for ever at {self.now}"))

    def _feed(self, event: Any) -> None:
        self.story.append(event)
        effects = list(self.machine.handle(event, now=self.now))
        self.story.extend(effects)
        self._effects.extend(effect for effect in effects if not isinstance(effect, self._ignore))
        self.machine.check_invariants()

    def _tell(self, what: str) -> str:
        return "\n  ".join([what, "story:", *map(repr, self.story[-30:])])
