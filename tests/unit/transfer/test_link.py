"""One peer by one path, over lanes made of a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Grant
from shared.transfer.addresses import host_clock_s
from shared.transfer.frames import Span
from shared.transfer.lane import Outcome, Transfer, Trouble
from shared.transfer.link import Link, Sending
from shared.transfer.plan import Batch, Piece
from shared.transfer.types import PeerGone
from tests.support.eventually import eventually

GRANT = Grant(worker=WorkerId("w"), incarnation=Incarnation("i"), operation=OperationId("o"), ranges=[],
              expires_at_s=0.0, token=b"")
GONE = Trouble(PeerGone, "the peer closed the connection")


class ShortLane:
    """Connects when told to, and fails right behind that."""

    def __init__(self) -> None:
        self.failed: Trouble | None = None
        self.alive = True
        self._opened: list[Callable[[Trouble | None], None]] = []

    def start(self, opened: Callable[[Trouble | None], None]) -> None:
        self._opened.append(opened)

    def open(self, trouble: Trouble | None = None) -> None:
        self._opened.pop()(trouble)

    def submit(self, transfer: Transfer) -> None:
        assert self.failed is not None
        transfer.finish_all(self.failed)

    def give_up(self, transfer: Transfer) -> None:
        raise AssertionError("nothing is late here")

    def silence_s(self) -> float:
        return 0.0

    def fail(self, trouble: Trouble) -> None:
        self.failed, self.alive = trouble, False

    def forget(self, serial: int) -> None:
        pass

    def join(self) -> None:
        pass


BATCH = Batch((Piece((0,), "kv", 0, Span("kv", 0, 8)),), 8)


async def test_a_lane_that_fails_as_soon_as_it_is_open_is_an_outcome_for_all_who_waited_for_it() -> None:
    lanes: list[ShortLane] = []
    loop = asyncio.get_running_loop()

    def make() -> ShortLane:
        lanes.append(ShortLane())
        return lanes[-1]

    async def send() -> list[Outcome | None]:
        sending = Sending([BATCH], GRANT, host_clock_s() + 5.0, None, lambda batch: frozenset())
        await link.send(sending)
        return sending.outcomes

    def push() -> asyncio.Task[list[Outcome | None]]:
        return loop.create_task(send())

    link = Link(make, max_lanes=1, lane_bytes=1 << 20, max_inflight=1 << 20, silence_s=1.0)
    waiting = [push() for _ in range(3)]
    await eventually(lambda: lanes)
    lanes[0].open()
    lanes[0].fail(GONE)
    late = push()  # meets the dead lane and clears it away before the others wake
    for one in waiting:
        assert await one == [[GONE]]
    lanes[1].open(GONE)
    assert await late == [[GONE]]
