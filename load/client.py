"""A streaming client of ``/v1/completions`` and ``/v1/chat/completions`` that notes when every chunk came.

It never retries: an open-loop replay wants to know what the server said the first time. Every way a request
can end becomes a value of :class:`Answer`; only cancellation passes through.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from shared.errors import UserError

Api = Literal["completions", "chat"]
Prompt = str | Sequence[int]

_HEADER_PREFIX = "x-moonbus-"
_MAX_ERROR_BYTES = 64 * 1024


class GatewayError(UserError):
    """The gateway cannot be used; says what to do."""


@dataclass
class Answer:
    """What came back for one request. Times are readings of the clock the client was given."""

    sent_at: float
    finished_at: float = 0.0
    #: one reading for each chunk that carried text, in order
    chunk_at: list[float] = field(default_factory=list)
    #: when the finish reason came, whether or not with text
    finish_at: float | None = None
    finish: str = ""
    ended: bool = False
    """The stream came to its ``[DONE]``."""
    status: int = 0
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Response headers beginning with ``x-moonbus-``, without that."""

    @property
    def ok(self) -> bool:
        """It finished and said why."""
        return self.ended and bool(self.finish) and not self.code

    @property
    def first_at(self) -> float | None:
        """The first chunk with text; of an answer without any text, the chunk that ended it."""
        return self.chunk_at[0] if self.chunk_at else self.finish_at


class Model(msgspec.Struct, frozen=True):
    """One entry of ``/v1/models``; only the id is sure to be there."""

    id: str
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens."""
    vocab_size: int | None = None
    """Token ids go from 0 to one below this."""


class _Models(msgspec.Struct):
    data: list[Model]


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text) or bool(self.delta and self.delta.content)


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_event_decoder = msgspec.json.Decoder(_Event)


class GatewayClient:
    """Talks to one gateway; make it with :func:`connect`."""

    def __init__(self, http: httpx.AsyncClient, clock: Callable[[], float]) -> None:
        self._http = http
        self._clock = clock

    async def models(self) -> list[Model]:
        """The models served now; raises :class:`GatewayError` when that cannot be learned."""
        url = self._http.base_url
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
            response.raise_for_status()
            return msgspec.json.decode(response.content, type=_Models).data
        except httpx.HTTPStatusError as error:
            raise GatewayError(f"{url} answered /v1/models with {error.response.status_code}; "
                               "is that a moonbus gateway?") from error
        except httpx.HTTPError as error:
            raise GatewayError(f"no gateway answers at {url} ({_reason(error)}); start one with `moonbus up` "
                               "or give its address with --url") from error
        except msgspec.DecodeError as error:
            raise GatewayError(f"{url} answered /v1/models with something else ({error}); "
                               "is that a moonbus gateway?") from error

    async def stream(self, api: Api, *, model: str, prompt: Prompt, max_tokens: int, exact: bool = True,
                     seed: int = 0, into: Answer | None = None) -> Answer:
        """Sends one request and reads its stream to the end.

        With ``exact`` the server is asked to go on to ``max_tokens`` whatever the model says
        (``ignore_eos``). The answer is filled while it comes, so a caller that gave ``into`` has what there
        was when it cancels.
        """
        answer = Answer(sent_at=self._clock()) if into is None else into
        body = _body(api, model=model, prompt=prompt, max_tokens=max_tokens, exact=exact, seed=seed)
        path = "/v1/completions" if api == "completions" else "/v1/chat/completions"
        try:
            async with self._http.stream("POST", path, content=body,
                                         headers={"content-type": "application/json"}) as response:
                answer.status = response.status_code
                answer.headers = {name.removeprefix(_HEADER_PREFIX): value for name, value in response.headers.items()
                                  if name.startswith(_HEADER_PREFIX)}
                if response.status_code == 200:
                    await self._read_events(response, answer)
                else:
                    await _read_refusal(response, answer)
        except httpx.TimeoutException as error:
            answer.code, answer.message = "timeout", _reason(error)
        except httpx.ConnectError as error:
            answer.code, answer.message = "connect", _reason(error)
        except httpx.HTTPError as error:
            answer.code, answer.message = "broken_stream", _reason(error)
        answer.finished_at = self._clock()
        return answer

    async def _read_events(self, response: httpx.Response, answer: Answer) -> None:
        """Reads to ``[DONE]`` or the first sign that there will be none; events of one read get one time."""
        rest = b""
        async for part in response.aiter_bytes():
            now = self._clock()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and _take(line[5:].strip(), answer, now):
                    return
        answer.code, answer.message = "truncated", "the stream ended without [DONE]"


def _take(data: bytes, answer: Answer, now: float) -> bool:
    """Notes what one event says; whether it was the last."""
    if data == b"[DONE]":
        answer.ended = True
        return True
    try:
        event = _event_decoder.decode(data)
    except msgspec.DecodeError as error:
        answer.code, answer.message = "bad_event", f"{error} in {data[:200].decode(errors='replace')}"
        return True
    if event.error is not None:
        answer.code = str(event.error.code or event.error.type or "error")
        answer.message = event.error.message
        return True
    if event.usage is not None:
        answer.prompt_tokens = event.usage.prompt_tokens
        answer.completion_tokens = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details
        answer.cached_tokens = details.cached_tokens if details else None
    for choice in event.choices:
        if choice.has_text:
            answer.chunk_at.append(now)
        if choice.finish_reason:
            answer.finish, answer.finish_at = choice.finish_reason, now
    return False


@asynccontextmanager
async def connect(url: str, *, clock: Callable[[], float], timeout_s: float = 600.0,
                  headers: Mapping[str, str] | None = None) -> AsyncIterator[GatewayClient]:
    """A client of the gateway at ``url``; ``timeout_s`` is the longest silence, ``headers`` go with every
    request.

    Connections are not limited here, so that no request waits for another's: the replay bounds what is in
    flight. Proxies named in the environment are not used.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False,
                                 headers=headers) as http:
        yield GatewayClient(http, clock)


def is_loopback(url: str) -> bool:
    """Whether ``url`` names this machine's loopback: by address, or as ``localhost``."""
    host = httpx.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _body(api: Api, *, model: str, prompt: Prompt, max_tokens: int, exact: bool, seed: int) -> bytes:
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "seed": seed, "stream": True,
                            "stream_options": {"include_usage": True}, "ignore_eos": exact}
    if api == "completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    return msgspec.json.encode(body)


async def _read_refusal(response: httpx.Response, answer: Answer) -> None:
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MAX_ERROR_BYTES:
            break
    exact_ms = _number(response.headers.get("retry-after-ms"))
    answer.retry_after_s = _number(response.headers.get("retry-after")) if exact_ms is None else exact_ms / 1e3
    answer.code = f"http_{response.status_code}"
    answer.message = content[:200].decode(errors="replace")
    try:
        error = msgspec.json.decode(content, type=_Event).error
    except msgspec.DecodeError:
        return  # not an OpenAI error body: the status and the raw text say what there is to say
    if error is not None:
        answer.code = str(error.code or error.type or answer.code)
        answer.message = error.message


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # Retry-After may also be a date, which says nothing to a replay


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
