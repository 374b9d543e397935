"""``moonbus explain`` against a real catalog, over a real bus."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
import pytest_asyncio

from services.store_manager.queries import Queries
from shared.bus.nats import NatsBus
from shared.bus.streams import CATALOG_CONSUMER, STREAMS
from shared.catalog.migrate import upgrade_database
from shared.catalog.repository import Catalog
from shared.catalog.session import Database, connect
from shared.clock import SystemClock
from shared.ids import ConductorId, GatewayId, Incarnation, RequestId, SpecDigest, WorkerId
from shared.messages import Candidate, Decision, Placement, Rejection, RequestDone, RequestsQuery
from tests.support import command

Run = Callable[..., Awaitable[tuple[int, str, str]]]

WAY = Candidate(prefill=WorkerId("prefill-1"), queue_s=0.1, transfer_s=0.0, prefill_s=0.4, own_blocks=2,
                fetched_blocks=0)
PLACED = Placement(
    request=RequestId("req-placed"), attempt=1, conductor=ConductorId("c"), prefill=WorkerId("prefill-1"),
    prefill_incarnation=Incarnation("i"), decode=WorkerId("decode-1"), decode_incarnation=Incarnation("i"),
    own_blocks=2, sources=[], hit_tokens=128, predicted_queue_s=0.1, predicted_transfer_s=0.0,
    predicted_prefill_s=0.4, predicted_tbt_s=0.02, candidates=[WAY])
LOST = msgspec.structs.replace(PLACED, attempt=0, prefill=WorkerId("prefill-2"), candidates=[])
NO = Rejection(request=RequestId("req-turned-away"), code="capacity", retry_after_s=10.0, candidates=[WAY],
               message="the shortest prefill queue is 40.0 s long, the bound is 30.0 s")


def done(request: str, *decisions: Decision, **fields: object) -> RequestDone:
    values = {"request": RequestId(request), "gateway": GatewayId("g"), "model": "toy", "spec": SpecDigest("s"),
              "tenant": "acme", "received_at_s": time.time(), "outcome": "ok", "prompt_tokens": 200, "ttft_s": 0.6,
              "attempts": max(1, len(decisions)), "decisions": list(decisions), **fields}
    return RequestDone(**values)  # type: ignore[arg-type]


EVENTS = (
    done("req-placed", Decision(attempt=0, at_s=0.01, answer=LOST, code="worker_lost", message="prefill-2 was lost"),
         Decision(attempt=1, at_s=0.05, answer=PLACED)),
    done("req-turned-away", Decision(attempt=0, at_s=0.01, answer=NO), outcome="rejected", code="capacity",
         ttft_s=None),
    done("req-of-old"),
    done("req-called", Decision(attempt=0, at_s=0.05, answer=PLACED), client_id="chatcmpl-checkout/7"),
    done("req-twice-1", client_id="retried"), done("req-twice-2", client_id="retried"),
)


@pytest.fixture
def moonbus(nats_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``moonbus explain ARGUMENTS`` in a thread, eighty columns wide; exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "80")

    async def run(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(command.moonbus, "explain", *arguments, "--nats-url", nats_url)
        said = capsys.readouterr()
        return code, " ".join(said.out.split()), said.err

    return run


@pytest_asyncio.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    async with connect(postgres_url) as opened:
        yield opened


@pytest_asyncio.fixture
async def answering(nats_bus: NatsBus, database: Database) -> AsyncIterator[Catalog]:
    """A catalog of the newest schema, and somebody who answers for it."""
    await upgrade_database(database)
    await nats_bus.ensure(STREAMS, (CATALOG_CONSUMER,))
    catalog = Catalog(database)
    subscriptions = await Queries(nats_bus, catalog, CATALOG_CONSUMER, SystemClock(), timeout_s=10.0).serve()
    yield catalog
    for subscription in subscriptions:
        await subscription.close()


async def test_what_was_decided_comes_out_as_it_went_in(answering: Catalog, moonbus: Run) -> None:
    await answering.write(list(EVENTS), now_s=time.time())
    assert (await answering.request("req-placed")).request.decisions == EVENTS[0].decisions
    listed = (await answering.requests(RequestsQuery(), now_s=time.time())).requests
    assert len(listed) == len(EVENTS) and not any(row.decisions for row in listed), "a list carries none of it"
    for name, *expected in (
        ("req-placed", "ended early with worker_lost: prefill-2 was lost", "Attempt 2 of 2",
         "TTFT from here 500.0 ms 550.0 ms +10%"),
        ("chatcmpl-req-placed", "Attempt 2 of 2"), ("cmpl-req-pl", "Attempt 2 of 2"),
        ("req-turned", "rejected with code capacity, try again after 10.00 s", "the shortest prefill queue is 40.0 s"),
        ("req-of-old", "no decision is recorded"),
        ("chatcmpl-checkout/7", "req-called", "for its client chatcmpl-checkout/7", "Attempt 1 of 1"),
    ):
        code, out, err = await moonbus(name)
        assert (code, err) == (0, ""), name
        assert all(text in out for text in expected), (name, out)
    code, out, _ = await moonbus("req-turned-away", "--json")
    assert code == 0
    assert json.loads(out)["decisions"][0]["answer"] == json.loads(msgspec.json.encode(NO))


async def test_a_client_s_own_id_finds_what_only_it_is_called(answering: Catalog, moonbus: Run) -> None:
    """All of it, and after our own ids."""
    taken = done("req-other", client_id="req-of-old")
    await answering.write([*EVENTS, taken], now_s=time.time())
    assert (await answering.request("req-of-old")).request.request == "req-of-old"
    assert (await answering.request("chatcmpl-checkout/7")).request.client_id == "chatcmpl-checkout/7"
    await answering.write([done(f"req-{i}-by-two", client_id="req-pl") for i in range(2)], now_s=time.time())
    assert (await answering.request("req-pl")).request.request == "req-placed", "what else would it be"
    for name, said in (("retried", "what clients call several requests; the latest are req-twice-"),
                       ("chatcmpl-checkout", "no client's is chatcmpl-checkout")):
        code, out, err = await moonbus(name)
        assert (code, out, err.count("\n")) == (1, "", 1) and said in err


async def test_what_cannot_be_told_is_one_line(answering: Catalog, moonbus: Run) -> None:
    code, out, err = await moonbus("nobody")
    assert (code, out, err.count("\n")) == (1, "", 1) and "no request's id starts with nobody" in err


async def test_nobody_to_ask_and_a_catalog_that_is_away(nats_bus: NatsBus, moonbus: Run) -> None:
    code, _, err = await moonbus("req-1")
    assert (code, err.count("\n")) == (1, 1) and "no store-manager answers" in err
    async with connect("postgresql://nobody@127.0.0.1:1/db") as database:
        subscriptions = await Queries(
            nats_bus, Catalog(database), CATALOG_CONSUMER, SystemClock(), timeout_s=10.0).serve()
        code, _, err = await moonbus("req-1")
        for subscription in subscriptions:
            await subscription.close()
    assert (code, err.count("\n")) == (1, 1) and "cannot reach or use Postgres at 127.0.0.1:1" in err
