"""One life of one worker: what it is called, what it says of itself, its network card."""

from __future__ import annotations

from typing import Any

from load.sim.network import Port
from load.sim.request import Job
from shared.messages import Hello, Load, Progress, Stages


class Life:
    """The part that every kind of node has. ``delay_s`` is how long its messages take."""

    __slots__ = ("delay_s", "hello", "port")

    def __init__(self, hello: Hello, port: Port, *, delay_s: float) -> None:
        self.hello, self.port, self.delay_s = hello, port, delay_s

    def load(self, **fields: Any) -> Load:
        """A heartbeat with these fields."""
        hello = self.hello
        return Load(worker=hello.worker, incarnation=hello.incarnation, role=hello.role, **fields)

    def progress(self, job: Job, stage: Any, stages: Stages | None = None, **fields: Any) -> Progress:
        """``stage`` of ``job`` is over here."""
        return Progress(request=job.request, attempt=job.attempt, worker=self.hello.worker, stage=stage,
                        num_tokens=job.num_tokens, hit_tokens=job.hit_tokens, stages=stages, **fields)
