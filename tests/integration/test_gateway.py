"""The gateway over a real NATS server, with a scripted cluster behind it and the real openai client in front."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.gateway.app import serve
from services.gateway.settings import Settings
from services.gateway.shell import Gateway
from shared.bus.nats import NatsBus
from shared.ids import GatewayId, RequestId
from shared.messages import Rejection
from shared.models import cache_spec, describe
from shared.telemetry import metrics
from tests.support.eventually import eventually
from tests.support.scripted_cluster import Cluster, cluster_of
from tests.support.text_model import write_text_model

MODEL = "scripted"
HELLO = [{"role": "user", "content": "the quick fox"}]


@dataclass
class Stage:
    """A running gateway with its surroundings."""

    url: str
    gateway: Gateway
    cluster: Cluster
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    tokenizer: Tokenizer
    extra: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str, finish: str = "stop") -> list[int]:
        """From now on answers are ``text``."""
        ids: list[int] = self.tokenizer.encode(text).ids
        self.cluster.answer = lambda job: (ids, finish)
        return ids

    async def ask(self, **fields: Any) -> Any:
        return await self.client.chat.completions.create(model=MODEL, messages=HELLO, **fields)  # type: ignore[call-overload]

    async def post(self, body: Any, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, **fields)

    async def done(self) -> Any:
        """The RequestDone of the only request so far; sees to it that there is just one and that nothing is left."""
        await eventually(lambda: self.cluster.dones, "a RequestDone")
        assert len(self.cluster.dones) == 1
        await eventually(lambda: in_flight() == 0, "gauges back to 0")
        assert await self.gateway.wait_idle(1.0)
        return self.cluster.dones[0]


def in_flight() -> float:
    return metrics.GATEWAY_IN_FLIGHT._value.get()


Open = Callable[..., Any]


@pytest_asyncio.fixture
async def stage_with(nats_url: str, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens a stage: ``async with stage_with(prefill=2, max_attempts=1) as stage``."""

    @asynccontextmanager
    async def opened(*, prefill: int = 1, decode: int = 1, max_context: int = 512, wait: bool = True,
                     **overrides: Any) -> AsyncIterator[Stage]:
        path = write_text_model(tmp_path / "models" / MODEL, max_context=max_context)
        spec = cache_spec(describe(MODEL, path), dtype="float32", block_tokens=4)
        values = {"port": 0, "cache_dir": str(tmp_path), "nats_url": nats_url, "suspect_after_s": 0.5,
                  "dead_after_s": 30.0, "place_timeout_s": 5.0, "inline_bytes": 400, **overrides}
        settings = Settings(**values)
        async with cluster_of(nats_url, spec, prefill=prefill, decode=decode) as cluster:
            async with NatsBus.connect(nats_url, name="gateway") as bus:
                async with serve(settings, bus, gateway_id=GatewayId("gateway-1")) as (gateway, url):
                    key = (overrides.get("api_keys") or ("any",))[0]
                    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client, \
                            httpx.AsyncClient(base_url=url, timeout=20) as http:
                        stage = Stage(url, gateway, cluster, client, http,
                                      Tokenizer.from_file(str(path / "tokenizer.json")))
                        if wait:
                            await eventually(lambda: not gateway.roster.why_not_ready(), "the gateway to be ready")
                            await eventually(lambda: all(
                                member.load for member in gateway.roster.membership.members.values()), "heartbeats")
                        yield stage

    yield opened


@pytest_asyncio.fixture
async def stage(stage_with: Open) -> AsyncIterator[Stage]:
    async with stage_with() as opened:
        yield opened


# -- answers -------------------------------------------------------------------------------------------------------

async def test_an_answer_in_one_piece(stage: Stage) -> None:
    ids = stage.say("the lazy dog 🎉 sleeps")
    answer = await stage.ask()
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "the lazy dog 🎉 sleeps"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ids)
    done = await stage.done()
    assert (done.outcome, done.finish, done.completion_tokens, done.hit_tokens) == ("ok", "stop", len(ids), 7)
    assert done.prefill == "prefill-1" and done.decode == "decode-1" and done.attempts == 1
    assert done.client_id == "", "it gave it no name"
    assert done.prompt_tokens == answer.usage.prompt_tokens and len(done.last_key) == 32
    assert not stage.cluster.cancels


async def test_the_prompt_is_what_the_template_renders(stage: Stage) -> None:
    await stage.ask()
    job = stage.cluster.workers["decode-1"].jobs[0]
    text = stage.tokenizer.decode(list(memoryview(job.tokens).cast("I")), skip_special_tokens=False)
    assert text == "<|start|>user\nthe quick fox<|end|>\n<|start|>assistant\n"
    assert job.sampling.stop_token_ids == [1]
    assert job.sampling.max_tokens == 512 - len(job.tokens) // 4


async def test_a_stream(stage: Stage) -> None:
    ids = stage.say("grüße 日本語 🎉 und mehr")
    chunks = [chunk async for chunk in await stage.ask(stream=True, stream_options={"include_usage": True})]
    *spoken, closing, totals = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert spoken[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in spoken]
    assert "".join(pieces) == "grüße 日本語 🎉 und mehr"
    assert not any("�" in piece for piece in pieces)
    assert [chunk.choices[0].finish_reason for chunk in spoken] == [None] * len(spoken)
    assert closing.choices[0].finish_reason == "stop" and not closing.choices[0].delta.content
    assert totals.choices == [] and totals.usage.completion_tokens == len(ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (await stage.done()).outcome == "ok"


async def test_frames_and_headers_of_a_stream(stage: Stage) -> None:
    stage.say("the dog")
    response = await stage.post({"model": MODEL, "messages": HELLO, "stream": True},
                                headers={"x-request-id": "my-own"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == (await stage.done()).client_id == "my-own"
    assert response.headers["x-moonbus-prefill-worker"] == "prefill-1"
    assert response.headers["x-moonbus-decode-worker"] == "decode-1"
    assert response.headers["x-moonbus-cached-tokens"] == "7"
    assert float(response.headers["x-moonbus-ttft-ms"]) > 0
    assert float(response.headers["x-moonbus-predicted-ttft-ms"]) == pytest.approx(60.0)
    assert json.loads(response.headers["x-moonbus-stages"])["hit_tokens"] == 7
    frames = response.text.split("\n\n")
    assert frames.pop() == "" and frames[-1] == "data: [DONE]"
    assert all(frame.startswith("data: ") for frame in frames)


async def test_usage_in_every_chunk_when_asked(stage: Stage) -> None:
    ids = stage.say("the dog and the cat")
    stream = await stage.ask(stream=True, extra_body={
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == len(ids)


async def test_a_quiet_stream_is_kept_open(stage_with: Open) -> None:
    async with stage_with(keepalive_comment_s=0.05) as stage:
        stage.say("the quick brown fox")
        stage.cluster.pause_at = 2
        async with stage.http.stream("POST", "/v1/chat/completions", json={**OK, "stream": True}) as response:
            seen = ""
            async for text in response.aiter_text():
                seen += text
                if ": ping\n\n" in seen:
                    stage.cluster.go_on.set()
        assert seen.endswith("data: [DONE]\n\n") and seen.index(": ping") < seen.index(" brown")


async def test_the_first_token_is_timed_where_the_client_sees_it(stage: Stage) -> None:
    stage.cluster.pause_at = 0
    loop, begun_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    asking = asyncio.create_task(stage.ask(stream=True))
    await stage.cluster.paused.wait()
    stage.cluster.go_on.set()
    await anext(aiter(await asking))
    seen_s = loop.time() - begun_s
    done = await stage.done()
    assert done.ttft_s is not None and 0 < done.ttft_s <= seen_s
    assert seen_s - done.ttft_s < 0.25  # a few milliseconds when nothing else runs on the machine


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_answer_and_never_show(stage: Stage, stream: bool) -> None:
    stage.say("the quick brown fox jumps over the lazy dog " * 5, "length")
    stage.cluster.pause_at = 60
    if stream:
        chunks = [chunk async for chunk in await stage.ask(stream=True, stop=["nowhere", "fox jumps"])]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        answer = await stage.ask(stop=["nowhere", "fox jumps"])
        last, text = answer.choices[0], answer.choices[0].message.content
    assert text == "the quick brown "
    assert last.finish_reason == "stop" and last.stop_reason == "fox jumps"
    done = await stage.done()
    assert (done.outcome, done.finish) == ("ok", "stop")
    assert [cancel.reason for cancel in stage.cluster.cancels] == ["stop"]


async def test_completions_take_text_and_tokens(stage: Stage) -> None:
    stage.say(" dog sleeps")
    for prompt in ("the lazy", [20, 30, 40], ["the lazy"], [[20, 30, 40]]):
        answer = await stage.client.completions.create(model=MODEL, prompt=prompt, seed=7, temperature=0.5)
        assert answer.object == "text_completion" and answer.choices[0].text == " dog sleeps"
    jobs = [job for job in stage.cluster.workers["prefill-1"].jobs]
    assert [list(memoryview(job.tokens).cast("I")) for job in jobs[1::2]] == [[20, 30, 40]] * 2
    assert {(job.sampling.max_tokens, job.sampling.seed, job.sampling.temperature) for job in jobs} == {(16, 7, 0.5)}
    stream = await stage.client.completions.create(model=MODEL, prompt="the lazy", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " dog sleeps"


async def test_a_long_prompt_is_tokenised_the_same_in_a_thread(stage: Stage) -> None:
    text = "the quick brown fox " * 50
    await stage.client.completions.create(model=MODEL, prompt=text)
    job = stage.cluster.workers["decode-1"].jobs[0]
    assert list(memoryview(job.tokens).cast("I")) == stage.tokenizer.encode(text).ids


async def test_a_salt_and_a_tenant_share_nothing(stage: Stage) -> None:
    for headers, extra in (({}, {}), ({"x-moonbus-tenant": "acme"}, {}), ({}, {"cache_salt": "s"}), ({}, {})):
        await stage.post({"model": MODEL, "messages": HELLO, **extra}, headers=headers)
    roots = [job.root for job in stage.cluster.workers["prefill-1"].jobs]
    assert len(set(roots[:3])) == 3 and roots[3] == roots[0]
    assert [place.tenant for place in stage.cluster.places] == ["default", "acme", "default", "default"]


async def test_extensions_reach_the_conductor(stage_with: Open) -> None:
    async with stage_with(prefill=2, ttft_slo_s=3.0) as stage:
        response = await stage.post({"model": MODEL, "messages": HELLO}, headers={
            "x-moonbus-exclude-workers": "prefill-1, decode-9", "x-moonbus-tbt-slo-ms": "50",
            "x-moonbus-priority": "Low"})
        assert response.headers["x-moonbus-prefill-worker"] == "prefill-2"
        place = stage.cluster.places[0]
        assert place.exclude == ["prefill-1", "decode-9"]
        assert (place.ttft_slo_s, place.tbt_slo_s, place.head_start_s) == (3.0, 0.05, -20.0)
        assert stage.cluster.workers["prefill-2"].jobs[0].head_start_s == -20.0
        refused = await stage.post({"model": MODEL, "messages": HELLO}, headers={"x-moonbus-priority": "urgent"})
        assert refused.status_code == 400
        assert "'urgent'; this gateway knows normal, low" in refused.json()["error"]["message"]


# -- models and health ---------------------------------------------------------------------------------------------

async def test_models_and_health(stage: Stage) -> None:
    listed = await stage.client.models.list()
    assert [(model.id, model.object, model.max_model_len) for model in listed.data] == [(MODEL, "model", 512)]  # type: ignore[attr-defined]
    assert (await stage.client.models.retrieve(MODEL)).id == MODEL
    for path in ("/health", "/health/", "/ready", "/version", "/ping", "/v1/models/"):
        assert (await stage.http.get(path)).status_code == 200, path
    assert "moonbus_gateway_in_flight_requests 0.0" in (await stage.http.get("/metrics")).text
    document = (await stage.http.get("/openapi.json")).json()
    assert "max_completion_tokens" in document["components"]["schemas"]["ChatRequest"]["properties"]


async def test_ready_only_when_it_can_serve(stage_with: Open) -> None:
    async with stage_with(prefill=1, decode=0, wait=False) as stage:
        await eventually(lambda: MODEL in stage.gateway.roster.served())
        response = await stage.http.get("/ready")
        assert response.status_code == 503 and "no usable decode" in response.json()["why"]
        assert (await stage.http.get("/health")).status_code == 200
        await stage.cluster.add("decode-1", "decode")
        await eventually(lambda: not stage.gateway.roster.why_not_ready())
        assert (await stage.http.get("/ready")).status_code == 200


async def test_a_model_with_another_tokenizer_is_not_served(stage_with: Open) -> None:
    async with stage_with(prefill=0, decode=0, wait=False) as stage:
        other = msgspec.structs.replace(stage.cluster.spec, tokenizer_digest="f" * 64)
        await stage.cluster.add("prefill-1", "prefill", other)
        await stage.cluster.add("decode-1", "decode", other)

        async def refused() -> bool:
            return "digest" in (await stage.http.get("/ready")).json()["why"]

        await eventually(refused)
        response = await stage.post({"model": MODEL, "messages": HELLO})
        assert response.status_code == 503 and "ffffffffffff" in response.json()["error"]["message"]


async def test_browsers_may_ask(stage: Stage) -> None:
    response = await stage.http.options("/v1/chat/completions", headers={
        "origin": "http://somewhere", "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type"})
    assert response.status_code == 204 and response.headers["access-control-allow-origin"] == "*"


# -- errors --------------------------------------------------------------------------------------------------------

OK = {"model": MODEL, "messages": HELLO}


@pytest.mark.parametrize(("body", "status", "param", "code"), [
    (b"{not json", 400, None, "invalid_json"),
    (b"", 400, None, "invalid_json"),
    (b"[]", 400, None, "invalid_type"),
    ({"model": MODEL}, 400, "messages", "missing_required_parameter"),
    ({"messages": HELLO}, 400, "model", "missing_required_parameter"),
    ({**OK, "model": "nobody"}, 404, "model", "model_not_found"),
    ({**OK, "messages": []}, 400, "messages", "invalid_type"),
    ({**OK, "messages": [{"content": "x"}]}, 400, "messages[0].role", "missing_required_parameter"),
    ({**OK, "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "unsupported_parameter"),
    ({**OK, "max_tokens": "5"}, 400, "max_tokens", "invalid_type"),
    ({**OK, "max_tokens": 0}, 400, "max_tokens", "invalid_type"),
    ({**OK, "max_tokens": 600}, 400, "messages", "context_length_exceeded"),
    ({**OK, "temperature": 3}, 400, "temperature", "invalid_type"),
    ({**OK, "top_p": 0}, 400, "top_p", "invalid_type"),
    ({**OK, "n": 2}, 400, "n", "unsupported_parameter"),
    ({**OK, "logit_bias": {"5": 1}}, 400, "logit_bias", "unsupported_parameter"),
    ({**OK, "tools": [{}]}, 400, "tools", "unsupported_parameter"),
    ({**OK, "response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
    ({**OK, "stop": ["a"] * 17}, 400, "stop", "invalid_value"),
    ({**OK, "stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
    ({**OK, "min_tokens": 5, "max_tokens": 2}, 400, "min_tokens", "invalid_value"),
    ({**OK, "messages": [{"role": "user", "content": "fox " * 2000}]}, 400, "messages", "context_length_exceeded"),
    (b"x" * 20_000, 413, None, "body_too_large"),
])
async def test_bad_requests(stage_with: Open, body: Any, status: int, param: str | None, code: str) -> None:
    async with stage_with(max_body_bytes=10_000) as stage:
        response = await stage.post(body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
        assert error["message"] and error["type"] == "invalid_request_error"
        assert response.headers["x-request-id"]
        assert not stage.cluster.places and in_flight() == 0


async def test_numbers_are_in_the_context_error(stage: Stage) -> None:
    with pytest.raises(openai.BadRequestError, match=r"512 tokens.* 3\d\d\d tokens") as caught:
        await stage.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "qz " * 1000}])
    assert caught.value.code == "context_length_exceeded"


async def test_nulls_are_unset_and_unknown_fields_ignored(stage: Stage) -> None:
    response = await stage.post({
        **OK, "stop": None, "max_tokens": None, "temperature": None, "n": None, "tools": None, "logit_bias": None,
        "logprobs": False, "presence_penalty": 0.0, "whatever": {"deep": [1]}, "ignore_eos": True,
        "response_format": {"type": "text"}, "priority": 3})
    assert response.status_code == 200
    assert stage.cluster.workers["decode-1"].jobs[0].sampling.stop_token_ids == []


async def test_wrong_routes_and_methods(stage: Stage) -> None:
    missing = await stage.http.get("/v2/everything")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await stage.http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]


async def test_keys(stage_with: Open) -> None:
    async with stage_with(api_keys=("secret", "other")) as stage:
        await stage.ask()
        refused = await stage.post(OK)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        wrong = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="wrong", max_retries=0)
        async with wrong:
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
        assert (await stage.http.get("/health")).status_code == 200
        await stage.post(OK, headers={"authorization": "Bearer other", "x-moonbus-tenant": "acme"})
        tenants = [place.tenant for place in stage.cluster.places]
        assert tenants[0].startswith("key-") and tenants[1].endswith("/acme") and tenants[0] not in tenants[1]


@pytest.mark.parametrize(("code", "status", "kind"), [
    ("ttft", 429, openai.RateLimitError), ("tbt", 429, openai.RateLimitError),
    ("capacity", 429, openai.RateLimitError), ("quota", 429, openai.RateLimitError),
    ("no_worker", 503, openai.InternalServerError),
])
async def test_rejections(stage: Stage, code: Any, status: int, kind: type[openai.APIStatusError]) -> None:
    stage.cluster.reject = Rejection(request=RequestId(""), code=code, message="too busy", retry_after_s=2.4)
    with pytest.raises(kind) as caught:
        await stage.ask(stream=True)
    assert caught.value.status_code == status and caught.value.code == code
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.response.headers["retry-after-ms"] == "2400"
    done = await stage.done()
    assert (done.outcome, done.code) == ("rejected", code)
    assert [(one.answer.code, one.answer.retry_after_s) for one in done.decisions] == [(code, 2.4)]
    assert caught.value.response.headers["x-moonbus-request-id"] == done.request


async def test_a_full_worker_is_429_even_when_it_was_the_only_one(stage: Stage) -> None:
    stage.cluster.workers["decode-1"].refuse = "capacity"
    response = await stage.post(OK)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "capacity")
    assert response.headers["retry-after"] == "3"


async def test_a_job_that_the_bus_does_not_carry_is_413_with_both_numbers(stage_with: Open) -> None:
    async with stage_with(max_context=10**7) as stage:
        limit = stage.gateway.bus.max_payload  # type: ignore[attr-defined]
        ids = [20] * (limit // 11)  # 4 bytes a token and 32 a block of 4 tokens
        response = await stage.post({"model": MODEL, "prompt": ids}, "/v1/completions")
        assert response.status_code == 413, response.text
        assert response.json()["error"]["code"] == "payload_too_large"
        assert str(limit) in response.json()["error"]["message"]
        assert (await stage.done()).outcome == "failed"


# -- clients that leave --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_everything(stage: Stage, stream: bool) -> None:
    stage.say("the quick brown fox jumps over the lazy dog")
    stage.cluster.pause_at = 5
    asking = asyncio.create_task(stage.ask(stream=stream))
    await asyncio.wait_for(stage.cluster.paused.wait(), 5)
    loop = asyncio.get_running_loop()
    left_s = loop.time()
    if stream:
        await (await asking).close()
    else:
        asking.cancel()
        await asyncio.wait({asking})
    await eventually(lambda: stage.cluster.cancels, "a cancel", timeout_s=1.0)
    assert loop.time() - left_s < 1.0
    assert stage.cluster.cancels[0].attempt == -1
    done = await stage.done()
    assert (done.outcome, done.code) == ("cancelled", "client_gone")


async def test_a_client_that_leaves_before_the_first_token(stage: Stage) -> None:
    stage.cluster.workers["prefill-1"].mute = True
    asking = asyncio.create_task(stage.ask(stream=True))
    await eventually(lambda: stage.cluster.workers["prefill-1"].jobs)
    asking.cancel()
    await asyncio.wait({asking})
    await eventually(lambda: stage.cluster.cancels, "a cancel", timeout_s=1.0)
    assert (await stage.done()).outcome == "cancelled"


async def test_a_client_that_does_not_read_is_cancelled(stage_with: Open) -> None:
    async with stage_with(stream_buffer_tokens=50, max_context=400_000) as stage:
        ids = stage.tokenizer.encode("fox ").ids
        stage.cluster.answer = lambda job: (ids * 100_000, "length")
        host, port = stage.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps({**OK, "stream": True}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: stage.cluster.cancels, "a cancel", timeout_s=20.0)
        writer.transport.abort()
        done = await stage.done()
        assert (done.outcome, done.code) == ("cancelled", "slow_client")


async def test_the_deadline_ends_a_request(stage_with: Open) -> None:
    async with stage_with(request_deadline_s=0.3) as stage:
        stage.cluster.workers["prefill-1"].mute = True
        response = await stage.post(OK)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert response.headers["x-should-retry"] == "false"
        await eventually(lambda: stage.cluster.cancels)
        assert (await stage.done()).outcome == "failed"


# -- peers that fail -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["refuse", "fail"])
async def test_a_failed_attempt_goes_elsewhere(stage_with: Open, how: str) -> None:
    async with stage_with(prefill=2) as stage:
        setattr(stage.cluster.workers["prefill-1"], how, "draining")
        response = await stage.post({**OK, "stream": True})
        assert response.status_code == 200
        assert response.headers["x-moonbus-prefill-worker"] == "prefill-2"
        assert [place.exclude for place in stage.cluster.places] == [[], ["prefill-1"]]
        assert [(cancel.attempt, cancel.reason) for cancel in stage.cluster.cancels] == [(0, "draining")]
        done = await stage.done()
        assert (done.outcome, done.attempts) == ("ok", 2)
        assert response.headers["x-moonbus-request-id"] == done.request
        assert [(one.attempt, one.answer.prefill, one.code) for one in done.decisions] == [
            (0, "prefill-1", "draining"), (1, "prefill-2", "")]
        assert 0 < done.decisions[0].at_s < done.decisions[1].at_s < done.duration_s


async def test_attempts_end(stage_with: Open) -> None:
    async with stage_with(prefill=4, max_attempts=3) as stage:
        for i in range(4):
            stage.cluster.workers[f"prefill-{i + 1}"].fail = "broken"
        response = await stage.post(OK)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "broken")
        assert "3 attempts" in response.json()["error"]["message"] and response.headers["retry-after"]
        assert len(stage.cluster.places) == 3
        assert (await stage.done()).outcome == "failed"


async def test_a_worker_that_is_gone_already(stage_with: Open) -> None:
    async with stage_with(decode=2) as stage:
        await stage.cluster.workers["decode-1"].kill()
        response = await stage.post(OK)
        assert response.headers["x-moonbus-decode-worker"] == "decode-2"
        assert stage.gateway.roster.membership.members["decode-1"].state == "dead"  # type: ignore[index]
        assert (await stage.done()).attempts == 2


async def test_a_worker_dies_before_the_first_token(stage_with: Open) -> None:
    async with stage_with(prefill=2) as stage:
        first = stage.cluster.workers["prefill-1"]
        first.mute = True
        asking = asyncio.create_task(stage.ask(stream=True))
        await eventually(lambda: first.jobs)
        await first.kill()
        chunks = [chunk async for chunk in await asking]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert (await stage.done()).attempts == 2


async def test_a_silent_worker_that_still_listens_is_not_dead(stage_with: Open) -> None:
    async with stage_with() as stage:
        worker = stage.cluster.workers["prefill-1"]
        worker.mute = True
        asking = asyncio.create_task(stage.ask())
        await eventually(lambda: worker.jobs)
        await worker.stop_heart()
        member = stage.gateway.roster.membership.members[worker.id]
        await eventually(lambda: member.state == "suspect")
        await eventually(lambda: stage.gateway.bus.statistics().published > 5)
        assert member.state == "suspect" and len(stage.cluster.places) == 1
        asking.cancel()
        await asyncio.wait({asking})
        await stage.done()


async def test_a_worker_dies_mid_stream(stage: Stage) -> None:
    stage.say("the quick brown fox jumps over the lazy dog")
    stage.cluster.pause_at = 5
    stream = await stage.ask(stream=True)
    await stage.cluster.paused.wait()
    await stage.cluster.workers["decode-1"].kill()
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in stream:
            pass
    done = await stage.done()
    assert (done.outcome, done.code, done.completion_tokens) == ("failed", "worker_lost", 5)


async def test_an_answer_in_one_piece_survives_the_death_of_its_worker(stage_with: Open) -> None:
    async with stage_with(decode=2) as stage:
        stage.say("the quick brown fox jumps")
        stage.cluster.pause_at = 3
        asking = asyncio.create_task(stage.ask())
        await stage.cluster.paused.wait()
        stage.cluster.pause_at = None
        await stage.cluster.workers["decode-1"].kill()
        answer = await asking
        assert answer.choices[0].message.content == "the quick brown fox jumps"
        done = await stage.done()
        assert (done.attempts, done.decode) == (2, "decode-2")


async def test_a_conductor_that_restarts(stage: Stage) -> None:
    await stage.cluster.stop_conductor()
    asking = asyncio.create_task(stage.ask())
    await eventually(lambda: stage.gateway.bus.statistics().published >= 0 and in_flight() == 1)
    await stage.cluster.start_conductor()
    assert (await asking).choices[0].finish_reason == "stop"


async def test_no_conductor_at_all(stage_with: Open) -> None:
    async with stage_with(place_timeout_s=0.3) as stage:
        await stage.cluster.stop_conductor()
        response = await stage.post(OK)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_conductor")
        assert response.headers["retry-after"] == "1"
        assert (await stage.done()).outcome == "rejected"


async def test_all_workers_of_a_model_are_gone(stage: Stage) -> None:
    for worker in stage.cluster.workers.values():
        await worker.kill()
    await eventually(lambda: not stage.gateway.roster.served(), "the workers to be missed")
    response = await stage.post(OK)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")


# -- the end -------------------------------------------------------------------------------------------------------

async def test_draining(stage: Stage) -> None:
    stage.say("the quick brown fox")
    stage.cluster.pause_at = 2
    stream = await stage.ask(stream=True)
    stage.gateway.draining = True
    refused = await stage.post(OK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["connection"] == "close" and refused.headers["retry-after"]
    assert (await stage.http.get("/health")).status_code == 200
    assert (await stage.http.get("/ready")).status_code == 503
    assert not await stage.gateway.wait_idle(0.05)
    stage.cluster.go_on.set()
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "the quick brown fox"
    assert await stage.gateway.wait_idle(1.0)


async def test_what_does_not_finish_in_time_hears_why(stage: Stage) -> None:
    stage.say("the quick brown fox")
    stage.cluster.pause_at = 2
    stream = await stage.ask(stream=True)
    stage.gateway.abort("the gateway is shutting down")
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    assert (await stage.done()).code == "shutting_down"


async def test_many_at_once_leave_nothing_behind(stage: Stage) -> None:
    stage.say("the quick brown fox jumps over the lazy dog")

    async def one(i: int) -> str:
        stream = await stage.ask(stream=True)
        if i % 5 == 0:
            await stream.close()
            return ""
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*(one(i) for i in range(50)))
    assert set(texts) <= {"", "the quick brown fox jumps over the lazy dog"}
    await eventually(lambda: len(stage.cluster.dones) == 50, "an end for each")
    await eventually(lambda: in_flight() == 0)
    assert await stage.gateway.wait_idle(1.0)
