"""What a node costs and holds, as data: ``profiles/*.json``, or a file of one's own (see ``moonbus sim fit``)."""

from __future__ import annotations

import json
import math
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import UserError
from shared.kv import CacheSpec
from shared.messages import Profile

_KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_Count = Annotated[int, Meta(ge=1)]
_Cost = Annotated[float, Meta(ge=0)]
_Rate = Annotated[float, Meta(gt=0)]


class NodeProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One kind of node serving one model. Seconds, bytes and tokens; ``GB`` are 10^9 bytes."""

    name: str
    source: str
    """Where the figures come from."""
    layers: _Count
    kv_heads: _Count
    head_dim: _Count
    dtype: Literal["float32", "bfloat16", "float16"]
    prefill_fixed_s: _Cost
    prefill_per_token_s: _Cost
    prefill_per_token2_s: _Cost
    """Prefill of ``n`` tokens over ``p`` reused ones: ``fixed + a (n - p) + b (n² - p²)`` seconds of the GPUs."""
    reuse_fixed_s: _Cost
    reuse_per_token_s: _Cost
    """Bringing ``p`` reused tokens from DRAM to the GPUs: ``fixed + c p``, when there are any. It begins when a prompt
    is ready and goes on beside the computing of others, so a prompt that has waited long enough does not notice it."""
    decode_fixed_s: _Cost
    decode_per_request_s: _Cost
    decode_per_context_token_s: _Cost
    """A decode step of ``b`` requests with ``c`` tokens of context in all: ``fixed + r b + t c`` seconds."""
    nic_gbps: _Rate
    nic_efficiency: Annotated[float, Meta(gt=0, le=1)]
    """Share of the nominal rate that transfers reach."""
    transfer_fixed_s: _Cost
    """Added to each transfer."""
    push_tail_s: _Cost
    """Between the end of a prefill's computing and its KV being complete at the decode node, on an idle link."""
    ssd_bytes_per_s: _Rate
    vram_bytes: _Rate
    weights_bytes: _Cost
    vram_reserved_share: Annotated[float, Meta(ge=0, lt=1)]
    """Share of the memory that is neither weights nor KV."""
    dram_tokens: Annotated[int, Meta(ge=0)]
    """Tokens of KV the DRAM cache holds."""
    prefill_chunk_tokens: _Count
    """A prefill can be put aside at multiples of it."""
    max_running: _Count
    """Requests in a decode batch."""

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of KV of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _KV_BYTES[self.dtype]

    @cached_property
    def vram_tokens(self) -> int:
        """Tokens of KV the GPUs hold beside the weights; below 1 when the model does not fit."""
        room = self.vram_bytes * (1 - self.vram_reserved_share) - self.weights_bytes
        return int(room // self.kv_bytes)

    def compute_s(self, start: float, end: float) -> float:
        """Computing tokens ``[start, end)`` of one prompt, without what is fixed for each prompt."""
        return (end - start) * (self.prefill_per_token_s + self.prefill_per_token2_s * (end + start))

    def reuse_s(self, tokens: float) -> float:
        """Bringing ``tokens`` reused tokens to the GPUs."""
        return self.reuse_fixed_s + self.reuse_per_token_s * tokens if tokens else 0.0

    def prefill_s(self, num_tokens: float, hit_tokens: float = 0) -> float:
        """The whole prefill of a prompt."""
        return self.prefill_fixed_s + self.reuse_s(hit_tokens) + self.compute_s(hit_tokens, num_tokens)

    def tokens_by(self, start: float, seconds: float) -> float:
        """How far computing from token ``start`` on is after ``seconds``."""
        a, b = self.prefill_per_token_s, self.prefill_per_token2_s
        if b <= 0:
            return start + seconds / a
        target = a * start + b * start * start + seconds
        return float((-a + (a * a + 4 * b * target) ** 0.5) / (2 * b))

    def nic_bytes_per_s(self, nic_gbps: float | None = None) -> float:
        """Bytes a second that a node sends, and takes in."""
        return (self.nic_gbps if nic_gbps is None else nic_gbps) * 1e9 / 8 * self.nic_efficiency

    def grouped(self, nodes: int) -> NodeProfile:
        """So many nodes as one prefill worker: chunks of a prompt are at different nodes at the same time.

        The layers are divided, so each chunk takes every node its share of the time; the next prompt enters while the
        last chunk of the one before is still on its way through the other nodes.
        """
        if nodes == 1:
            return self
        on_its_way_s = self.compute_s(0, self.prefill_chunk_tokens) * (nodes - 1) / nodes
        return msgspec.structs.replace(
            self, name=f"{self.name} x{nodes}", prefill_per_token_s=self.prefill_per_token_s / nodes,
            prefill_per_token2_s=self.prefill_per_token2_s / nodes, reuse_per_token_s=self.reuse_per_token_s / nodes,
            nic_gbps=self.nic_gbps * nodes, push_tail_s=self.push_tail_s + on_its_way_s,
            dram_tokens=self.dram_tokens * nodes, ssd_bytes_per_s=self.ssd_bytes_per_s * nodes)

    def spec(self, block_tokens: int) -> CacheSpec:
        """The cache spec its workers register."""
        return CacheSpec(
            model=self.name, weights_digest="simulated", tokenizer_digest="simulated", dtype=self.dtype,
            layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, block_tokens=block_tokens,
            max_context=1 << 20)

    def announced(self, nic_gbps: float | None = None) -> Profile:
        """What its workers say of themselves."""
        return Profile(
            prefill_fixed_s=self.prefill_fixed_s, prefill_per_token_s=self.prefill_per_token_s,
            prefill_per_token2_s=self.prefill_per_token2_s, decode_fixed_s=self.decode_fixed_s,
            decode_per_request_s=self.decode_per_request_s,
            decode_per_context_token_s=self.decode_per_context_token_s,
            transfer_bytes_per_s=self.nic_bytes_per_s(nic_gbps), transfer_fixed_s=self.transfer_fixed_s,
            ssd_bytes_per_s=self.ssd_bytes_per_s)


def names() -> list[str]:
    """Profiles that come with moonbus."""
    folder = resources.files("load.sim") / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_profile(name: str) -> NodeProfile:
    """The profile called ``name``, or the one in the file of that name; raises :class:`UserError`."""
    try:
        raw = (Path(name).read_bytes() if name.endswith(".json")
               else (resources.files("load.sim") / "profiles" / f"{name}.json").read_bytes())
    except OSError as error:
        raise UserError(f"there is no profile {name}; there are {', '.join(names())}, or give a .json file") from error
    try:
        profile = msgspec.json.decode(raw, type=NodeProfile)
    except msgspec.DecodeError as error:
        raise UserError(f"profile {name}: {_why(raw, error)}") from error
    if not profile.prefill_per_token_s + profile.prefill_per_token2_s > 0:
        raise UserError(f"profile {name}: prefill_per_token_s and prefill_per_token2_s are both 0; a prompt's tokens "
                        "must cost something, so one of them must be above 0")
    if not profile.decode_fixed_s + profile.decode_per_request_s + profile.decode_per_context_token_s > 0:
        raise UserError(f"profile {name}: decode_fixed_s, decode_per_request_s and decode_per_context_token_s are all "
                        "0; a decode step must take time, so one of them must be above 0")
    return profile


def _numbers(raw: bytes) -> dict[str, float]:
    """Fields that are numbers with a point, NaN and infinities, which JSON does not have, among them."""
    try:
        fields = json.loads(raw)
    except ValueError:
        return {}
    if not isinstance(fields, dict):
        return {}
    return {name: value for name, value in fields.items() if isinstance(value, float)}


def _why(raw: bytes, error: msgspec.DecodeError) -> str:
    """What is wrong, with the field's name and value where it is a field."""
    for name, value in _numbers(raw).items():
        if not math.isfinite(value):
            return f"{name} is {value}: expected a number"
    expected, _, field = str(error).partition(" - at `$.")
    field = field.removesuffix("`")
    if not field:
        return str(error)
    value = msgspec.json.decode(raw)[field]
    if field == "dtype":
        expected = f"expected one of {', '.join(_KV_BYTES)}"
    return f"{field} is {msgspec.json.encode(value).decode()}: {expected[:1].lower()}{expected[1:]}"
