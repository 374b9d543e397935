"""``moonbus kv`` against store-manager's answers from a real catalog, over a real bus."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from load.bench.catalog_feed import Feed
from services.store_manager.queries import Queries
from shared.bus.nats import NatsBus
from shared.bus.streams import CATALOG_CONSUMER, STREAMS
from shared.catalog.migrate import upgrade_database
from shared.catalog.repository import Catalog
from shared.catalog.session import connect
from shared.clock import SystemClock
from shared.messages import RequestDone, Stored
from tests.support import command

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def moonbus(nats_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``moonbus kv ARGUMENTS`` in a thread, eighty columns wide; exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "80")

    async def run(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(command.moonbus, "kv", *arguments, "--nats-url", nats_url)
        said = capsys.readouterr()
        if not {"--json", "--html"} & set(arguments):
            assert all(len(line) <= 80 for line in said.out.splitlines()), said.out
        return code, said.out, said.err

    return run


@pytest_asyncio.fixture
async def told(nats_bus: NatsBus, postgres_url: str) -> AsyncIterator[list[object]]:
    """A small history, and somebody who answers for it."""
    feed = Feed(seed=2, room=200)
    events: list[object] = list(feed.begin(at_s=time.time() - 60.0))
    for n in range(30):
        events.extend(feed.request(at_s=time.time() - 50.0 + n))
    await nats_bus.ensure(STREAMS, (CATALOG_CONSUMER,))
    async with connect(postgres_url) as database:
        await upgrade_database(database)
        catalog = Catalog(database)
        await catalog.write(events, now_s=time.time())  # type: ignore[arg-type]
        await catalog.maintain(now_s=time.time())
        subscriptions = await Queries(nats_bus, catalog, CATALOG_CONSUMER, SystemClock(), timeout_s=10.0).serve()
        yield events
        for subscription in subscriptions:
            await subscription.close()


async def test_every_question(told: list[object], moonbus: Run, tmp_path: Path) -> None:
    requests = [event for event in told if isinstance(event, RequestDone)]
    block = next(event for event in told if isinstance(event, Stored)).blocks[0]
    key, request = block.key.hex(), requests[-1].request
    page = tmp_path / "tree.html"
    for arguments, expected in (
        (("ls", "--limit", "3"), "3 of "),
        (("stats",), "of them not computed"),
        (("lineage", key[:16]), "Lineage of"),
        (("lineage", key[:16], "--down"), f"blocks continue {key[:12]}"),
        (("descendants", key[:16]), "hits"),
        (("hot",), "hot stretches"),
        (("evictions",), "capacity"),
        (("evictions", "--worker", "prefill-1", "--since", "1h"), "Evicted during the last 1h"),
        (("reuse", "--by", "day"), time.strftime("%Y-%m-%d", time.gmtime(requests[-1].received_at_s))),
        (("requests", "--limit", "2"), "The latest 2 requests"),
        (("request", request), "predicted"),
        (("storage",), "Held during the last 24h"),
    ):
        code, out, err = await moonbus(*arguments)
        assert (code, err) == (0, ""), arguments
        assert expected in out, (arguments, out)
    for arguments in (("hot",), ("lineage", key), ("lineage", key, "--down"), ("descendants", key)):
        code, alone, _ = await moonbus(*arguments, "--json")
        assert code == 0
        code, out, err = await moonbus(*arguments, "--json", "--html", str(page))
        assert (code, err, json.loads(out).keys()) == (0, f"wrote {page}\n", json.loads(alone).keys()), arguments
        code, out, err = await moonbus(*arguments, "--html", str(page))
        assert (code, out, err) == (0, "", f"wrote {page}\n"), arguments
        assert "<svg" in page.read_text()
        page.unlink()
    code, out, err = await moonbus("ls", "--worker", "nobody")
    assert code == 0 and err.count("\n") == 1 and "0 of 0 blocks" in out
    assert err.startswith("the catalog knows no worker nobody; those it knows: ") and "prefill-1" in err
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    code, out, err = await moonbus("hot", "--html", str(full))
    assert (code, out) == (1, "") and f"{full} cannot be written (No space left on device)" in err
    for arguments in (("hot",), ("request", request), ("evictions",), ("stats",), ("lineage", key, "--down")):
        code, out, _ = await moonbus(*arguments, "--json")
        assert code == 0 and json.loads(out)


async def test_what_cannot_be_answered_is_one_line(told: list[object], moonbus: Run) -> None:
    for arguments, expected in (
        (("lineage", "zz"), "is no block key"),
        (("lineage", "0", "--down"), "key"),
        (("request", "nobody"), "no request's id starts with nobody"),
        (("reuse", "--by", "moon"), "tenant or model or day"),
        (("evictions", "--since", "soon"), "a duration like 90s, 2h or 7d"),
    ):
        code, out, err = await moonbus(*arguments)
        assert (code, out) == (1, ""), arguments
        assert err.startswith("moonbus: ") and err.count("\n") == 1 and expected in err


async def test_nobody_answers(moonbus: Run, nats_bus: NatsBus) -> None:
    code, _, err = await moonbus("hot")
    assert (code, err.count("\n")) == (1, 1) and "no store-manager answers" in err


async def test_postgres_is_away(nats_bus: NatsBus, moonbus: Run) -> None:
    async with connect("postgresql://nobody@127.0.0.1:1/db") as database:
        subscriptions = await Queries(
            nats_bus, Catalog(database), CATALOG_CONSUMER, SystemClock(), timeout_s=10.0).serve()
        code, _, err = await moonbus("hot")
        for subscription in subscriptions:
            await subscription.close()
    assert (code, err.count("\n")) == (1, 1) and "cannot reach or use Postgres at 127.0.0.1:1" in err
