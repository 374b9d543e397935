"""Settings of every worker."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.settings import BYTES, CommonSettings
from shared.transfer.settings import TransferSettings


class WorkerSettings(CommonSettings, frozen=True, kw_only=True):
    """What a prefill and a decode worker both take."""

    worker_id: Annotated[str, Meta(description="Name of the worker; empty for a fresh one. Must be unique in the cluster.")] = ""
    model: Annotated[str, Meta(description="Model to serve: a name of `moonbus models ls`, a Hugging Face directory or hub id.")] = "smollm2-135m"
    device: Annotated[str, Meta(description="cpu, cuda or cuda:N.")] = "cpu"
    dtype: Annotated[str, Meta(description="float32, bfloat16 or float16, of weights, compute and KV.")] = "float32"
    threads: Annotated[int, Meta(description="Threads torch computes with; 0 for all cores.", ge=0)] = 0
    pool_bytes: Annotated[int, Meta(description="Memory for KV blocks: running requests and cache together.", gt=0, extra=BYTES)] = 1 << 30
    block_tokens: Annotated[int, Meta(description="Tokens of a block; the same on all workers of a model.", ge=1)] = 64
    chunk_tokens: Annotated[int, Meta(description="Most new tokens of one forward pass; a multiple of block_tokens.", ge=1)] = 256
    transfer: TransferSettings = TransferSettings()
    """The settings of the transfer engine, ``transfer_…``."""
