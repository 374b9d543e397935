"""Settings of every worker: of those that only keep blocks, and of those that compute."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.settings import BYTES, CommonSettings
from shared.store.policies import DEFAULT
from shared.store.settings import SsdSettings
from shared.transfer.settings import TransferSettings


class StoreSettings(CommonSettings, frozen=True, kw_only=True):
    """What everybody takes who keeps KV blocks."""

    worker_id: Annotated[str, Meta(description="Name of the worker; empty for a fresh one. Must be unique in the cluster, and set where ssd_dir is.")] = ""
    pool_bytes: Annotated[int, Meta(description="Memory for KV blocks: running requests and cache together.", gt=0, extra=BYTES)] = 1 << 30
    cache_policy: Annotated[str, Meta(description="Which cached blocks go first when memory is needed; `moonbus load cache-sim` compares the policies.")] = DEFAULT
    door_tenants: Annotated[Literal["own", "all"], Meta(description="Whose values a client of the store finds, pins and removes: own (those of the tenant that it acts for) or all.")] = "own"
    ssd: SsdSettings = SsdSettings()
    """The settings of the SSD tier, ``ssd_…``."""
    transfer: TransferSettings = TransferSettings()
    """The settings of the transfer engine, ``transfer_…``."""


class WorkerSettings(StoreSettings, frozen=True, kw_only=True):
    """What a prefill and a decode worker both take."""

    model: Annotated[str, Meta(description="Model to serve: a name of `moonbus models ls`, a Hugging Face directory or hub id.")] = "smollm2-135m"
    device: Annotated[str, Meta(description="cpu, cuda or cuda:N.")] = "cpu"
    dtype: Annotated[str, Meta(description="float32, bfloat16 or float16, of weights, compute and KV.")] = "float32"
    threads: Annotated[int, Meta(description="Threads torch computes with; 0 for all cores.", ge=0)] = 0
    block_tokens: Annotated[int, Meta(description="Tokens of a block; the same on all workers of a model.", ge=1)] = 64
    chunk_tokens: Annotated[int, Meta(description="Most new tokens of one forward pass; a multiple of block_tokens.", ge=1)] = 256
    elastic: Annotated[bool, Meta(description="It also takes the jobs of the other role, prefill or decode, as the conductors see fit; what the other role has settings of its own for keeps its own name, as MOONBUS_DECODE_MAX_RUNNING of a prefill worker.")] = False
