"""What work costs, in seconds: linear models that start from a worker's profile and follow what is observed.

Each model is ``seconds = coefficients · features`` with non-negative coefficients:

* prefill of ``n`` tokens over a cached prefix of ``p``: features ``(1, n - p, n² - p²)``
* a decode step of ``b`` requests with ``c`` tokens of context in all: ``(1, b, c)``
* a transfer of ``x`` bytes, those already under way on the link counted in: ``(1, x)``

A fit looks at the last observations, newer ones weighing more. First the *pace*: the weighted median of observed over
profiled seconds, which an outlier cannot move and which shows a worker turned slower after a handful of requests.
Then the *shape*: least squares on relative residuals (Huber weights, three rounds), pulled softly towards pace times
profile, so that coefficients the traffic says nothing about keep a sane ratio to the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.messages import Profile

_WINDOW = 32
_DECAY = 0.87
"""Weight of an observation relative to the one after it: five new ones outweigh all older ones."""
_PULL = 0.01
"""Strength of the pull towards the profile, in observations."""
_HUBER = 0.25
"""Relative residual beyond which an observation weighs less."""
_CLIP = 8.0
"""An observation further than this factor from the pace counts as if it were at this factor."""
_RANGE = 100.0
"""Coefficients stay within this factor of the profile's."""
_SHARE = 0.25
"""The unit a coefficient changes in is its profiled value, or this share of an ordinary case's time when that is
more: a profile is measured once, and noise can make a coefficient vanish from it."""

_Array = npt.NDArray[np.float64]


class Fit:
    """One cost model of one worker."""

    def __init__(self, profile: Sequence[float], *, typical: Sequence[float]) -> None:
        """``typical`` are the features of an ordinary case, all above 0."""
        finite = np.nan_to_num(np.asarray(profile, dtype=float), nan=0.0, posinf=0.0, neginf=0.0)
        self._profile: _Array = np.maximum(finite, 1e-15)
        ordinary = np.asarray(typical, dtype=float)
        #: the unit in which each coefficient changes
        self._unit: _Array = np.maximum(self._profile, _SHARE * float(self._profile @ ordinary) / ordinary)
        self._coefficients: tuple[float, ...] = tuple(self._profile.tolist())
        self._features: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self.observations = 0
        """How many were taken in."""
        self.relative_error: float | None = None
        """Smoothed |predicted - observed| / observed, each measured before it was learnt from; ``None`` before any."""

    def seconds(self, *features: float) -> float:
        """The prediction."""
        return sum(coefficient * feature for coefficient, feature in zip(self._coefficients, features, strict=True))

    def observe(self, seconds: float, *features: float) -> bool:
        """Learns; answers False and changes nothing when the numbers cannot be true."""
        if not (math.isfinite(seconds) and seconds > 0 and all(math.isfinite(f) and f >= 0 for f in features)):
            return False
        error = abs(self.seconds(*features) - seconds) / seconds
        self.relative_error = error if self.relative_error is None else 0.8 * self.relative_error + 0.2 * error
        self._features.append(features)
        self._seconds.append(seconds)
        self.observations += 1
        self._refit()
        return True

    def _refit(self) -> None:
        features, seconds = np.array(self._features), np.array(self._seconds)
        profiled = features @ self._profile
        age_weights = _DECAY ** np.arange(len(seconds) - 1, -1, -1, dtype=float)
        pace = _weighted_median(seconds / profiled, age_weights)
        seconds = np.clip(seconds, profiled * pace / _CLIP, profiled * pace * _CLIP)
        # rows in parts of one observation: what a change of each coefficient by its unit, times pace, would add
        parts = features * (self._unit * pace) / seconds[:, None]
        short = 1.0 - profiled * pace / seconds
        change = np.zeros(len(self._profile))
        for _ in range(3):
            residuals = short - parts @ change
            weights = age_weights * np.minimum(1.0, _HUBER / np.maximum(np.abs(residuals), 1e-9))
            weighted = parts * weights[:, None]
            change = np.linalg.solve(weighted.T @ parts + _PULL * np.eye(len(change)), weighted.T @ short)
        fitted = np.clip(self._profile + self._unit * change, self._profile / _RANGE, self._unit * _RANGE)
        self._coefficients = tuple((pace * fitted).tolist())


class Costs:
    """The models of one worker."""

    def __init__(self, profile: Profile) -> None:
        self._prefill = Fit((profile.prefill_fixed_s, profile.prefill_per_token_s, profile.prefill_per_token2_s),
                            typical=(1.0, 1e3, 1e6))
        self._decode = Fit((profile.decode_fixed_s, profile.decode_per_request_s, profile.decode_per_context_token_s),
                           typical=(1.0, 4.0, 4e3))
        link = (profile.transfer_fixed_s, 1.0 / max(profile.transfer_bytes_per_s, 1.0))
        self._links = {same_host: Fit(link, typical=(1.0, 1e6)) for same_host in (True, False)}

    def prefill_s(self, *, num_tokens: int, hit_tokens: int) -> float:
        """Computing ``num_tokens`` of which the first ``hit_tokens`` are cached."""
        return self._prefill.seconds(*_prefill_features(num_tokens, hit_tokens))

    def observe_prefill(self, seconds: float, *, num_tokens: int, hit_tokens: int) -> bool:
        """One prefill took ``seconds`` of computing."""
        features = _prefill_features(num_tokens, hit_tokens)
        return num_tokens > hit_tokens >= 0 and self._prefill.observe(seconds, *features)

    def step_s(self, *, batch: int, context_tokens: int) -> float:
        """One decode step."""
        return self._decode.seconds(1.0, batch, context_tokens)

    def observe_step(self, seconds: float, *, batch: int, context_tokens: int) -> bool:
        """Decode steps took ``seconds`` each."""
        return batch > 0 and self._decode.observe(seconds, 1.0, batch, context_tokens)

    def transfer_s(self, nbytes: int, *, same_host: bool) -> float:
        """``nbytes`` into this worker, those ahead of it on the link counted in."""
        return self._links[same_host].seconds(1.0, nbytes)

    def observe_transfer(self, seconds: float, nbytes: int, *, same_host: bool) -> bool:
        """``nbytes`` (those ahead included) took ``seconds``."""
        return nbytes > 0 and self._links[same_host].observe(seconds, 1.0, nbytes)

    def errors(self) -> dict[str, float]:
        """{model: smoothed relative error}, of the models that have seen something."""
        fits = {"prefill": self._prefill, "decode": self._decode, "transfer_same_host": self._links[True],
                "transfer_other_host": self._links[False]}
        return {name: fit.relative_error for name, fit in fits.items() if fit.relative_error is not None}


def _prefill_features(num_tokens: int, hit_tokens: int) -> tuple[float, float, float]:
    return 1.0, float(num_tokens - hit_tokens), float(num_tokens) ** 2 - float(hit_tokens) ** 2


def _weighted_median(values: _Array, weights: _Array) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
