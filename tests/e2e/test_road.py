"""The whole road with real processes: OpenAI client to tokens, reuse on the same and on another worker, its traces."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.bus.subjects import LINEAGE
from shared.messages import LineageQuery, LineageReply
from tests.support.command import moonbus
from tests.support.eventually import eventually
from tests.support.stack import RunningStack, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENT = importlib.resources.files("services.launcher").joinpath("demo_document.txt").read_text(encoding="utf-8")
TEXT = "The tide table of the harbour is read aloud each morning. " * 12


@dataclass
class Asked:
    """One answer, and what the gateway says about it."""

    text: str
    cached_tokens: int
    prompt_tokens: int
    headers: httpx.Headers

    @property
    def prefill(self) -> str:
        return self.headers["x-moonbus-prefill-worker"]

    @property
    def stages(self) -> dict[str, Any]:
        stages: dict[str, Any] = json.loads(self.headers["x-moonbus-stages"])
        return stages


async def ask(stack: RunningStack, text: str, *, exclude: str = "", salt: str = "", max_tokens: int = 12) -> Asked:
    async with stack.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=stack.model, messages=[{"role": "user", "content": text}], max_tokens=max_tokens, temperature=0,
            extra_headers={"x-moonbus-exclude-workers": exclude} if exclude else None,
            extra_body={"cache_salt": salt, "ignore_eos": True} if salt else {"ignore_eos": True})
        answer = raw.parse()
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return Asked(answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0,
                     answer.usage.prompt_tokens, raw.headers)


async def check_reuse(stack: RunningStack, text: str) -> None:
    """Cold, warm on the same worker, warm on another, uncached: one answer, and the reuse that was promised."""
    cold = await ask(stack, text)
    assert cold.cached_tokens == 0
    others = [w.hello.worker for w in (await stack.workers()).workers
              if w.hello.role == "prefill" and w.hello.worker != cold.prefill]
    same = await ask(stack, text, exclude=",".join(others))
    assert same.prefill == cold.prefill
    assert same.cached_tokens > 0.9 * cold.prompt_tokens - 64
    assert "fetched_bytes" not in same.stages
    moved = await ask(stack, text, exclude=cold.prefill)
    assert moved.prefill != cold.prefill
    assert moved.cached_tokens == same.cached_tokens
    assert moved.stages["fetch_path"] == "shm" and moved.stages["fetched_bytes"] > 0
    uncached = await ask(stack, text, salt="reference")
    assert uncached.cached_tokens == 0
    assert cold.text == same.text == moved.text == uncached.text


async def test_reuse_changes_nothing_but_the_time(stack: RunningStack) -> None:
    await check_reuse(stack, TEXT)


async def test_reuse_on_the_real_model(server_dir: Path) -> None:
    directory = server_dir / "stack-smollm2"
    directory.mkdir()
    async with running_stack(directory, model="smollm2-135m") as stack:
        await check_reuse(stack, DOCUMENT[:3_500] + "\n\nWho keeps the light?")
        await check_next_turn(stack)


async def check_next_turn(stack: RunningStack) -> None:
    """What decode generated is reused by the next turn of the conversation, though prefill never computed it."""
    prompt = list(range(1_000, 1_128))
    async with stack.client() as client:
        first = await client.completions.create(model=stack.model, prompt=prompt, max_tokens=140, temperature=0,
                                                extra_body={"ignore_eos": True, "return_token_ids": True})
        answer = first.choices[0].model_dump()["token_ids"]
        assert len(answer) == 140
        follow_up = [*prompt, *answer, 7, 8, 9]
        second = await client.completions.create(model=stack.model, prompt=follow_up, max_tokens=8, temperature=0)
        plain = await client.completions.create(model=stack.model, prompt=follow_up, max_tokens=8, temperature=0,
                                                extra_body={"cache_salt": "reference"})
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    # 267 of 268 tokens have their KV, which is 4 full blocks of 64; the prompt alone had 2.
    assert second.usage.prompt_tokens_details.cached_tokens == 256
    assert second.choices[0].text == plain.choices[0].text


async def test_streaming_speaks_openai(stack: RunningStack) -> None:
    async with stack.client() as client:
        stream = await client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": "count"}], max_tokens=9, stream=True,
            stream_options={"include_usage": True}, temperature=0, extra_body={"ignore_eos": True})
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": "count"}], max_tokens=9, temperature=0,
            extra_body={"ignore_eos": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]


async def test_many_at_once_all_get_their_own_answer(stack: RunningStack) -> None:
    texts = [f"{TEXT[:200]} Question {n}?" for n in range(24)]
    together = await asyncio.gather(*(ask(stack, text) for text in texts))
    for text, answer in zip(texts[:6], together, strict=False):
        assert (await ask(stack, text, salt="alone")).text == answer.text


async def test_the_trace_of_a_request_has_all_its_stages(stack: RunningStack) -> None:
    text = "Traced. " + TEXT
    cold = await ask(stack, text)
    moved = await ask(stack, text, exclude=cold.prefill)
    trace_id = moved.headers["x-moonbus-trace-id"]
    wanted = {
        "gateway": {"request", "tokenize", "place", "reserve", "dispatch", "first_token", "stream"},
        "conductor": {"place.decide"},
        "prefill": {"prefill.queue", "kv.fetch", "kv.send", "prefill.chunk", "kv.push"},
        "decode": {"decode.queue", "decode.stream"},
        "store-manager": {"catalog.record"},
    }

    def spans() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in stack.trace_file.read_text().splitlines()]
        return [line for line in lines if line["trace_id"] == trace_id]

    def complete() -> bool:
        seen: dict[str, set[str]] = {}
        for span in spans():
            seen.setdefault(span["service"], set()).add(span["name"])
        # An owner can be a decode worker as well: it kept the prompt's blocks.
        sent = {"kv.send"} & (seen.get("prefill", set()) | seen.get("decode", set()))
        return bool(sent) and all(names - {"kv.send"} <= seen.get(service, set()) for service, names in wanted.items())

    await eventually(complete, f"all stages of {trace_id}", timeout_s=20)
    tree = {span["span_id"]: span for span in spans()}
    roots = [span for span in tree.values() if not span["parent_id"]]
    assert [root["name"] for root in roots] == ["request"]
    assert all(span["parent_id"] in tree for span in tree.values() if span["parent_id"])
    root = roots[0]
    for span in tree.values():
        assert span["start_s"] >= root["start_s"] - 0.05
    fetch = next(span for span in tree.values() if span["name"] == "kv.fetch")
    assert fetch["attributes"]["moonbus.path"] == "shm" and fetch["attributes"]["moonbus.bytes"] > 0
    decide = next(span for span in tree.values() if span["name"] == "place.decide")
    assert {c["prefill"] for c in json.loads(decide["attributes"]["moonbus.candidates"])} >= {moved.prefill}


async def test_the_catalog_tells_a_prefix_from_its_root(stack: RunningStack) -> None:
    text = "Lineage. " + TEXT
    cold = await ask(stack, text)
    moved = await ask(stack, text, exclude=cold.prefill)

    def deepest() -> str:
        """The key of the prompt's last full block, as the trace of its request names it."""
        for line in stack.trace_file.read_text().splitlines():
            span = json.loads(line)
            if span["name"] == "catalog.record" and span["trace_id"] == moved.headers["x-moonbus-trace-id"]:
                return str(span["attributes"].get("moonbus.last_key", ""))
        return ""

    key: str = await eventually(deepest, "the request is in the catalog", timeout_s=20)

    async def lineage() -> LineageReply | None:
        reply = await stack.bus.request(LINEAGE.at(), LineageQuery(key_hex=key), timeout_s=5)
        blocks = reply.blocks if isinstance(reply, LineageReply) else []
        copies = [{r.worker for r in block.replicas if r.evicted_at_s is None} for block in blocks]
        return reply if copies and all(len(workers) >= 2 for workers in copies) else None

    reply: LineageReply = await eventually(lineage, "every block of the prefix has its copies", timeout_s=20)
    assert [block.depth for block in reply.blocks] == list(range(len(reply.blocks)))
    assert all(block.parent == before.key for before, block in zip(reply.blocks, reply.blocks[1:], strict=False))
    assert {block.created_by for block in reply.blocks} == {cold.prefill}
    assert {block.request for block in reply.blocks} == {reply.blocks[0].request} != {""}
    sources = {r.source for block in reply.blocks for r in block.replicas if r.worker == moved.prefill}
    assert sources and "" not in sources


async def test_a_request_and_a_rejection_explain_themselves(
        stack: RunningStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    async def explained(name: str) -> str:
        await asyncio.to_thread(moonbus, "explain", name, "--nats-url", stack.state.nats_url)
        return " ".join(capsys.readouterr().out.split())

    placed = await ask(stack, "Explained. " + TEXT)
    name = placed.headers["x-moonbus-request-id"]
    text: str = await eventually(lambda: explained(name), "the catalog knows the request", timeout_s=20)
    assert f"prefill on {placed.prefill}, decode on {placed.headers['x-moonbus-decode-worker']}" in text
    assert f"→ {placed.prefill} 0 0" in text and "TTFT from here" in text and "decode, predicted TBT: decode-" in text
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{stack.url}/v1/completions", timeout=30, headers={"x-moonbus-ttft-slo-ms": "0.001"},
                                  json={"model": stack.model, "prompt": TEXT, "max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "ttft")
    name = reply.headers["x-moonbus-request-id"]
    text = await eventually(lambda: explained(name), "the catalog knows the rejection", timeout_s=20)
    assert "rejected with code ttft, try again after" in text and "the first token is predicted after" in text
    assert "prefill-1" in text and "prefill-2" in text


@pytest.mark.parametrize(("body", "status", "says"), [
    ("{not json", 400, "JSON"),
    ('{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', 404, "nobody"),
    ('{"model": "tiny-random", "messages": "x"}', 400, "messages"),
    ('{"model": "tiny-random", "messages": [{"role": "user", "content": "x"}], "max_tokens": "9x"}', 400, "max_tokens"),
    ('{"model": "tiny-random", "messages": [{"role": "user", "content": "' + "long " * 8_000 + '"}]}', 400, "4096"),
    ('{"model": "tiny-random", "messages": [{"role": "user", "content": "' + "x" * 9_000_000 + '"}]}', 413, "8388608"),
    ('{"model": "tiny-random", "messages": [{"role": "user", "content": "x"}], "n": 2}', 400, "n"),
])
async def test_bad_input_gets_a_clear_answer(stack: RunningStack, body: str, status: int, says: str) -> None:
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{stack.url}/v1/chat/completions", content=body,
                                  headers={"content-type": "application/json"}, timeout=30)
    assert reply.status_code == status
    assert says in reply.json()["error"]["message"]


async def test_nobody_left_is_503_and_unknown_fields_are_ignored(stack: RunningStack) -> None:
    async with stack.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(
                model=stack.model, messages=[{"role": "user", "content": "x"}],
                extra_headers={"x-moonbus-exclude-workers": "prefill-1,prefill-2"})
        assert caught.value.status_code == 503 and int(caught.value.response.headers["retry-after"]) >= 1
        answer = await client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": "x"}], max_tokens=1,
            extra_body={"something_new": {"a": 1}})
        assert answer.usage is not None and answer.usage.completion_tokens == 1
