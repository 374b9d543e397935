"""A profile from what a live run recorded: prefill, decode and transfer costs as the clients' answers tell them.

Every answer of the gateway carries where its time went (``x-moonbus-stages``) and which workers it had, and the
client records its gaps. From these, by least squares on relative errors with coefficients of at least 0:

* prefill seconds from computed tokens and the difference of squares, of all requests with stages;
* decode seconds a token from the batch and its context, averaged over each request's time on its decode worker;
* bytes a second of prefix pulls.

What a run cannot tell (the model's geometry, memory sizes, the SSD) is taken from a profile named ``like``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from load.record import RunRecord
from load.sim.profile import NodeProfile
from shared.errors import UserError
from shared.messages import Stages

_FEWEST = 8
"""Observations below which a model is not fitted."""
_MOST_ERROR = 0.2
"""Median error above which a fit is warned of."""
_LEAST_TOKEN_S = 1e-9
"""What a prompt's token costs at least: simulations ask how many tokens are done after a time."""
_COSTS = {"prefill": ("the cost of a prompt", "the cost of a token", "the cost of a token squared"),
          "decode": ("the cost of a step", "the cost of a request", "the cost of a token of context"),
          "transfer": ("the cost of a transfer", "the cost of a byte")}

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """One model's fit."""

    model: str
    observations: int
    median_error: float
    """Median of |fitted - observed| / observed."""
    costs: tuple[tuple[str, float], ...]
    """(what, seconds) of each cost; 0 where the fit found none."""

    def warnings(self) -> list[str]:
        """What to doubt about it, one line each."""
        found = []
        if self.median_error > _MOST_ERROR:
            found.append(f"{self.model}: half of the {self.observations} observations are off by more than "
                         f"{self.median_error:.0%}; do not trust what is simulated with it")
        found += [f"{self.model}: {what} came out as 0; the run may have been too short or too uniform to tell"
                  for what, seconds in self.costs if not seconds]
        return found


def fit_profile(records: Sequence[RunRecord], like: NodeProfile, *, name: str,
                source: str) -> tuple[NodeProfile, list[Fitted]]:
    """The profile called ``name`` and how well it fits; raises :class:`UserError` when nothing could be fitted."""
    changes: dict[str, float | str] = {"name": name, "source": source}
    fits: list[Fitted] = []
    known = [(record, _stages(record)) for record in records if record.outcome == "ok"]
    staged = [(record, stages) for record, stages in known if stages is not None and stages.prefill_s > 0]
    if len(staged) >= _FEWEST:
        tokens = np.array([float(record.prompt_tokens or record.input_tokens) for record, _ in staged])
        hits = np.array([float(stages.hit_tokens) for _, stages in staged])
        seconds = np.array([stages.prefill_s for _, stages in staged])
        features = np.stack([np.ones_like(tokens), tokens - hits, tokens ** 2 - hits ** 2], axis=1)
        fixed, linear, square = _fit("prefill", features, seconds, fits)
        if not linear + square > 0:
            linear = _LEAST_TOKEN_S
        changes |= {"prefill_fixed_s": fixed, "prefill_per_token_s": linear, "prefill_per_token2_s": square,
                    "reuse_fixed_s": 0.0, "reuse_per_token_s": 0.0}
    features, seconds = _steps([record for record, _ in known])
    if len(seconds) >= _FEWEST:
        fixed, request, context = _fit("decode", features, seconds, fits)
        changes |= {"decode_fixed_s": fixed, "decode_per_request_s": request, "decode_per_context_token_s": context}
    pulled = [stages for _, stages in staged if stages.fetched_bytes and stages.fetch_s > 0]
    if len(pulled) >= _FEWEST:
        nbytes = np.array([float(stages.fetched_bytes) for stages in pulled])
        waits = np.array([stages.fetch_s for stages in pulled])
        fixed, per_byte = _fit("transfer", np.stack([np.ones_like(nbytes), nbytes], axis=1), waits, fits)
        if per_byte > 0:
            changes |= {"transfer_fixed_s": fixed, "nic_gbps": 8e-9 / per_byte, "nic_efficiency": 1.0}
    if not fits:
        raise UserError(f"of {len(records)} records {len(staged)} tell the stages of their prefill and {len(seconds)} "
                        f"their gaps; at least {_FEWEST} of either are needed")
    return msgspec.structs.replace(like, **changes), fits


def _stages(record: RunRecord) -> Stages | None:
    text = record.headers.get("stages")
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Stages)
    except msgspec.DecodeError:
        return None  # of another version; what it does not tell is not used


def _steps(records: Sequence[RunRecord]) -> tuple[_Array, _Array]:
    """Features (1, batch, context tokens) and seconds a token, one row a request with at least two gaps."""
    together: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.first_token_s is not None and len(record.gaps_s) > 1:
            together[record.headers.get("decode-worker", "")].append(record)
    features, seconds = [], []
    for neighbours in together.values():
        starts = np.array([record.first_token_s for record in neighbours], dtype=float)
        ends = np.array([record.finished_s for record in neighbours])
        contexts = np.array([(record.prompt_tokens or record.input_tokens) + len(record.gaps_s) / 2
                             for record in neighbours])
        for record, start_s, end_s in zip(neighbours, starts, ends, strict=True):
            shared = np.clip(np.minimum(ends, end_s) - np.maximum(starts, start_s), 0.0, None)
            share = shared / max(end_s - start_s, 1e-9)
            features.append((1.0, float(share.sum()), float(share @ contexts)))
            seconds.append(float(np.mean(record.gaps_s)))
    return np.array(features).reshape(-1, 3), np.array(seconds)


def _fit(model: str, features: _Array, seconds: _Array, fits: list[Fitted]) -> list[float]:
    """Least squares on relative residuals; a coefficient that would be negative is 0 and the rest is fitted again."""
    usable = seconds > 0
    rows, target = features[usable] / seconds[usable, None], np.ones(int(usable.sum()))
    kept = list(range(rows.shape[1]))
    coefficients = np.zeros(rows.shape[1])
    while kept:
        scale = np.maximum(np.abs(rows[:, kept]).max(axis=0), 1e-30)
        solved = np.linalg.lstsq(rows[:, kept] / scale, target, rcond=None)[0] / scale
        if (solved >= 0).all():
            coefficients[kept] = solved
            break
        kept.pop(int(np.argmin(solved * scale)))
    errors = np.abs(rows @ coefficients - target)
    found = [float(value) for value in coefficients]
    fits.append(Fitted(model, len(target), float(np.median(errors)), tuple(zip(_COSTS[model], found, strict=True))))
    return found
