"""Settings of the gateway."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from services.gateway.core.priority import Priority, priorities
from shared.errors import SettingError
from shared.settings import BYTES, SECONDS, CommonSettings


class Settings(CommonSettings, frozen=True, kw_only=True):
    """What the gateway takes beside the common settings."""

    host: Annotated[str, Meta(description="Address that clients connect to.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port of the API; 0 picks a free one.", ge=0, le=65535)] = 8000
    gateway_id: Annotated[str, Meta(description="Name of this gateway on the bus; empty for a fresh one.")] = ""
    models: Annotated[tuple[str, ...], Meta(description=(
        "Names or directories of models to know from the start; others are looked up in the cache directory "
        "by name when a worker announces them."))] = ()
    api_keys: Annotated[tuple[str, ...], Meta(description=(
        "Keys that clients may authenticate with, comma separated; empty lets everybody in."))] = ()
    tenant_header: Annotated[str, Meta(description=(
        "Request header that names the tenant. With api_keys set it only divides a key's own tenant."))] = "x-moonbus-tenant"
    cors_origins: Annotated[tuple[str, ...], Meta(description="Origins that browsers may call from; * for all.")] = ("*",)
    max_body_bytes: Annotated[int, Meta(description="Largest request body; more is answered with 413.", gt=0,
                                        extra=BYTES)] = 8 * 2**20
    default_max_tokens: Annotated[int, Meta(description=(
        "Longest chat answer in tokens when the client names no limit; 0 for the rest of the context."), ge=0)] = 0
    place_timeout_s: Annotated[float, Meta(description="Longest wait for any conductor to answer.", gt=0,
                                           extra=SECONDS)] = 10.0
    job_timeout_s: Annotated[float, Meta(description="Longest wait for a worker to take or refuse a job.", gt=0,
                                         extra=SECONDS)] = 10.0
    request_deadline_s: Annotated[float, Meta(description="Longest life of a request.", gt=0, extra=SECONDS)] = 300.0
    stall_s: Annotated[float, Meta(description="Longest silence of an answer that has begun.", gt=0,
                                   extra=SECONDS)] = 30.0
    quiet_s: Annotated[float, Meta(description=(
        "Silence of a request's workers after which they are asked whether they still have it."), gt=0,
        extra=SECONDS)] = 5.0
    max_attempts: Annotated[int, Meta(description="Placements a request may use up before it fails.", ge=1)] = 3
    ttft_slo_s: Annotated[float, Meta(description=(
        "Time to first token that placements must promise; 0 accepts any. Header x-moonbus-ttft-slo-ms "
        "overrides it."), ge=0, extra=SECONDS)] = 0.0
    tbt_slo_s: Annotated[float, Meta(description=(
        "Gap between tokens that placements must promise; 0 accepts any. Header x-moonbus-tbt-slo-ms "
        "overrides it."), ge=0, extra=SECONDS)] = 0.0
    priorities: Annotated[tuple[str, ...], Meta(description=(
        "Classes that header x-moonbus-priority may name, each as NAME=HEAD_START[/TTFT[/TBT]]: prompts of the class "
        "queue as if they had come so much earlier (later, with a minus), and must be promised these times unless a "
        "header says otherwise. Every caller may name every class."))] = ("normal=0s", "low=-20s")
    tokenizer_threads: Annotated[int, Meta(description="Threads that render and tokenise long prompts.", ge=1)] = 2
    max_in_flight: Annotated[int, Meta(description="Requests at the same time; more are answered with 429.", ge=1)] = 4_096
    inline_bytes: Annotated[int, Meta(description=(
        "Request bodies up to this size are tokenised on the spot, larger ones in a thread."), ge=0, extra=BYTES)] = 4_096
    stream_buffer_tokens: Annotated[int, Meta(description=(
        "Tokens that may wait for a slow client; beyond it the request is cancelled."), gt=0)] = 4_096
    send_timeout_s: Annotated[float, Meta(description="Longest time a client may take to read what waits for it.",
                                          gt=0, extra=SECONDS)] = 60.0
    keepalive_comment_s: Annotated[float, Meta(description=(
        "Silence after which a stream gets an SSE comment, so that proxies keep it open."), gt=0, extra=SECONDS)] = 15.0

    def check(self) -> None:
        """Raises :class:`SettingError` for what can be known to be wrong before anything is opened."""
        if self.gateway_id and not re.fullmatch(r"[A-Za-z0-9_-]+", self.gateway_id):
            raise SettingError("gateway_id", self.gateway_id, "letters, digits, - and _")
        priorities(self.priorities, usual=Priority(head_start_s=0.0, ttft_slo_s=None, tbt_slo_s=None))
