"""OpenAI's JSON and ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.core import answers
from services.gateway.core.openai import (
    ChatRequest,
    CompletionRequest,
    chat_turns,
    completion_prompt,
    decode,
    sampling,
    wanted,
)
from services.gateway.core.problem import ApiError, Problem
from shared.messages import Sampling

HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return decode(json.dumps({**HI, **fields}).encode(), ChatRequest)


def chosen(request: ChatRequest | CompletionRequest, *, num_tokens: int = 10, default: int = 0) -> Sampling:
    return sampling(request, wanted(request), num_tokens=num_tokens, max_context=100, default_max_tokens=default,
                    eos_ids=[2, 1], seed=99)


def refused(call: Any) -> Problem:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value.problem


def test_what_is_not_set_gets_openais_defaults() -> None:
    assert chosen(chat()) == Sampling(
        max_tokens=90, temperature=1.0, top_p=1.0, top_k=0, seed=99, stop_token_ids=[1, 2])
    assert chosen(chat(), default=20).max_tokens == 20
    completion = decode(b'{"model": "m", "prompt": "x"}', CompletionRequest)
    assert chosen(completion).max_tokens == 16 and chosen(completion, num_tokens=95).max_tokens == 5


def test_what_is_set_arrives() -> None:
    request = chat(max_tokens=5, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=-1, seed=-3, min_tokens=2,
                   stop_token_ids=[9], stop="x", user="u", cache_salt="s")
    got = chosen(request)
    assert (got.max_tokens, got.temperature, got.top_p, got.top_k, got.min_tokens) == (7, 0.0, 0.5, 0, 2)
    assert got.stop_token_ids == [1, 2, 9] and got.seed == 2**63 - 3
    assert wanted(request).stops == ("x",) and wanted(request).cache_salt == "s"
    assert chosen(chat(ignore_eos=True, stop_token_ids=[9])).stop_token_ids == [9]


def test_the_context_is_kept_with_both_numbers() -> None:
    problem = refused(lambda: chosen(chat(max_tokens=60), num_tokens=50))
    assert problem.code == "context_length_exceeded" and "100 tokens" in problem.message and "110" in problem.message
    problem = refused(lambda: chosen(chat(), num_tokens=100))
    assert problem.code == "context_length_exceeded" and problem.param == "messages"
    assert chosen(chat(max_tokens=50), num_tokens=50).max_tokens == 50


@pytest.mark.parametrize(("field", "value"), [
    ("n", 2), ("tools", [{"type": "function"}]), ("logit_bias", {"1": 2}), ("logprobs", True), ("logprobs", 0),
    ("top_logprobs", 3), ("presence_penalty", 0.5), ("frequency_penalty", -1),
    ("response_format", {"type": "json_object"}),
    ("tool_choice", {"type": "function"}), ("echo", True), ("suffix", "x"), ("best_of", 2), ("min_p", 0.1),
    ("repetition_penalty", 1.1), ("reasoning_effort", "high"), ("guided_json", {}), ("modalities", ["audio"]),
])
def test_what_would_change_the_answer_is_not_ignored(field: str, value: Any) -> None:
    problem = refused(lambda: wanted(chat(**{field: value})))
    assert (problem.status, problem.param, problem.code) == (400, field, "unsupported_parameter")
    assert field in problem.message


@pytest.mark.parametrize(("field", "value"), [
    ("n", 1), ("tools", []), ("tool_choice", "auto"), ("logprobs", False), ("top_logprobs", 0), ("presence_penalty", 0),
    ("response_format", {"type": "text"}), ("repetition_penalty", 1.0), ("service_tier", "auto"), ("metadata", {}),
    ("stop", []), ("stop", None), ("stream", None), ("stream_options", None), ("parallel_tool_calls", True),
])
def test_what_changes_nothing_is_taken(field: str, value: Any) -> None:
    assert wanted(chat(**{field: value})).max_tokens is None


@pytest.mark.parametrize(("fields", "param", "word"), [
    ({"max_tokens": "5"}, "max_tokens", "int"),
    ({"temperature": "hot"}, "temperature", "float"),
    ({"temperature": -1}, "temperature", ">= 0"),
    ({"stream": "yes"}, "stream", "bool"),
    ({"stop": 5}, "stop", "str"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "str"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "bool"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
])
def test_wrong_types_name_the_field(fields: dict[str, Any], param: str, word: str) -> None:
    problem = refused(lambda: chat(**fields))
    assert problem.param is not None and problem.param.replace("[...]", "[0]") == param
    assert word in problem.message


def test_parts_and_roles() -> None:
    request = chat(messages=[
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None}])
    assert chat_turns(request) == [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""}]
    image = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert refused(lambda: chat_turns(image)).param == "messages[0].content[0].type"
    empty = chat(messages=[{"role": "user"}])
    assert refused(lambda: chat_turns(empty)).param == "messages[0].content"
    calls = chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}])
    assert refused(lambda: chat_turns(calls)).param == "messages[0].tool_calls"


@pytest.mark.parametrize(("prompt", "expected"), [
    ("x", "x"), (["x"], "x"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion_prompt(CompletionRequest(model="m", prompt=prompt)) == expected


@pytest.mark.parametrize("prompt", [
    "", [], [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], [-1], [[1, -1]], [[[1]]]])
def test_prompts_that_are_none(prompt: Any) -> None:
    problem = refused(lambda: completion_prompt(CompletionRequest(model="m", prompt=prompt)))
    assert (problem.status, problem.param) == (400, "prompt")


# -- problems -------------------------------------------------------------------------------------------------------

def test_retry_headers() -> None:
    assert Problem(status=429, code="c", message="m", retry_after_s=0.2).headers() == {
        "retry-after": "1", "retry-after-ms": "200"}
    assert Problem(status=503, code="c", message="m", retry_after_s=2.1).headers()["retry-after"] == "3"
    assert Problem(status=504, code="c", message="m").headers() == {"x-should-retry": "false"}
    assert Problem(status=400, code="c", message="m").headers() == {}
    assert Problem(status=429, code="c", message="m").body()["error"]["type"] == "rate_limit_error"
    assert Problem(status=503, code="c", message="m").body()["error"]["type"] == "server_error"


# -- answers --------------------------------------------------------------------------------------------------------

def answer(kind: answers.Kind = "chat", **fields: Any) -> answers.Answer:
    return answers.Answer(kind, request="r1", model="m", created=5, fingerprint="mb-1", **fields)


def frame(data: bytes) -> Any:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n\n") == 1
    return json.loads(data[6:])


def test_frames_are_what_a_whole_encoder_would_write() -> None:
    one = answer(usage_chunk=True)
    same = {"id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 5, "model": "m",
            "system_fingerprint": "mb-1"}
    assert frame(one.opening()) == {**same, "usage": None, "choices": [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]}
    assert frame(one.text('a "b" [DONE]\n\n')) == {**same, "usage": None, "choices": [
        {"index": 0, "delta": {"content": 'a "b" [DONE]\n\n'}, "logprobs": None, "finish_reason": None}]}
    assert frame(one.closing("stop", "x"))["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "x"}]
    total = answers.usage(3, 4, 2)
    assert frame(one.totals(total)) == {**same, "choices": [], "usage": {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0}}}
    assert "usage" not in frame(answer().text("x"))
    assert frame(answer().text("x", total))["usage"]["total_tokens"] == 7


def test_completions_have_their_own_shape() -> None:
    one = answer("completion")
    assert one.opening() == b""
    assert frame(one.text("hi"))["choices"] == [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": None}]
    body = json.loads(one.whole("hi", "length", None, answers.usage(1, 1, 0)))
    assert body["object"] == "text_completion" and body["id"] == "cmpl-r1"
    assert body["choices"][0]["text"] == "hi" and body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_errors_in_a_stream() -> None:
    said = frame(answers.error_frame(Problem(status=502, code="worker_lost", message="m")))
    assert said == {"error": {"message": "m", "type": "server_error", "param": None, "code": "worker_lost"}}
