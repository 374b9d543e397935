"""Runs a model of transformers over the paged pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shared.engine import attention, libraries
from shared.engine.batch import Batch, Row
from shared.engine.kv_pool import DTYPES, KVPool
from shared.errors import ModelError
from shared.kv import CacheSpec
from shared.models import ModelDir

__all__ = ["Engine", "Row"]


class Engine:
    """A loaded model and its pool. Not thread-safe: one thread runs the passes."""

    def __init__(self, model: Any, spec: CacheSpec, pool: KVPool) -> None:
        self._model = model
        self.spec, self.pool = spec, pool

    @classmethod
    def load(cls, model: ModelDir, spec: CacheSpec, pool: KVPool, *, device: str = "cpu", threads: int = 0) -> Engine:
        """Loads ``model`` in ``spec.dtype`` on ``device``; ``threads`` is torch's for the whole process, 0 leaves it.

        Runs one token through slot 0, so call it before the pool holds anything. Raises :class:`ModelError`
        when the model cannot be served over paged blocks.
        """
        if threads:
            torch.set_num_threads(threads)
        transformers = libraries.transformers()
        from transformers.masking_utils import AttentionMaskInterface

        attention.register(transformers.AttentionInterface, AttentionMaskInterface)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # On a CPU the weights stay mapped from the files, so processes of one host share them.
                loaded = transformers.AutoModelForCausalLM.from_pretrained(
                    model.path, dtype=DTYPES[spec.dtype], attn_implementation=attention.NAME,
                    local_files_only=True, trust_remote_code=False, use_safetensors=True,
                )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"model {model.name} in {model.path} cannot be loaded: {first_line}") from error
        engine = cls(loaded.to(device).eval().requires_grad_(False), spec, pool)
        engine._check(model.name)
        return engine

    @property
    def vocab(self) -> int:
        """Width of the logits."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    def forward(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Computes the rows' new tokens, whose KV is in the pool afterwards.

        ``on_layer(layer)`` is called as soon as that layer's new KV of all rows is in the pool, before the layer
        attends; layers come in order. Returns logits of each row's last token, float32 [rows, vocab] on the CPU.
        """
        with torch.inference_mode():
            paged = attention.Pass(Batch(rows, self.pool), on_layer)
            return self._run(paged)

    def _run(self, paged: attention.Pass) -> torch.Tensor:
        batch = paged.batch
        output = self._model(
            input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False,
            logits_to_keep=batch.last, paged=paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float().cpu()

    def _check(self, name: str) -> None:
        """One token must visit our attention once a layer, with the shapes that the spec promises."""
        what = f"model {name} cannot be served over paged KV blocks"
        try:
            with torch.inference_mode():
                paged = attention.Pass(Batch([Row(np.zeros(1, np.uint32), 0, [0])], self.pool), None)
                self._run(paged)
        except (TypeError, RuntimeError, IndexError) as error:
            raise ModelError(f"{what}: {str(error).splitlines()[0]}") from error
        if paged.layers != list(range(self.spec.layers)):
            raise ModelError(f"{what}: of {self.spec.layers} layers, attention ran in {paged.layers}")
