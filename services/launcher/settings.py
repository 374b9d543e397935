"""Settings of the embedded stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shared.settings import BYTES
from shared.stack_state import StackSettings


class Settings(StackSettings, frozen=True):
    """What ``moonbus up`` and ``moonbus demo`` take; everything else of a service is set in its own name."""

    model: Annotated[
        str, Meta(description="Model to serve: smollm2-135m, tiny-random, a directory or a hub id.")
    ] = "smollm2-135m"
    prefill: Annotated[int, Meta(description="Number of prefill workers.", ge=1, le=64)] = 2
    decode: Annotated[int, Meta(description="Number of decode workers.", ge=1, le=64)] = 2
    store: Annotated[int, Meta(description="Number of store workers, which lend memory and compute nothing.", ge=0, le=64)] = 0
    elastic: Annotated[bool, Meta(description="Prefill and decode workers take each other's jobs, as load asks for.")] = False
    host: Annotated[str, Meta(description="Address the gateway listens on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(description="Port the gateway listens on; 0 picks a free one.", ge=0, le=65535)
    ] = 8000
    block_tokens: Annotated[int, Meta(description="Tokens in a KV block.", ge=1, le=4096)] = 64
    threads: Annotated[int, Meta(description="Torch threads of a worker; 0 shares the cores out.", ge=0)] = 0
    pool_bytes: Annotated[
        int, Meta(description="KV pool of a worker; 0 shares part of the free memory.", ge=0, extra=BYTES)
    ] = 0

    @property
    def log_path(self) -> Path:
        """Directory of the children's logs."""
        return self.data_path() / "logs"

    @property
    def trace_path(self) -> Path:
        """File the services append finished spans to."""
        if self.trace_file:
            return Path(self.trace_file).expanduser().absolute()
        return self.data_path() / "trace.jsonl"
