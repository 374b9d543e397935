"""From a request's words to a job: render, tokenise, check the length, name the blocks."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Executor
from typing import Any

import msgspec

from services.gateway.core.machine import Job
from services.gateway.core.openai import (
    ChatRequest,
    CompletionRequest,
    Wanted,
    chat_turns,
    completion_prompt,
    sampling,
)
from services.gateway.core.problem import invalid
from services.gateway.roster import Served
from services.gateway.tokenizer import ModelText
from shared.ids import GatewayId, RequestId, WorkerId
from shared.kv import block_keys, pack_keys, pack_tokens, root_key


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says beside its body."""

    request: RequestId
    gateway: GatewayId
    tenant: str
    exclude: tuple[WorkerId, ...]
    ttft_slo_s: float | None
    tbt_slo_s: float | None


class Prompt(msgspec.Struct, frozen=True):
    """A request that can be placed, and the ids its text begins with (context for the first answer token)."""

    job: Job
    before: list[int]


async def prepare(
    body: ChatRequest | CompletionRequest, wanted: Wanted, asked: Asked, served: Served, *,
    threads: Executor, inline_chars: int, default_max_tokens: int,
) -> Prompt:
    """The job for ``body``; long prompts are worked on in ``threads``. Raises ``ApiError`` 400 for what cannot be."""
    words: list[dict[str, str]] | str | list[int]
    words = chat_turns(body) if isinstance(body, ChatRequest) else completion_prompt(body)

    def build() -> Prompt:
        return _build(body, words, wanted, asked, served, default_max_tokens)

    if _size(words) <= inline_chars:
        return build()
    return await asyncio.get_running_loop().run_in_executor(threads, build)


def _build(body: ChatRequest | CompletionRequest, words: list[dict[str, str]] | str | list[int], wanted: Wanted,
           asked: Asked, served: Served, default_max_tokens: int) -> Prompt:
    spec = served.spec
    ids = _tokenize(served.text, body, words)
    chosen = sampling(
        body, wanted, num_tokens=len(ids), max_context=spec.max_context, default_max_tokens=default_max_tokens,
        eos_ids=served.text.model.eos_ids, seed=secrets.randbits(63))
    salt = f"{asked.tenant}\0{wanted.cache_salt}" if wanted.cache_salt else asked.tenant  # \0: no tenant's name has it
    root = root_key(spec, salt)
    tokens = pack_tokens(ids)
    job = Job(
        request=asked.request, gateway=asked.gateway, model=spec.model, spec=spec.digest, tenant=asked.tenant,
        num_tokens=len(ids), tokens=tokens, keys=pack_keys(block_keys(root, ids, spec.block_tokens)), root=root,
        sampling=chosen, exclude=asked.exclude, ttft_slo_s=asked.ttft_slo_s, tbt_slo_s=asked.tbt_slo_s,
        replayable=not wanted.stream)
    return Prompt(job, [] if isinstance(body, ChatRequest) else ids[-8:])


def _tokenize(text: ModelText, body: ChatRequest | CompletionRequest, words: Any) -> list[int]:
    if isinstance(body, ChatRequest):
        ids = text.encode(text.render(words, body.chat_template_kwargs), special=False)
    elif isinstance(words, str):
        ids = text.encode(words, special=True)
    else:
        ids = list(words)
        largest = max(ids)
        if largest >= text.vocab:
            raise invalid(f"prompt has token id {largest}; the model knows ids below {text.vocab}", "prompt")
    if not ids:
        raise invalid("the prompt has no tokens", "messages" if isinstance(body, ChatRequest) else "prompt")
    return ids


def _size(words: list[dict[str, str]] | str | list[int]) -> int:
    """Characters, roughly; four of them a token id."""
    if isinstance(words, str):
        return len(words)
    return sum(len(turn["content"]) if isinstance(turn, dict) else 4 for turn in words)
