"""Settings of a store."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.errors import SettingError
from shared.kv import CacheSpec
from shared.settings import SECONDS
from shared.units import parse_bytes
from shared.worker.settings import StoreSettings


class Settings(StoreSettings, frozen=True, kw_only=True):
    """What a store takes beyond everybody's who keeps blocks."""

    max_specs: Annotated[int, Meta(description="Cache specs it lends for at the same time; each gets this share of pool_bytes, ssd_bytes and ssd_blocks.", ge=1, le=64)] = 2
    forget_after_s: Annotated[float, Meta(description="A spec no engine worker was heard of for so long gives its place to a new one.", gt=0, extra=SECONDS)] = 600.0
    values: Annotated[tuple[str, ...], Meta(description="Values other than KV to lend for, as name:size, for clients of the store; they count as specs.")] = ()

    def opaque_specs(self) -> list[CacheSpec]:
        """The specs of ``values``. Raises :class:`SettingError`."""
        specs = []
        for text in self.values:
            name, _, size = text.rpartition(":")
            try:
                nbytes = parse_bytes(size)
                if not name or nbytes < 1:
                    raise ValueError("a name, and a size of at least one byte")
                specs.append(CacheSpec.opaque(name, nbytes))
            except ValueError as error:
                raise SettingError("values", text, f"name:size, like embeddings:256KiB ({error})") from error
        if len(specs) > self.max_specs:
            raise SettingError("max_specs", self.max_specs, f"at least {len(specs)}, one for each of values")
        return specs
