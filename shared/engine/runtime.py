"""Runs a model of transformers over the paged pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.engine import attention, libraries
from shared.engine.batch import Batch, Row
from shared.engine.kv_pool import DTYPES, KVPool
from shared.errors import ModelError
from shared.kv import CacheSpec
from shared.models import ModelDir

__all__ = ["Engine", "Row"]

_CHECK_TOKENS = 24
_CHECK_TOLERANCE = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.05}
"""Largest error of a logit, as a share of the logits' standard deviation, that rounding explains."""


class Engine:
    """A loaded model and its pool. Not thread-safe: one thread runs the passes."""

    def __init__(self, model: Any, spec: CacheSpec, pool: KVPool) -> None:
        self._model = model
        self.spec, self.pool = spec, pool

    @classmethod
    def load(cls, model: ModelDir, spec: CacheSpec, pool: KVPool, *, device: str = "cpu", threads: int = 0) -> Engine:
        """Loads ``model`` in ``spec.dtype`` on ``device``; ``threads`` is torch's for the whole process, 0 leaves it.

        Runs a short text through the first slots, so call it before the pool holds anything. Raises
        :class:`ModelError` when the model cannot be served over paged blocks (see :meth:`check`).
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
        engine.check(model.name)
        return engine

    def forward(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Computes the rows' new tokens, whose KV is in the pool afterwards.

        ``on_layer(layer)`` is called as soon as that layer's new KV of all rows is in the pool, before the layer
        attends; layers come in order. Returns logits of each row's last token, float32 [rows, vocab] on the CPU.
        """
        with torch.inference_mode():
            batch = Batch(rows, self.pool)
            output = self._model(
                input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False,
                logits_to_keep=batch.last, paged=attention.Pass(batch, on_layer),
            )
            if on_layer is None:  # else each layer has been copied as it came
                self.pool.to_host(batch.written)
            logits: torch.Tensor = output.logits[0]
            return logits.float().cpu()

    def check(self, name: str) -> None:
        """Proves that the model computes over paged blocks what it computes without them; raises :class:`ModelError`.

        Architectures may do things with attention that we don't know of (sinks, biases, layers that share or have no
        keys); served anyway, they would answer nonsense without any error.
        """
        what = f"model {name} cannot be served over paged KV blocks"
        room = self.pool.num_blocks * self.spec.block_tokens
        tokens = np.arange(min(_CHECK_TOKENS, room), dtype=np.uint32)
        slots = range(self.pool.num_blocks)
        layers: list[int] = []
        try:
            self.forward([Row(tokens[:-2], 0, slots)], layers.append)
            ours = self.forward([Row(tokens[-2:], len(tokens) - 2, slots)])[0]
            plain = self._plain_logits(tokens)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ModelError(f"{what}: {str(error).splitlines()[0]}") from error
        if layers != list(range(self.spec.layers)):
            raise ModelError(f"{what}: of {self.spec.layers} layers, attention ran in {layers}")
        error_share = float((ours - plain).abs().max() / plain.std())
        if not error_share < _CHECK_TOLERANCE[self.spec.dtype]:
            raise ModelError(f"{what}: its logits differ from the model's own by {error_share:.2g} of their spread")

    def _plain_logits(self, tokens: npt.NDArray[np.uint32]) -> torch.Tensor:
        """The last token's logits by transformers' own attention: float32 [vocab] on the CPU."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.pool.device)[None]
        self._model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        finally:
            self._model.set_attn_implementation(attention.NAME)
        return logits.float().cpu()
