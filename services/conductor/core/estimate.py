"""What work costs, in seconds: linear models that start from a worker's profile and follow what is observed.

Each model is ``seconds = coefficients · features`` with non-negative coefficients:

* prefill of ``n`` tokens over a cached prefix of ``p``: features ``(1, n - p, n² - p²)``
* a decode step of ``b`` requests with ``c`` tokens of context in all: ``(1, b, c)``
* reading ``x`` bytes from an SSD: ``(1, x)``
* a transfer of ``x`` bytes, those already under way on the link counted in: ``(1, x)``

A fit is told one observation after the other and remembers sums only. First the *pace*: the weighted median of observed
over profiled seconds among the last few, which an outlier cannot move and which shows a worker turned slower after a
handful of requests. Then the *shape*: recursive least squares on relative residuals with exponential forgetting and
Huber weights, pulled softly towards pace times profile, so that coefficients the traffic says nothing about keep a
sane ratio to the others. An observation counts in full when it agrees with the fit or with the pace. When most of the
last few disagree with the fit by one factor, all that was learnt before is taken to have changed by that factor: a
worker that turned slower keeps its shape.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from operator import mul

from shared.messages import Profile

_PACE_WINDOW = 16
_DECAY = 0.87
"""Weight in the pace of an observation relative to the one after it: five new ones outweigh all older ones."""
_WEIGHTS = tuple(itertools.accumulate(itertools.repeat(_DECAY, _PACE_WINDOW - 1), mul, initial=1.0))
"""Of all in the window, the newest first."""
_FORGET = 0.97
"""The same in the shape, which changes less: half of it is from the last 23."""
_RECENT = 7
_DRIFT = 1.3
"""When most of the last few observations are further than this factor from the fit, the worker has another pace."""
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
_LEAST = 1e-15
"""No coefficient of a profile is smaller."""


class Fit:
    """One cost model of one worker."""

    def __init__(self, profile: Sequence[float], *, typical: Sequence[float]) -> None:
        """``typical`` are the features of an ordinary case, all above 0."""
        self._profile = tuple(max(value, _LEAST) if math.isfinite(value) else _LEAST for value in profile)
        ordinary_s = _dot(self._profile, typical)
        #: the unit in which each coefficient changes
        self._unit = tuple(max(value, _SHARE * ordinary_s / feature)
                           for value, feature in zip(self._profile, typical, strict=True))
        self.coefficients = self._profile
        """Seconds for each unit of each feature."""
        #: observed over profiled seconds, the newest last
        self._ratios: deque[float] = deque(maxlen=_PACE_WINDOW)
        #: the last observations: (features, seconds)
        self._recent: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_RECENT)
        #: the normal equations of ``coefficients · features / seconds = 1``: matrix and right side
        self._squares = [[0.0] * len(self._profile) for _ in self._profile]
        self._sums = [0.0] * len(self._profile)
        self.observations = 0
        """How many were taken in."""
        self.relative_error: float | None = None
        """Smoothed |predicted - observed| / observed, each measured before it was learnt from; ``None`` before any."""

    def seconds(self, *features: float) -> float:
        """The prediction."""
        return _dot(self.coefficients, features)

    def observe(self, seconds: float, *features: float) -> bool:
        """Learns; answers False and changes nothing when the numbers cannot be true."""
        if not (0 < seconds < math.inf and min(features) >= 0 and sum(features) < math.inf):
            return False
        error = abs(_dot(self.coefficients, features) - seconds) / seconds
        self.relative_error = error if self.relative_error is None else 0.8 * self.relative_error + 0.2 * error
        self.observations += 1
        profiled_s = _dot(self._profile, features)
        self._ratios.append(seconds / profiled_s)
        pace = _recent_median(self._ratios)
        expected_s = pace * profiled_s
        seconds = min(max(seconds, expected_s / _CLIP), expected_s * _CLIP)
        self._add([feature / seconds for feature in features], expected_s / seconds)
        self.coefficients = self._solve(pace)
        self._recent.append((features, seconds))
        if len(self._recent) == _RECENT:
            drift = sorted(took_s / _dot(self.coefficients, these) for these, took_s in self._recent)[_RECENT // 2]
            if not 1 / _DRIFT < drift < _DRIFT:
                self._rescale(drift)
                self.coefficients = self._solve(pace)
        return True

    def _rescale(self, drift: float) -> None:
        """What was learnt keeps its shape and takes ``drift`` times as long from now on."""
        self._sums = [value / drift for value in self._sums]
        self._squares = [[value / drift**2 for value in row] for row in self._squares]

    def _add(self, row: list[float], paced: float) -> None:
        """``row`` are the features, ``paced`` is what pace and profile predict, both in parts of what was observed."""
        residual = min(abs(1.0 - _dot(self.coefficients, row)), abs(1.0 - paced))
        weight = min(1.0, _HUBER / max(residual, 1e-9))
        for i, part in enumerate(row):
            weighted = weight * part
            self._sums[i] = _FORGET * self._sums[i] + weighted
            squares = self._squares[i]
            for j, other in enumerate(row):
                squares[j] = _FORGET * squares[j] + weighted * other

    def _solve(self, pace: float) -> tuple[float, ...]:
        """The coefficients nearest to what was observed and, a little, to ``pace`` times the profile."""
        centre = [pace * value for value in self._profile]
        units = [pace * unit for unit in self._unit]
        size = range(len(centre))
        matrix = [[units[i] * units[j] * self._squares[i][j] + (_PULL if i == j else 0.0) for j in size] for i in size]
        right = [units[i] * (self._sums[i] - _dot(self._squares[i], centre)) for i in size]
        changes = _solved(matrix, right)
        return tuple(min(max(centre[i] + units[i] * changes[i], centre[i] / _RANGE), units[i] * _RANGE) for i in size)


class Costs:
    """The models of one worker."""

    def __init__(self, profile: Profile) -> None:
        self._prefill = Fit((profile.prefill_fixed_s, profile.prefill_per_token_s, profile.prefill_per_token2_s),
                            typical=(1.0, 1e3, 1e6))
        self._decode = Fit((profile.decode_fixed_s, profile.decode_per_request_s, profile.decode_per_context_token_s),
                           typical=(1.0, 4.0, 4e3))
        link = (profile.transfer_fixed_s, 1.0 / max(profile.transfer_bytes_per_s, 1.0))
        self._links = {same_host: Fit(link, typical=(1.0, 1e6)) for same_host in (True, False)}
        self._ssd = Fit((0.0, 1.0 / max(profile.ssd_bytes_per_s, 1.0)), typical=(1.0, 1e7))
        self.better_link = self._better_link()
        """Seconds for each transfer, and byte, at best: no transfer into this worker is predicted to take less."""

    @property
    def prefill(self) -> tuple[float, ...]:
        """Seconds for each prefill, token computed, and square of tokens: see :meth:`prefill_s`."""
        return self._prefill.coefficients

    @property
    def decode(self) -> tuple[float, ...]:
        """Seconds for each step, request, and token of context: see :meth:`step_s`."""
        return self._decode.coefficients

    def prefill_s(self, *, num_tokens: int, hit_tokens: int) -> float:
        """Computing ``num_tokens`` of which the first ``hit_tokens`` are cached."""
        fixed_s, token_s, square_s = self._prefill.coefficients
        return fixed_s + (num_tokens - hit_tokens) * (token_s + square_s * (num_tokens + hit_tokens))

    def done_share(self, done_tokens: float, *, num_tokens: int, hit_tokens: int) -> float:
        """Share of its seconds that a prefill has taken when so many of its tokens are computed, from 0 to 1. Later
        tokens take longer; what is fixed comes first."""
        if done_tokens <= 0:
            return 0.0
        whole_s = self.prefill_s(num_tokens=num_tokens, hit_tokens=hit_tokens)
        reached_tokens = min(hit_tokens + done_tokens, num_tokens)
        _, token_s, square_s = self._prefill.coefficients
        left_s = (num_tokens - reached_tokens) * (token_s + square_s * (num_tokens + reached_tokens))
        return min(max(1.0 - left_s / whole_s, 0.0), 1.0) if whole_s > 0 else 1.0

    def done_tokens(self, share: float, *, num_tokens: int, hit_tokens: int) -> float:
        """The other way: tokens that are computed after this share of its seconds."""
        fixed_s, token_s, square_s = self._prefill.coefficients
        spent_s = share * self.prefill_s(num_tokens=num_tokens, hit_tokens=hit_tokens) - fixed_s
        if spent_s <= 0:
            return 0.0
        at_s = token_s + 2.0 * square_s * hit_tokens  # what the first token takes
        root_s = math.sqrt(at_s * at_s + 4.0 * square_s * spent_s)
        return min(2.0 * spent_s / (at_s + root_s), float(num_tokens - hit_tokens))

    def observe_prefill(self, seconds: float, *, num_tokens: int, hit_tokens: int) -> bool:
        """One prefill took ``seconds`` of computing."""
        features = _prefill_features(num_tokens, hit_tokens)
        return num_tokens > hit_tokens >= 0 and self._prefill.observe(seconds, *features)

    def step_s(self, *, batch: float, context_tokens: float) -> float:
        """One decode step."""
        fixed_s, request_s, token_s = self._decode.coefficients
        return fixed_s + request_s * batch + token_s * context_tokens

    def observe_step(self, seconds: float, *, batch: int, context_tokens: int) -> bool:
        """Decode steps took ``seconds`` each."""
        return batch > 0 and self._decode.observe(seconds, 1.0, batch, context_tokens)

    def transfer_s(self, nbytes: int, *, same_host: bool) -> float:
        """``nbytes`` into this worker, those ahead of it on the link counted in."""
        fixed_s, byte_s = self._links[same_host].coefficients
        return fixed_s + byte_s * nbytes

    def observe_transfer(self, seconds: float, nbytes: int, *, same_host: bool) -> bool:
        """``nbytes`` (those ahead included) took ``seconds``."""
        if nbytes <= 0 or not self._links[same_host].observe(seconds, 1.0, nbytes):
            return False
        self.better_link = self._better_link()
        return True

    def ssd_s(self, nbytes: int) -> float:
        """Reading ``nbytes`` from this worker's SSD."""
        fixed_s, byte_s = self._ssd.coefficients
        return fixed_s + byte_s * nbytes

    def observe_ssd(self, seconds: float, nbytes: int) -> bool:
        """Reading ``nbytes`` took ``seconds``."""
        return nbytes > 0 and self._ssd.observe(seconds, 1.0, nbytes)

    def _better_link(self) -> tuple[float, float]:
        near, far = self._links[True].coefficients, self._links[False].coefficients
        return min(near[0], far[0]), min(near[1], far[1])

    def errors(self, *, least: int = 1) -> dict[str, float]:
        """{model: smoothed relative error}, of the models that have taken in ``least`` observations (1 or more)."""
        fits = {"prefill": self._prefill, "decode": self._decode, "transfer_same_host": self._links[True],
                "transfer_other_host": self._links[False], "ssd": self._ssd}
        return {name: fit.relative_error for name, fit in fits.items()
                if fit.relative_error is not None and fit.observations >= least}


def _prefill_features(num_tokens: int, hit_tokens: int) -> tuple[float, float, float]:
    return 1.0, float(num_tokens - hit_tokens), float(num_tokens) ** 2 - float(hit_tokens) ** 2


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two or three terms."""
    if len(one) == 3:
        a, b, c = one
        x, y, z = other
        return a * x + b * y + c * z
    a, b = one
    x, y = other
    return a * x + b * y


def _recent_median(values: Sequence[float]) -> float:
    """The median of ``values``, the later ones weighing more."""
    weighted = sorted(zip(reversed(values), _WEIGHTS, strict=False))
    half = sum([weight for _, weight in weighted]) / 2
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= half:
            return value
    return weighted[-1][0]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a small symmetric positive definite system by elimination; needs no pivoting."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (right[i] - known) / matrix[i][i]
    return solution
