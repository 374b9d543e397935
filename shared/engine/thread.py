"""The engine on a thread of its own: the event loop asks for steps and gets token ids; tensors never leave here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.kv import CacheSpec
from shared.messages import Profile, Sampling
from shared.models import ModelDir


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step."""

    tokens: npt.NDArray[np.uint32]
    """New tokens, shape ``(n,)``, at positions ``start .. start + n - 1``."""
    start: int
    blocks: Sequence[int]
    """Slots of the pool that cover positions ``0 .. start + n - 1``, in order."""
    sampling: Sampling | None = None
    """How to choose the token at position ``start + n``; ``None`` when none is wanted."""
    generated: int = 0
    """How many tokens of the answer came before the one to choose."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step brought."""

    tokens: list[int | None]
    """One for each work that wanted one, in the order of the works."""
    seconds: float
    """The step's own time on the engine's thread, without waiting for the steps before it."""


class EngineThread:
    """One thread, one step at a time, in the order asked."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self.profile = Profile()
        self._block_tokens = 1
        self._on_device = False
        #: slots that were handed out since the engine wrote or loaded them: the accelerator may lack their bytes
        self._behind: set[int] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, model: ModelDir, spec: CacheSpec, num_blocks: int, memory: memoryview, *, device: str,
                   threads: int) -> AsyncIterator[EngineThread]:
        """Loads ``model`` with its KV pool over ``memory`` (``num_blocks * spec.block_bytes`` writable bytes).

        The memory stays the caller's; the engine drops every view of it before this context ends.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        engine = cls(executor)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(executor, engine._load, model, spec, num_blocks, memory, device, threads)
            yield engine
        finally:
            await loop.run_in_executor(executor, engine._unload)
            executor.shutdown(wait=True)

    async def step(self, works: Sequence[Work], on_layer: Callable[[int], None] | None = None) -> Computed:
        """One forward pass over ``works``, then one token for each that wants one.

        ``on_layer(layer)`` is called on the engine's thread as soon as that layer's KV of all works is in the pool.
        """
        stale = self._take_stale(works)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._step, works, stale, on_layer)
        except BaseException:
            self._behind.update(stale)
            raise

    def handed_out(self, slots: Sequence[int]) -> None:
        """Somebody is about to fill these slots of the pool, in its memory unless the engine does. What lies there is
        copied to the accelerator before it is needed; a CPU's pool is that memory."""
        if self._on_device:
            self._behind.update(slots)

    def _take_stale(self, works: Sequence[Work]) -> list[int]:
        """Slots to copy before the step that are read in it. Those that are written in it are behind no more."""
        if not self._behind:
            return []
        stale = {slot for work in works for slot in work.blocks[:-(-work.start // self._block_tokens)]} & self._behind
        self._behind.difference_update(*(work.blocks for work in works))
        return sorted(stale)

    # --- on the thread -----------------------------------------------------------------------------------------

    def _load(self, model: ModelDir, spec: CacheSpec, num_blocks: int, memory: memoryview, device: str,
              threads: int) -> None:
        from shared.engine.kv_pool import KVPool
        from shared.engine.profile import measure
        from shared.engine.runtime import Engine

        self._pool = KVPool(spec, num_blocks, memory, device)
        self._on_device, self._block_tokens = device != "cpu", spec.block_tokens
        self._engine = Engine.load(model, spec, self._pool, device=device, threads=threads)
        self.profile = measure(self._engine)

    def _unload(self) -> None:
        self.__dict__.pop("_engine", None)
        pool = self.__dict__.pop("_pool", None)
        if pool is not None:
            pool.close()

    def _step(self, works: Sequence[Work], stale: Sequence[int],
              on_layer: Callable[[int], None] | None) -> Computed:
        from shared.engine.runtime import Row
        from shared.engine.sampler import sample

        began_s = time.perf_counter()
        if stale:
            self._pool.to_device(stale)
        logits = self._engine.forward([Row(work.tokens, work.start, work.blocks) for work in works], on_layer)
        wanted = [i for i, work in enumerate(works) if work.sampling is not None]
        if not wanted:
            return Computed([None] * len(works), time.perf_counter() - began_s)
        params = [work.sampling for work in works if work.sampling is not None]
        positions = [works[i].start + len(works[i].tokens) for i in wanted]
        generated = [works[i].generated for i in wanted]
        tokens = dict(zip(wanted, sample(logits[wanted], params, positions, generated), strict=True))
        return Computed([tokens.get(i) for i in range(len(works))], time.perf_counter() - began_s)
