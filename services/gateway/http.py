"""The HTTP side: routes, who may call, and one :class:`Conversation` for each answer.

Response headers are held back until the first token or the failure is there: what goes wrong before it gets a real
status code. Once a stream has begun, a failure is an error event followed by ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.config.cors import CORSConfig
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.core import answers, openai
from services.gateway.core.priority import Priority, priorities
from services.gateway.core.problem import ApiError, Problem, invalid
from services.gateway.core.text import AnswerText
from services.gateway.prompt import Asked, Prompt, prepare
from services.gateway.roster import Served
from services.gateway.shell import INTERNAL, Exchange, Gateway, Piece
from shared.ids import RequestId, WorkerId, fresh
from shared.telemetry import metrics, tracing
from shared.version import product_version

_log = logging.getLogger(__name__)
_tracer = trace.get_tracer("moonbus.gateway")

_encode = msgspec.json.encode
_JSON = "application/json"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_WORKER = re.compile(r"[A-Za-z0-9_-]{1,128}")
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must not hold tokens back
}
_OUR_HEADERS = [f"x-moonbus-{name}" for name in (
    "request-id", "prefill-worker", "decode-worker", "cached-tokens", "ttft-ms", "stages", "predicted-hit-tokens",
    "predicted-ttft-ms", "trace-id")]
#: paths that answer even while the gateway drains, and that need no key
_ALWAYS = ("/health", "/ping", "/ready", "/metrics", "/version")
#: paths that may label a metric; all others are counted as "other"
_ROUTES = (*_ALWAYS, "/v1/chat/completions", "/v1/completions", "/v1/models", "/openapi.json")


class Api:
    """The ASGI application: Litestar's routes behind what concerns every request (id, count, drain, keys)."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._in_flight = 0
        settings = gateway.settings
        #: {sha256 of a key: the tenant it stands for}
        self._keys = {hashlib.sha256(key.encode()).digest(): "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]
                      for key in settings.api_keys}
        self._usual = Priority(
            head_start_s=0.0, ttft_slo_s=settings.ttft_slo_s or None, tbt_slo_s=settings.tbt_slo_s or None)
        self._priorities = priorities(settings.priorities, usual=self._usual)
        self._app = Litestar(
            route_handlers=self._routes(),
            cors_config=CORSConfig(
                allow_origins=list(settings.cors_origins), allow_headers=["*"],
                allow_methods=["GET", "POST", "OPTIONS"],
                expose_headers=["x-request-id", "retry-after", *_OUR_HEADERS]) if settings.cors_origins else None,
            exception_handlers={ApiError: _on_api_error, HTTPException: self._on_http_error, Exception: _on_bug},
            openapi_config=None,
            request_max_body_size=settings.max_body_bytes,
            logging_config=None,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            return  # the server speaks neither websockets nor lifespan to us
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        state = scope.setdefault("state", {})
        state["request"] = RequestId(fresh("req"))
        state["client_id"] = given if _REQUEST_ID.fullmatch(given) else ""
        path = scope["path"].rstrip("/") or "/"
        route = path if path in _ROUTES else "other"

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.GATEWAY_HTTP.labels(route=route, status=message["status"]).inc()
                name = state["client_id"] or state["request"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        if path in _ALWAYS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, counted_send)
            return
        problem = self._turn_away(headers, state)
        if problem is not None:
            extra = {"connection": "close"} if self._gateway.draining else {}
            if "*" in self._gateway.settings.cors_origins:
                extra["access-control-allow-origin"] = "*"  # or a browser would not show the page what is wrong
            await _send_problem(counted_send, problem, extra)
            return
        self._in_flight += 1
        metrics.GATEWAY_IN_FLIGHT.inc()
        try:
            await self._app(scope, receive, counted_send)
        finally:
            self._in_flight -= 1
            metrics.GATEWAY_IN_FLIGHT.dec()

    def _turn_away(self, headers: Mapping[bytes, bytes], state: dict[str, Any]) -> Problem | None:
        """Why a request is not even looked at; sets its tenant otherwise."""
        if self._gateway.draining:
            return Problem(status=503, code="shutting_down", message="this gateway is shutting down", retry_after_s=1.0)
        if self._in_flight >= self._gateway.settings.max_in_flight:
            return Problem(status=429, code="gateway_full", retry_after_s=1.0,
                           message=f"{self._in_flight} requests are in flight, as many as this gateway takes")
        name = headers.get(self._gateway.settings.tenant_header.lower().encode(), b"").decode("latin-1")
        if name and not _TENANT.fullmatch(name):
            return Problem(status=400, code="invalid_value", param=self._gateway.settings.tenant_header,
                           message=f"tenant {name[:64]!r} is not a name: use letters, digits and . _ : @ / -")
        if not self._keys:
            state["tenant"] = name or "default"
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        tenant = self._keys.get(hashlib.sha256(key.strip()).digest()) if scheme.lower() == b"bearer" else None
        if tenant is None:
            return Problem(status=401, code="invalid_api_key",
                           message="this gateway needs a key it knows, as Authorization: Bearer KEY")
        # a key's holder may divide its own tenant, never enter another's
        state["tenant"] = f"{tenant}/{name}" if name else tenant
        return None

    def _priority(self, headers: Mapping[str, str]) -> Priority:
        name = headers.get("x-moonbus-priority")
        if name is None:
            return self._usual
        known = self._priorities.get(name.strip().lower())
        if known is None:
            raise invalid(f"x-moonbus-priority is {name[:32]!r}; this gateway knows "
                          f"{', '.join(self._priorities) or 'none'}", "x-moonbus-priority")
        return known

    def _on_http_error(self, _: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
        limit = self._gateway.settings.max_body_bytes
        known = {
            404: ("not_found", "there is no such route; the API is under /v1"),
            405: ("method_not_allowed", "the route does not take this method"),
            413: ("body_too_large", f"the body is larger than {limit} bytes"),
        }
        code, message = known.get(error.status_code, ("bad_request", error.detail))
        if error.status_code >= 500:
            return _on_bug(_, error)
        allow = (error.headers or {}).get("allow", "") if error.headers else ""
        return _problem_response(Problem(status=error.status_code, code=code, message=message, allow=allow))

    # -- routes ------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Any]:
        gateway = self._gateway

        @post("/v1/chat/completions")
        async def chat(request: Request[Any, Any, Any]) -> ASGIApp:
            """An answer to a conversation."""
            return await self._converse(request, openai.ChatRequest)

        @post("/v1/completions")
        async def complete(request: Request[Any, Any, Any]) -> ASGIApp:
            """The continuation of a text."""
            return await self._converse(request, openai.CompletionRequest)

        @get("/v1/models")
        async def models() -> Response[bytes]:
            """What can be asked now."""
            listed = [_model(name, served) for name, served in sorted(gateway.roster.served().items())]
            return _json({"object": "list", "data": listed})

        @get("/v1/models/{name:path}")
        async def model(request: Request[Any, Any, Any]) -> Response[bytes]:
            """One model."""
            wanted = str(request.path_params["name"]).strip("/")  # hub ids have a slash inside
            return _json(_model(wanted, gateway.roster.find(wanted)))

        @get(["/health", "/ping"])
        async def health() -> Response[bytes]:
            """The process lives."""
            return _json({"status": "alive"})

        @get("/ready")
        async def ready() -> Response[bytes]:
            """Requests can be served now."""
            why = "shutting down" if gateway.draining else gateway.roster.why_not_ready()
            if why:
                return _json({"status": "not ready", "why": why}, 503)
            return _json({"status": "ready", "models": sorted(gateway.roster.served())})

        @get("/metrics")
        async def scrape() -> Response[bytes]:
            """Prometheus metrics of this process."""
            return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

        @get("/version")
        async def version() -> Response[bytes]:
            """What runs here."""
            return _json({"version": product_version(), "gateway": gateway.gateway_id})

        @get("/openapi.json")
        async def schema() -> Response[bytes]:
            """This API as an OpenAPI document."""
            return Response(self._schema, media_type=_JSON)

        return [chat, complete, models, model, health, ready, scrape, version, schema]

    @cached_property
    def _schema(self) -> bytes:
        kinds = {"/v1/chat/completions": openai.ChatRequest, "/v1/completions": openai.CompletionRequest}
        schemas, components = msgspec.json.schema_components(
            list(kinds.values()), ref_template="#/components/schemas/{name}")
        paths: dict[str, Any] = {path: {"post": {
            "requestBody": {"required": True, "content": {_JSON: {"schema": schema}}},
            "responses": {"200": {"description": "the answer: JSON, or server-sent events when stream is true"},
                          "default": {"description": "OpenAI's error body"}},
        }} for path, schema in zip(kinds, schemas, strict=True)}
        for path in ("/v1/models", *_ALWAYS):
            paths[path] = {"get": {"responses": {"200": {"description": "see the documentation"}}}}
        return _encode({"openapi": "3.1.0", "info": {"title": "moonbus", "version": product_version()},
                        "paths": paths, "components": {"schemas": components}})

    async def _converse(
        self, request: Request[Any, Any, Any], kind: type[openai.ChatRequest] | type[openai.CompletionRequest],
    ) -> ASGIApp:
        """Everything up to a job that can be placed; the rest happens when the returned app runs."""
        gateway, state = self._gateway, request.scope["state"]
        received_s, received_at_s = gateway.clock.monotonic(), gateway.clock.wall()
        root = _tracer.start_span(
            "request", context=tracing.extract(request.headers), kind=SpanKind.SERVER,
            attributes={"moonbus.request": state["request"], "http.route": request.scope["path"]})
        context = trace.set_span_in_context(root)
        try:
            raw = await request.body()
            body = openai.decode(raw, kind)
            wanted = openai.wanted(body)
            served = gateway.roster.find(body.model)
            priority = self._priority(request.headers)
            asked = Asked(
                request=state["request"], gateway=gateway.gateway_id, tenant=state["tenant"],
                exclude=_excluded(request.headers),
                ttft_slo_s=_milliseconds(request.headers, "x-moonbus-ttft-slo-ms", priority.ttft_slo_s),
                tbt_slo_s=_milliseconds(request.headers, "x-moonbus-tbt-slo-ms", priority.tbt_slo_s),
                head_start_s=priority.head_start_s)
            with _tracer.start_as_current_span("tokenize", context=context) as span:
                prompt = await prepare(
                    body, wanted, asked, served, threads=gateway.threads,
                    default_max_tokens=gateway.settings.default_max_tokens,
                    inline=len(raw) <= gateway.settings.inline_bytes)
                span.set_attribute("moonbus.tokens", prompt.job.num_tokens)
            metrics.GATEWAY_TOKENIZE_SECONDS.observe(gateway.clock.monotonic() - received_s)
            root.set_attributes({"moonbus.model": body.model, "moonbus.tenant": asked.tenant,
                                 "moonbus.prompt_tokens": prompt.job.num_tokens})
        except BaseException as error:
            root.set_status(Status(StatusCode.ERROR, str(error)))
            root.end()
            raise
        answer = answers.Answer(
            "chat" if kind is openai.ChatRequest else "completion", request=prompt.job.request, model=body.model,
            created=int(received_at_s), fingerprint=f"mb-{prompt.job.spec[:12]}", usage_chunk=wanted.include_usage)

        def start() -> Exchange:
            text = AnswerText(
                lambda: served.text.stream(skip_special=wanted.skip_special_tokens, before=prompt.before),
                stops=wanted.stops, min_tokens=wanted.min_tokens)
            return gateway.open(prompt, text, received_s=received_s, received_at_s=received_at_s, context=context,
                                client_id=state["client_id"])

        return Conversation(gateway, start, prompt, answer, wanted, root)


class Conversation:
    """One answer on its way to one client."""

    def __init__(self, gateway: Gateway, start: Callable[[], Exchange], prompt: Prompt, answer: answers.Answer,
                 wanted: openai.Wanted, root: trace.Span) -> None:
        self._gateway, self._start, self._prompt, self._answer = gateway, start, prompt, answer
        self._wanted, self._root = wanted, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._start()
        watching = asyncio.create_task(_watch(receive, exchange), name=f"watch {exchange.job.request}")
        try:
            if self._wanted.stream:
                await self._stream(exchange, send)
            else:
                await self._whole(exchange, send)
        finally:
            # reached with the request still running when the server cancels us or the client does not read
            exchange.abandon("client_gone", "the connection was closed")
            watching.cancel()
            await asyncio.wait({watching})
            self._close_span(exchange)

    async def _whole(self, exchange: Exchange, send: Send) -> None:
        while exchange.ended is None:
            await exchange.wait()
        if exchange.ended.problem is not None:
            await _send_problem(send, exchange.ended.problem, _headers(exchange))
            return
        text = "".join(piece.text for piece in exchange.take())
        body = self._answer.whole(text, exchange.finish, exchange.stop_reason, self._usage(exchange, exchange.tokens),
                                  self._ids(exchange))
        await _send(send, 200, {"content-type": _JSON, **_headers(exchange)}, body)

    async def _stream(self, exchange: Exchange, send: Send) -> None:
        await exchange.wait()
        if exchange.ended is not None and exchange.ended.problem is not None and not exchange.pieces:
            await _send_problem(send, exchange.ended.problem, _headers(exchange))
            return
        await send({"type": "http.response.start", "status": 200,
                    "headers": _raw({**_STREAM_HEADERS, **_headers(exchange)})})
        frames = [self._answer.opening(self._running(exchange, 0))]
        while True:
            ended = exchange.ended  # looked at before the pieces: what is ended gets no more of them
            frames += [self._frame(exchange, piece) for piece in exchange.take()]
            if ended is not None:
                frames += self._last_frames(exchange)
            try:
                async with asyncio.timeout(self._gateway.settings.send_timeout_s):
                    await send({"type": "http.response.body", "body": b"".join(frames), "more_body": ended is None})
            except TimeoutError:
                exchange.abandon("slow_client", "the client does not read")
                return
            if ended is not None:
                return
            heard = await exchange.wait(self._gateway.settings.keepalive_comment_s)
            frames = [] if heard else [answers.PING]

    def _frame(self, exchange: Exchange, piece: Piece) -> bytes:
        return self._answer.text(piece.text, self._running(exchange, piece.tokens)) if piece.text else b""

    def _last_frames(self, exchange: Exchange) -> list[bytes]:
        ended = exchange.ended
        if ended is not None and ended.problem is not None:
            return [answers.error_frame(ended.problem), answers.DONE]
        frames = [self._answer.closing(exchange.finish, exchange.stop_reason, self._running(exchange, exchange.tokens),
                                       self._ids(exchange))]
        if self._wanted.include_usage:
            frames.append(self._answer.totals(self._usage(exchange, exchange.tokens)))
        return [*frames, answers.DONE]

    def _usage(self, exchange: Exchange, tokens: int) -> answers.Usage:
        return answers.usage(exchange.job.num_tokens, tokens, exchange.cached_tokens)

    def _ids(self, exchange: Exchange) -> list[int] | None:
        return exchange.ids if self._wanted.return_token_ids else None

    def _running(self, exchange: Exchange, tokens: int) -> answers.Usage | None:
        return self._usage(exchange, tokens) if self._wanted.continuous_usage else None

    def _close_span(self, exchange: Exchange) -> None:
        ended, root = exchange.ended, self._root
        if ended is not None:
            root.set_attributes({
                "moonbus.outcome": ended.outcome, "moonbus.code": ended.code,
                "moonbus.completion_tokens": exchange.tokens, "moonbus.cached_tokens": exchange.cached_tokens,
                "moonbus.attempts": exchange.machine.attempt + 1})
            if ended.outcome == "failed":
                root.set_status(Status(StatusCode.ERROR, ended.problem.message if ended.problem else ended.code))
        root.end()


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Hears the client go; ends with the connection or when the answer is complete."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.abandon("client_gone", "the client closed the connection")
            return


def _headers(exchange: Exchange) -> dict[str, str]:
    """What we tell about a request, as far as it is known."""
    placement, stages = exchange.machine.placement, exchange.machine.stages
    headers = {"x-moonbus-request-id": exchange.job.request,
               "x-moonbus-cached-tokens": str(exchange.cached_tokens)}
    if exchange.trace_id:
        headers["x-moonbus-trace-id"] = exchange.trace_id
    if placement is not None:
        headers["x-moonbus-prefill-worker"] = placement.prefill
        headers["x-moonbus-decode-worker"] = placement.decode
        headers["x-moonbus-predicted-hit-tokens"] = str(placement.hit_tokens)
        headers["x-moonbus-predicted-ttft-ms"] = f"{placement.predicted_ttft_s * 1e3:.1f}"
    if exchange.ttft_s is not None:
        headers["x-moonbus-ttft-ms"] = f"{exchange.ttft_s * 1e3:.1f}"
    if stages is not None:
        headers["x-moonbus-stages"] = _encode(stages).decode()
    return headers


def _excluded(headers: Mapping[str, str]) -> tuple[WorkerId, ...]:
    names = [part.strip() for part in headers.get("x-moonbus-exclude-workers", "").split(",") if part.strip()]
    for name in names:
        if not _WORKER.fullmatch(name):
            raise invalid(f"x-moonbus-exclude-workers names {name[:64]!r}, which is no worker id",
                          "x-moonbus-exclude-workers")
    return tuple(WorkerId(name) for name in names)


def _milliseconds(headers: Mapping[str, str], name: str, default_s: float | None) -> float | None:
    """Seconds from a header in milliseconds."""
    text = headers.get(name)
    if text is None:
        return default_s
    try:
        value_s = float(text) / 1e3
    except ValueError:
        value_s = 0.0
    if not 0 < value_s < float("inf"):
        raise invalid(f"{name} is {text[:32]!r}; expected milliseconds above 0", name)
    return value_s


def _model(name: str, served: Served) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": served.created_at_s, "owned_by": "moonbus", "root": name,
            "parent": None, "max_model_len": served.spec.max_context, "vocab_size": served.text.vocab}


def _json(content: Any, status: int = 200) -> Response[bytes]:
    return Response(_encode(content), status_code=status, media_type=_JSON)


def _problem_response(problem: Problem) -> Response[bytes]:
    return Response(_encode(problem.body()), status_code=problem.status, media_type=_JSON,
                    headers=dict(problem.headers()))


def _on_api_error(_: Request[Any, Any, Any], error: ApiError) -> Response[bytes]:
    return _problem_response(error.problem)


def _on_bug(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """A failure of ours: the client gets a reference, the log gets the rest."""
    reference = secrets.token_hex(4)
    _log.error("request_failed", exc_info=error, extra={"fields": {
        "path": request.scope["path"], "reference": reference}})
    return _problem_response(msgspec.structs.replace(INTERNAL, message=f"{INTERNAL.message} (reference {reference})"))


async def _send_problem(send: Send, problem: Problem, headers: Mapping[str, str]) -> None:
    await _send(send, problem.status, {"content-type": _JSON, **headers, **problem.headers()}, _encode(problem.body()))


async def _send(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status,
                "headers": [*_raw(headers), (b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
