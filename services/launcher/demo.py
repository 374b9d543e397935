"""``moonbus demo``: a prefix computed on one prefill worker is reused on another, and the answers stay the same.

Three questions about one long document. The first finds nothing in the caches (cold). The second goes to the same
prefill worker, which has the document's KV. The third must not go there, so the document's KV moves from its owner to
the other worker. Then the second and third question are asked once more under salts of their own, which share nothing
with anything: their tokens, taken from the bus, must be the same.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from services.launcher.lineage import lineage_table
from services.launcher.settings import Settings
from services.launcher.spans import read_trace, span_tree
from services.launcher.stack import Stack, run
from services.launcher.status import StartDisplay
from services.launcher.supervise import StackFailed
from services.launcher.tables import compact_table
from shared.bus.bus import Bus, Delivery
from shared.bus.nats import NatsBus
from shared.bus.subjects import DONE, LINEAGE, TOKENS, WORKERS
from shared.errors import BusError
from shared.ids import fresh
from shared.kv import unpack_tokens
from shared.messages import (
    LineageQuery,
    LineageReply,
    RequestDone,
    Stages,
    TokenBatch,
    TokenChunk,
    WorkersQuery,
    WorkersReply,
)
from shared.models import ModelDir
from shared.units import format_bytes, format_seconds

MAX_TOKENS = 48
ANSWER_S = 600.0
"""Longest wait for an answer: a slow machine may compute the document for minutes."""
SETTLE_S = 20.0
"""Longest wait until index, catalog and trace file have what a request led to."""
_POLL_S = 0.05
_ROOM_TOKENS = 512
"""Left in the context for template, question and answer."""

QUESTIONS = (
    "Which ship is the largest?",
    "What does the Old Anna burn?",
    "What is the prize at the harbour festival?",
)


@dataclass(frozen=True)
class Answer:
    """One request as the client saw it."""

    request: str
    text: str
    ttft_s: float
    """From sending the request to the first event, which the gateway sends with the first token."""
    prompt_tokens: int
    cached_tokens: int
    prefill: str
    decode: str
    trace: str
    stages: Stages


@dataclass
class Tap:
    """Listens to what workers and gateway say about requests: the very token ids, and how each request ended."""

    #: {request: {index in the answer: token id}}
    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    #: {request: its end}
    done: dict[str, RequestDone] = field(default_factory=dict)

    async def on_tokens(self, delivery: Delivery) -> None:
        batch: TokenBatch = delivery.message
        for item in batch.items:
            if isinstance(item, TokenChunk):
                known = self.tokens.setdefault(item.request, {})
                known.update(enumerate(unpack_tokens(item.tokens).tolist(), item.first))

    async def on_done(self, delivery: Delivery) -> None:
        self.done[delivery.message.request] = delivery.message

    def answer(self, request: str) -> list[int]:
        """Token ids of an answer, in order."""
        return [token for _, token in sorted(self.tokens.get(request, {}).items())]


def demo(settings: Settings) -> int:
    """Runs the whole demonstration; 0 when everything held, 1 when an answer differed, 130 when interrupted."""
    console = Console()
    with StartDisplay(console) as display:

        async def show(stack: Stack) -> int:
            display.settled()
            console.print(f"[green]✓[/] The stack serves {stack.model.name} at {stack.gateway_url} "
                          f"after {format_seconds(display.elapsed_s)}.")
            try:
                return await _show(stack, console)
            finally:
                console.print("\nStopping the stack.")

        code = run(settings, show, watcher=display)
    if code is None:
        return 130
    console.print("[green]✓[/] Everything is stopped.")
    return code


async def _show(stack: Stack, console: Console) -> int:
    prefills = [view.name for view in stack.supervisor.views() if view.service == "prefill"]
    if len(prefills) < 2:
        raise StackFailed("the demo needs two prefill workers; leave MOONBUS_LAUNCHER_PREFILL at 2")
    limits = httpx.Timeout(ANSWER_S, connect=5.0)
    async with (
        NatsBus.connect(stack.nats_url, name="demo") as bus,
        _tapping(bus) as tap,
        httpx.AsyncClient(base_url=stack.gateway_url, timeout=limits) as http,
    ):
        client = _Client(http, stack.model, console)
        with console.status("Warming the workers up with a short prompt"):
            for name in prefills:
                await client.ask("Hello", document=False, exclude=_others(prefills, name), show=False)

        console.rule("1. Cold: nobody has the document", align="left")
        cold = await client.ask(QUESTIONS[0])
        await _until(lambda: _indexed(bus, cold.prefill, cold.prompt_tokens // stack.settings.block_tokens),
                     f"the conductor's index has what {cold.prefill} stored")
        console.rule(f"2. Warm: the same worker, {cold.prefill}", align="left")
        warm = await client.ask(QUESTIONS[1], exclude=_others(prefills, cold.prefill))
        console.rule(f"3. Warm through transfer: {cold.prefill} is excluded", align="left")
        moved = await client.ask(QUESTIONS[2], exclude=[cold.prefill])

        console.rule("4. The same answers without any cache", align="left")
        with console.status("Computing questions 2 and 3 again under salts of their own"):
            references = await asyncio.gather(*(
                client.ask(question, salt=fresh("demo"), show=False) for question in QUESTIONS[1:]))
        console.print(_table(cold, warm, moved))
        problems = await _compare(tap, cold, (warm, moved), references)
        for problem in problems:
            console.print(Text(f"✗ {problem}", style="red"))
        if not problems:
            console.print("[green]✓[/] The answers are token for token those of the uncached runs.")
        await _show_lineage(bus, tap, moved, stack, console)
        await _show_trace(stack, moved, console)
        return 1 if problems else 0


class _Client:
    """Asks the gateway as any OpenAI client would, and keeps the time."""

    def __init__(self, http: httpx.AsyncClient, model: ModelDir, console: Console) -> None:
        self._http, self._model, self._console = http, model.name, console
        self._document = _document(model)

    async def ask(self, question: str, *, document: bool = True, exclude: Sequence[str] = (), salt: str = "",
                  show: bool = True) -> Answer:
        """One streamed answer; the document, when there is one, comes first, so that questions share it as prefix."""
        content = f"{self._document}\n\nQuestion: {question}" if document else question
        body: dict[str, Any] = {
            "model": self._model, "messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }
        if salt:
            body["cache_salt"] = salt
        headers = {"x-moonbus-exclude-workers": ",".join(exclude)} if exclude else {}
        if show:
            self._console.print(Text(question, style="bold cyan"))
        began_s = time.monotonic()
        text, request, ttft_s = "", "", 0.0
        usage: dict[str, Any] = {}
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                reason = (await response.aread()).decode(errors="replace")
                raise StackFailed(f"the gateway answered {response.status_code}: {reason[:300]}")
            async for event in _events(response):
                if "error" in event:
                    raise StackFailed(f"the gateway gave up: {event['error']['message']}")
                request = event["id"].partition("-")[2]
                usage = event.get("usage") or usage
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                ttft_s = ttft_s or time.monotonic() - began_s
                text += piece
                if show:
                    self._console.out(piece, end="", highlight=False)
        if show:
            self._console.out("")
        said = response.headers
        return Answer(
            request=request, text=text, ttft_s=ttft_s,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            prefill=said["x-moonbus-prefill-worker"], decode=said["x-moonbus-decode-worker"],
            trace=said.get("x-moonbus-trace-id", ""),
            stages=msgspec.json.decode(said["x-moonbus-stages"], type=Stages),
        )


def _document(model: ModelDir) -> str:
    """The shipped document, cut where a model's context cannot hold all of it."""
    text = importlib.resources.files("services.launcher").joinpath("demo_document.txt").read_text(encoding="utf-8")
    encoded = Tokenizer.from_file(str(model.tokenizer_path)).encode(text, add_special_tokens=False)
    room = model.max_context - _ROOM_TOKENS
    return text if len(encoded.offsets) <= room else text[:encoded.offsets[max(0, room)][0]]


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def _tapping(bus: Bus) -> AsyncIterator[Tap]:
    tap = Tap()
    subscriptions = [await bus.subscribe(TOKENS.any(), tap.on_tokens), await bus.subscribe(DONE.at(), tap.on_done)]
    try:
        yield tap
    finally:
        for subscription in subscriptions:
            await subscription.close()


def _table(cold: Answer, warm: Answer, moved: Answer) -> Table:
    answers = (cold, warm, moved)
    table = compact_table("", "cold", "warm, same worker", "warm, by transfer", title="One document, three questions")

    def row(name: str, value: Callable[[Answer], str]) -> None:
        table.add_row(name, *(value(answer) for answer in answers))

    row("time to first token", lambda answer: f"[bold]{format_seconds(answer.ttft_s)}[/]")
    row("prompt tokens", lambda answer: str(answer.prompt_tokens))
    row("from cache", lambda answer: str(answer.cached_tokens))
    row("prefill worker", lambda answer: answer.prefill)
    row("prefix moved in", lambda answer: _moved(answer.stages.fetched_bytes, answer.stages.fetch_path))
    row("decode worker", lambda answer: answer.decode)
    row("KV pushed to it", lambda answer: _moved(answer.stages.pushed_bytes, answer.stages.push_path))
    return table


def _moved(nbytes: int, path: str) -> str:
    return f"{format_bytes(nbytes)} by {path}" if nbytes else "-"


async def _compare(tap: Tap, cold: Answer, cached: Sequence[Answer], references: Sequence[Answer]) -> list[str]:
    """What does not hold, one line each."""
    everybody = [cold, *cached, *references]
    await _until(lambda: _all_done(tap, everybody), "the gateway says how the requests ended")
    problems = [f"question {number} was answered from cache ({answer.cached_tokens} tokens) though it must not be"
                for number, answer in ((1, cold), (2, references[0]), (3, references[1])) if answer.cached_tokens]
    if not cached[0].cached_tokens:
        problems.append(f"question 2 found nothing in the cache of {cached[0].prefill}")
    if not cached[1].stages.fetched_bytes:
        problems.append(f"question 3 moved no KV to {cached[1].prefill}")
    for number, answer, reference in zip((2, 3), cached, references, strict=True):
        ours, theirs = tap.answer(answer.request), tap.answer(reference.request)
        if not ours or ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                      min(len(ours), len(theirs)))
            problems.append(f"question {number}: from cache and computed differ from token {at} on: "
                            f"{ours[at:at + 4]} and {theirs[at:at + 4]}")
    return problems


async def _show_lineage(bus: Bus, tap: Tap, moved: Answer, stack: Stack, console: Console) -> None:
    """The chain of the reused prefix, once the catalog has the copy that was moved."""
    key = tap.done[moved.request].last_key.hex()
    depth = moved.cached_tokens // stack.settings.block_tokens - 1
    found: list[LineageReply] = []

    async def archived() -> bool:
        reply = await _lineage(bus, key)
        if reply is None or depth < 0 or len(reply.blocks) <= depth:
            return False
        copies = {replica.worker for replica in reply.blocks[depth].replicas}
        if moved.prefill not in copies:
            return False
        prefix = await _lineage(bus, reply.blocks[depth].key.hex())
        found[:] = [prefix] if prefix is not None else []
        return bool(found)

    console.rule("5. The prefix in the catalog", align="left")
    await _until(archived, "the catalog has the prefix")
    console.print(lineage_table(found[0], merged=True))


async def _show_trace(stack: Stack, answer: Answer, console: Console) -> None:
    path = stack.settings.trace_path

    async def exported() -> bool:
        names = {span.name for span in read_trace(path, answer.trace)}
        return "request" in names and len(names) > 1

    await _until(exported, "the trace is exported")
    console.rule("6. The trace of question 3", align="left")
    console.print(span_tree(read_trace(path, answer.trace)))
    console.print(f"All traces: {path} (this one: {answer.trace})", soft_wrap=True)


async def _lineage(bus: Bus, key_hex: str) -> LineageReply | None:
    reply = await bus.request(LINEAGE.at(), LineageQuery(key_hex=key_hex), timeout_s=5.0)
    return reply if isinstance(reply, LineageReply) else None


async def _indexed(bus: Bus, worker: str, blocks: int) -> bool:
    reply: WorkersReply = await bus.request(WORKERS.at(), WorkersQuery(), timeout_s=5.0)
    return any(known.hello.worker == worker and known.indexed_blocks >= blocks for known in reply.workers)


async def _all_done(tap: Tap, answers: Sequence[Answer]) -> bool:
    return all(answer.request in tap.done for answer in answers)


async def _until(condition: Callable[[], Any], what: str) -> None:
    """Waits until ``condition`` holds; raises :class:`StackFailed` after ``SETTLE_S``."""
    deadline_s = time.monotonic() + SETTLE_S
    why = ""
    while True:
        try:
            if await condition():
                return
        except BusError as error:  # somebody is not listening yet: that is what is waited for
            why = f": {error}"
        if time.monotonic() > deadline_s:
            raise StackFailed(f"waited {SETTLE_S:g} s in vain until {what}{why}")
        await asyncio.sleep(_POLL_S)


def _others(names: Sequence[str], name: str) -> list[str]:
    return [other for other in names if other != name]
