"""What every kind of node has: one life of one worker, and the GPUs of one that prefills and decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from load.sim.network import Port
from load.sim.profile import NodeProfile
from load.sim.request import Job
from shared.messages import Hello, Load, Progress, Role, Stages

if TYPE_CHECKING:
    from load.sim.decode import DecodeNode
    from load.sim.loop import Loop
    from load.sim.prefill import PrefillNode

STRETCH = 2.0
"""Beside prompts, a token takes so many times what it takes a lone request."""
CHUNK_COST = 1.2
"""Prompts computed in the small pieces that fit between two tokens take so much longer: the published GPU time of
prefills in chunks of 512 tokens over that of whole ones (Mooncake, FAST'25, figure 8, conversation: 2.00 s over 1.65 s,
which it gives as 1.90 and 1.56 times Mooncake's own 1.05 s)."""
LEAST_SHARE = 0.1
"""However long the steps, prompts get this share of the GPUs."""
_SAME = 0.02
"""Shares this close to each other are not told apart."""


class Life:
    """The part that every kind of node has. ``delay_s`` is how long its messages take; ``role`` is the home role
    unless given."""

    __slots__ = ("delay_s", "hello", "port", "role")

    def __init__(self, hello: Hello, port: Port, *, delay_s: float, role: Role | None = None) -> None:
        self.hello, self.port, self.delay_s = hello, port, delay_s
        self.role: Role = role or hello.role

    def load(self, **fields: Any) -> Load:
        """A heartbeat with these fields."""
        hello = self.hello
        return Load(worker=hello.worker, incarnation=hello.incarnation, role=self.role, **fields)

    def progress(self, job: Job, stage: Any, stages: Stages | None = None, **fields: Any) -> Progress:
        """``stage`` of ``job`` is over here."""
        return Progress(request=job.request, attempt=job.attempt, worker=self.hello.worker, stage=stage,
                        num_tokens=job.num_tokens, hit_tokens=job.hit_tokens, stages=stages, **fields)


class SharedGpus:
    """Of a node that prefills and decodes: while it does both, a piece of a prompt and a decode step take turns.

    The piece is as long as leaves a token of every answer in :data:`STRETCH` times a lone request's step, so each side
    is slowed by the other's share, and prompts by :data:`CHUNK_COST` besides.
    """

    def __init__(self, loop: Loop, profile: NodeProfile) -> None:
        self._loop, self._profile = loop, profile
        self._prefill: PrefillNode | None = None
        self._decode: DecodeNode | None = None
        self._pace = 1.0
        #: what the two sides were set to: the pace, and how much longer each takes because of the other
        self._set = (1.0, 1.0, 1.0)
        self._is_due = False

    def join(self, prefill: PrefillNode, decode: DecodeNode) -> None:
        """These two share them."""
        self._prefill, self._decode = prefill, decode

    def set_pace(self, pace: float) -> None:
        """From now on everything takes ``pace`` times as long as the profile says."""
        self._pace = pace
        self._look()

    def changed(self) -> None:
        """A side began or ended something."""
        if not self._is_due:
            self._is_due = True
            self._loop.at(self._loop.now, self._look)

    def _look(self) -> None:
        self._is_due = False
        prefill, decode = self._prefill, self._decode
        assert prefill is not None and decode is not None
        if prefill.is_dead or decode.is_dead:
            return
        shares = 1.0, 1.0
        if prefill.is_busy and decode.batch:
            profile = self._profile
            step_s = (profile.decode_fixed_s + profile.decode_per_request_s * decode.batch
                      + profile.decode_per_context_token_s * decode.context_tokens)
            turn_s = STRETCH * (profile.decode_fixed_s + profile.decode_per_request_s)
            turn_s = max(turn_s, step_s / (1.0 - LEAST_SHARE))
            shares = CHUNK_COST * turn_s / (turn_s - step_s), turn_s / step_s
        if self._is_new(shares):
            self._set = self._pace, *shares
            prefill.set_pace(self._pace, shares[0])
            decode.set_pace(self._pace, shares[1])

    def _is_new(self, shares: tuple[float, float]) -> bool:
        pace, *before = self._set
        if pace != self._pace or (1.0 in shares) != (1.0 in before):
            return True
        return any(abs(share / old - 1.0) > _SAME for share, old in zip(shares, before, strict=True))
