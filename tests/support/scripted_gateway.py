"""A gateway made of a script: real HTTP and SSE over a real socket, with the failures a test wants.

It counts prefix hits over what it has answered, in blocks of ``BLOCK_TOKENS``, so its ``cached_tokens`` are
true.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

BLOCK_TOKENS = 16

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class Script:
    """How one request is answered."""

    status: int = 200
    body: bytes = b""
    """With another status than 200."""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[str] | None = None
    """Text of each chunk; ``max_tokens`` chunks unless given."""
    hold: asyncio.Event | None = None
    """The stream waits for it after the first chunk."""
    hold_before: asyncio.Event | None = None
    """The answer waits for it before its headers."""
    raw_after_chunks: bytes = b""
    """Sent instead of the finish chunk, usage and ``[DONE]``."""
    break_off: bool = False
    """Close the connection after the chunks."""


def rejection(status: int, code: str, *, retry_after: str = "2") -> Script:
    """An OpenAI error body with ``Retry-After``."""
    error = {"error": {"message": f"not now: {code}", "type": "overloaded", "code": code}}
    return Script(status=status, body=json.dumps(error).encode(), headers={"retry-after": retry_after})


@dataclass
class ScriptedGateway:
    """An ASGI application; ``script`` answers the n-th request (from 0)."""

    script: Callable[[int, dict[str, Any]], Script] = lambda index, body: Script()
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "scripted", "max_model_len": 4096, "vocab_size": 32000}])
    #: bodies of the requests, in order of arrival
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    async def wait_arrived(self, count: int) -> None:
        """Until ``count`` requests have come."""
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected scope {scope['type']}")
        if scope["path"] == "/v1/models":
            await _plain(send, 200, json.dumps({"object": "list", "data": self.models}).encode(), {})
            return
        body = json.loads(await _read(receive))
        async with self.arrived:
            index = len(self.requests)
            self.requests.append(body)
            self.arrived.notify_all()
        script = self.script(index, body)
        if script.hold_before is not None:
            await script.hold_before.wait()
        if script.status != 200:
            await _plain(send, script.status, script.body, script.headers)
            return
        await self._stream(scope["path"].endswith("chat/completions"), body, script, send)

    async def _stream(self, chat: bool, body: dict[str, Any], script: Script, send: Send) -> None:
        prompt_tokens, cached_tokens = self._count(chat, body)
        chunks = script.chunks if script.chunks is not None else [" word"] * body["max_tokens"]
        headers = {"x-moonbus-predicted-hit-tokens": str(cached_tokens), **script.headers}
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-type", b"text/event-stream"),
                                *((name.encode(), value.encode()) for name, value in headers.items())]})

        async def event(data: dict[str, Any] | str) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        if chat:
            opening = {"role": "assistant", "content": ""}
            await event({"choices": [{"index": 0, "delta": opening, "finish_reason": None}]})
        for number, chunk in enumerate(chunks):
            content = {"delta": {"content": chunk}} if chat else {"text": chunk}
            await event({"choices": [{"index": 0, **content, "finish_reason": None}]})
            if number == 0 and script.hold is not None:
                await script.hold.wait()
        if script.break_off:
            raise ConnectionAbortedError("the script breaks the stream off")
        if script.raw_after_chunks:
            await send({"type": "http.response.body", "body": script.raw_after_chunks, "more_body": False})
            return
        ending = {"delta": {}} if chat else {"text": ""}
        await event({"choices": [{"index": 0, **ending, "finish_reason": "length"}]})
        await event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(chunks),
                                              "prompt_tokens_details": {"cached_tokens": cached_tokens}}})
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _count(self, chat: bool, body: dict[str, Any]) -> tuple[int, int]:
        content = body["messages"][0]["content"] if chat else body["prompt"]
        tokens = content.split() if isinstance(content, str) else content
        hits = 0
        for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):  # the last token is always computed
            if tuple(tokens[:end]) not in self._seen:
                break
            hits += 1
        self._seen.update(tuple(tokens[:end]) for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS))
        return len(tokens), hits * BLOCK_TOKENS


@asynccontextmanager
async def serving(gateway: ScriptedGateway) -> AsyncIterator[ScriptedGateway]:
    """Serves ``gateway`` on a free loopback port, inside the test's loop."""
    config = uvicorn.Config(gateway, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none",
                            timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    gateway.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    task = asyncio.create_task(server.serve(sockets=[sock]), name="scripted-gateway")
    try:
        yield gateway
    finally:
        server.should_exit = True
        await task
        sock.close()


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _plain(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    await send({"type": "http.response.start", "status": status,
                "headers": [(b"content-type", b"application/json"),
                            *((name.encode(), value.encode()) for name, value in headers.items())]})
    await send({"type": "http.response.body", "body": body})
