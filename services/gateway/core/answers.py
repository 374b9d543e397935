"""OpenAI's answers as bytes: whole bodies, and SSE frames whose constant parts are rendered once a request.

A frame is always written whole. The first chunk of a chat names the role, ``finish_reason`` comes once, usage (when
asked for) comes last in a chunk without choices, then ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from services.gateway.core.problem import Problem

Kind = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_encode = msgspec.json.encode


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's KV came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What the answer's tokens were for."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Token counts; ``cached_tokens`` of the prompt were not computed for this request."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens,
                 PromptTokensDetails(cached_tokens))


class Answer:
    """Renders one answer."""

    def __init__(self, kind: Kind, *, request: str, model: str, created: int, fingerprint: str,
                 usage_chunk: bool = False) -> None:
        self._chat = kind == "chat"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created, "model": model, "system_fingerprint": fingerprint,
        }
        self._usage_chunk = usage_chunk
        self._open = b"data: " + _encode(self._head)[:-1] + b',"choices":['
        self._text = self._open + (b'{"index":0,"delta":{"content":' if self._chat else b'{"index":0,"text":')
        self._text_end = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}]'

    def opening(self, so_far: Usage | None = None) -> bytes:
        """What comes before the first text: a chat's role; nothing for a completion."""
        if not self._chat:
            return b""
        return self._open + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,' \
            b'"finish_reason":null}]' + self._end(so_far)

    def text(self, text: str, so_far: Usage | None = None) -> bytes:
        """One piece of text."""
        return self._text + _encode(text) + self._text_end + self._end(so_far)

    def closing(self, finish: str, stop_reason: str | None, so_far: Usage | None = None,
                ids: Sequence[int] | None = None) -> bytes:
        """The chunk with the reason why it ended, and the whole answer's token ids when given."""
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": 0, **empty, **_ending(finish, stop_reason, ids)}
        return self._open + _encode(choice) + b"]" + self._end(so_far)

    def totals(self, total: Usage) -> bytes:
        """The last chunk, with usage and no choices."""
        return self._open + b"]" + b',"usage":' + _encode(total) + b"}\n\n"

    def whole(self, text: str, finish: str, stop_reason: str | None, total: Usage,
              ids: Sequence[int] | None = None) -> bytes:
        """The body of an answer that is not streamed."""
        message = {"role": "assistant", "content": text, "refusal": None}
        said: dict[str, Any] = {"message": message} if self._chat else {"text": text}
        choice = {"index": 0, **said, **_ending(finish, stop_reason, ids)}
        head = self._head | ({"object": "chat.completion"} if self._chat else {})
        return _encode(head | {"choices": [choice], "usage": total})

    def _end(self, so_far: Usage | None) -> bytes:
        if so_far is not None:
            return b',"usage":' + _encode(so_far) + b"}\n\n"
        return b',"usage":null}\n\n' if self._usage_chunk else b"}\n\n"


def _ending(finish: str, stop_reason: str | None, ids: Sequence[int] | None) -> dict[str, Any]:
    ending: dict[str, Any] = {"logprobs": None, "finish_reason": finish, "stop_reason": stop_reason}
    return ending if ids is None else {**ending, "token_ids": list(ids)}


def error_frame(problem: Problem) -> bytes:
    """What a stream says when it breaks off after its headers were sent; ``[DONE]`` follows."""
    return b"data: " + _encode(problem.body()) + b"\n\n"
