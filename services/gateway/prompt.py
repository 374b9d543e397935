"""From a request's words to a job: render, tokenise, check the length, name the blocks."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Executor

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
    head_start_s: float


class Prompt(msgspec.Struct, frozen=True):
    """A request that can be placed, and the ids its text begins with (context for the first answer token)."""

    job: Job
    before: list[int]


async def prepare(
    body: ChatRequest | CompletionRequest, wanted: Wanted, asked: Asked, served: Served, *,
    threads: Executor, default_max_tokens: int, inline: bool,
) -> Prompt:
    """The job for ``body``, made in ``threads`` unless ``inline``. Raises ``ApiError`` 400 for what cannot be run."""
    if inline:
        return _build(body, wanted, asked, served, default_max_tokens)
    return await asyncio.get_running_loop().run_in_executor(
        threads, _build, body, wanted, asked, served, default_max_tokens)


def _build(body: ChatRequest | CompletionRequest, wanted: Wanted, asked: Asked, served: Served,
           default_max_tokens: int) -> Prompt:
    spec = served.spec
    ids = _tokenize(served.text, body)
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
        head_start_s=asked.head_start_s, replayable=not wanted.stream)
    return Prompt(job, [] if isinstance(body, ChatRequest) else ids[-8:])


def _tokenize(text: ModelText, body: ChatRequest | CompletionRequest) -> list[int]:
    if isinstance(body, ChatRequest):
        ids = text.encode(text.render(chat_turns(body), body.chat_template_kwargs), special=False)
    else:
        prompt = completion_prompt(body)
        ids = text.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        largest = max(ids, default=0)
        if largest >= text.vocab:
            raise invalid(f"prompt has token id {largest}; the model knows ids below {text.vocab}", "prompt")
    if not ids:
        raise invalid("the prompt has no tokens", "messages" if isinstance(body, ChatRequest) else "prompt")
    return ids
