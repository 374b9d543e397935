"""The paper's figures again: what was published, simulated with its policy, and with ours, side by side.

Published values: Qin et al., "Mooncake", FAST'25 (figures 5, 8, 10; effective request capacity of section 5.2), read
off the figures to about 1 %, and its technical report arXiv 2407.00079 v3 (grid of section 8.1.2, table 3). What a
paper leaves open is stated with each table. Their caches evict what was used longest ago, ours as workers do. Where
simulation and publication differ, they differ: nothing is tuned to fit.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from load.sim import figures
from load.sim.experiment import Result, RunOptions, simulate
from load.sim.many import find_knee
from load.sim.page import Table, cell
from load.sim.profile import read_profile
from load.workload.traces import Arrival, Trace
from services.conductor.core.policies.registry import OURS
from shared.store.policies.lru import Lru

PARTS = ("fig5", "fig8", "fig10", "slo", "grid", "overload", "fig9")
TRACES = ("conversation_trace", "toolagent_like", "synthetic_trace")
"""File names without ``.jsonl``; the second is a stand-in for the paper's tool and agent trace."""

_SHORT = dict(zip(TRACES, ("conversation", "tool&agent (stand-in)", "synthetic"), strict=True))
_THEIRS = "mooncake_a1"

_FIG5 = {"mooncake_a1": 3.07, "cache_aware": 3.58, "least_load": 5.27, "random": 19.65}
_FIG8 = {"conversation_trace": (1.05, 1.65, 1.52, 2.0), "toolagent_like": (0.52, 1.11, 0.74, 1.41),
         "synthetic_trace": (0.73, 2.01, 1.89, 2.42)}
"""Mooncake, vLLM, with prefix cache, with chunked prefill: GPU seconds of a prefill."""
_FIG10 = {"conversation_trace": ((16.7, 37.2), (1.38, 1.05)), "toolagent_like": ((41.7, 58.0), (0.71, 0.52)),
          "synthetic_trace": ((26.3, 62.4), (1.49, 0.78))}
"""Hit percent, then prefill GPU seconds: local, global."""
_SLO = {"conversation_trace": ((96.9, 100, 100), (16.4, 39.1, 63.0), (15.3, 34.6, 56.2), (9.7, 29.1, 55.6)),
        "toolagent_like": ((93.4, 100, 100), (43.4, 45.6, 50.0), (56.8, 70.3, 81.6), (18.9, 21.6, 40.6)),
        "synthetic_trace": ((99.9, 100, 100), (61.6, 71.2, 78.3), (61.2, 71.1, 77.5), (46.8, 57.6, 69.7))}
"""Mooncake, vLLM, with prefix cache, with chunked prefill: percent inside TBT of 100, 200, 300 ms."""
_GRID = {16: (1.25, 0.2), 32: (0.6, 0.2), 64: (0.3, 0.2), 128: (0.14, 0.12)}
"""{thousands of prompt tokens: requests a second of 3 prefill + 1 decode nodes, of 4 vLLM instances}."""
_OVERLOAD_RATES = (2.0, 3.2)
_OVERLOAD = {"baseline": 4183, "early": 3771, "early_prediction": 3589}

_FIG9_S = 1200.0
_FIG9 = ((10, 10, 2.0), (16, 4, 6.0))
"""(prefill nodes, decode nodes, rate): the report's 20 nodes at twice the rate, divided as its other run on 20 nodes
says; and 20 nodes of which both pools are full here, which takes more decode work on fewer nodes."""
_VLLM_CHUNK = 512
"""Tokens of a chunk: the default of the vLLM they measured."""
_GRID_REQUESTS, _GRID_DOCUMENTS = 300, 16


@dataclass
class Outcome:
    """What a part brought."""

    tables: list[Table] = field(default_factory=list)
    figures: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    data: dict[str, object] = field(default_factory=dict)

    def told(self, unusual: Sequence[str]) -> Outcome:
        """The same; the titles of tables and the captions of figures say what is unusual about it."""
        def with_it(text: str) -> str:
            return f"{text} ({', '.join(unusual)})" if unusual else text

        return Outcome([replace(table, title=with_it(table.title)) for table in self.tables],
                       {name: (with_it(caption), png) for name, (caption, png) in self.figures.items()}, self.data)


def unusual(part: str, options: RunOptions, limit: int | None) -> list[str]:
    """What of ``part`` is simulated in another way than that whose figures the documentation has; of each trace the
    first ``limit`` requests, where the part is of a trace."""
    usual, said = RunOptions(), []
    if limit is not None and part != "grid":
        said.append(f"simulated: only the first {limit} requests")
    said += [f"{name} {getattr(options, name)}" for name in ("profile", "seed")
             if getattr(options, name) != getattr(usual, name)]
    return said


class Paper:
    """Runs the parts; a run that two parts need is made once.

    ``base`` are the options that all have, ``tell`` takes what is being run, for a person.
    """

    def __init__(self, traces: Mapping[str, Trace], base: RunOptions, tell: Callable[[str], None]) -> None:
        self.base, self._traces, self._tell = base, traces, tell
        self._results: dict[tuple[str, RunOptions], Result] = {}

    def run(self, part: str) -> Outcome:
        """One of :data:`PARTS`."""
        parts: dict[str, Callable[[], Outcome]] = {
            "fig5": self._fig5, "fig8": self._fig8, "fig10": self._fig10, "slo": self._slo, "grid": self._grid,
            "overload": self._overload, "fig9": self._fig9}
        return parts[part]()

    def _simulate(self, trace: str, **changes: object) -> Result:
        if changes.get("policy") != OURS:
            changes.setdefault("cache_policy", Lru.name)
        options = replace(self.base, **changes)  # type: ignore[arg-type]
        key = (trace, options)
        if key not in self._results:
            what = options.policy if not options.coupled else "coupled"
            self._tell(f"{trace}: {what} {', '.join(f'{name} {value}' for name, value in changes.items())}")
            self._results[key] = simulate(self._traces[trace], options)
        return self._results[key]

    def _fig5(self) -> Outcome:
        """Mean TTFT by scheduling; conversation, 16 nodes (8 and 8 here: the paper does not say)."""
        rows = []
        simulated: dict[str, float | None] = {}
        for policy in (*_FIG5, OURS):
            result = self._simulate("conversation_trace", policy=policy)
            simulated[policy] = result.summary.ttft_s.mean
            published, mean_s, global_s = _FIG5.get(policy), simulated[policy], simulated[_THEIRS]
            rows.append((policy, _number(published), cell(mean_s, ".2f"),
                         _number(published / _FIG5[_THEIRS]) if published else "",
                         cell(mean_s / global_s if mean_s is not None and global_s else None, ".2f")))
        heads = ("scheduling", "published", "simulated", "published, of global", "simulated, of global")
        note = ("Global cache-aware is mooncake_a1, local is cache_aware (the same, without transfers). Arrivals are "
                "the trace's, ten at the same moment every 3 s; how the paper replayed them is not said.")
        figure = figures.bars(list(simulated), {"published": [_FIG5.get(name) for name in simulated],
                                                "simulated": list(simulated.values())}, unit="mean TTFT, s")
        return Outcome([Table("FAST'25 figure 5: mean TTFT, s", heads, rows, note)],
                       {"fig5": ("Figure 5: mean TTFT by scheduling", figure)}, {"fig5": simulated})

    def _coupled(self, trace: str) -> tuple[Result, Result, Result]:
        return (self._simulate(trace, coupled=16), self._simulate(trace, coupled=16, prefix_cache=True),
                self._simulate(trace, coupled=16, chunk_tokens=_VLLM_CHUNK))

    def _fig8(self) -> Outcome:
        """GPU time of a prefill: 8 prefill and 8 decode nodes against 16 instances."""
        rows, data, ours, theirs = [], {}, [], []
        for trace in self._traces:
            mooncake = self._simulate(trace, policy=_THEIRS)
            moonbus = self._simulate(trace, policy=OURS)
            values = [result.summary.prefill_compute_s for result in (mooncake, *self._coupled(trace))]
            ours.append(moonbus.summary.prefill_compute_s)
            theirs.append(values)
            data[trace] = {"published": _FIG8[trace], "simulated": values, "moonbus": ours[-1]}
            for name, published, value in zip(("Mooncake", "vLLM", "vLLM, prefix cache", "vLLM, chunked"),
                                              _FIG8[trace], values, strict=True):
                rows.append((_SHORT[trace], name, f"{published:.2f}", f"{value:.2f}", _deviation(value, published)))
            rows.append((_SHORT[trace], "moonbus", "", f"{ours[-1]:.2f}", ""))
        figure = figures.bars([_SHORT[trace] for trace in self._traces], {
            "published": [_FIG8[trace][0] for trace in self._traces], "simulated": [values[0] for values in theirs],
            "moonbus": ours}, unit="GPU time of a prefill, s")
        note = "Computing only; loading reused KV is overlapped and not counted, as the paper's closed form has it."
        return Outcome([Table("FAST'25 figure 8: GPU time of a prefill, s",
                              ("workload", "system", "published", "simulated", "deviation"), rows, note)],
                       {"fig8": ("Figure 8: GPU time of a prefill", figure)}, {"fig8": data})

    def _fig10(self) -> Outcome:
        """Local against global cache: 10 prefill nodes of 3 M tokens, answers of one token."""
        rows, data = [], {}
        drawn: dict[str, list[float | None]] = {}
        for trace in self._traces:
            changes: dict[str, object] = {
                "prefill": 10, "output_tokens": 1, "dram_tokens": 3_000_000, "elastic": False}
            hits, seconds = _FIG10[trace]
            published: Sequence[tuple[str, str, float | None, float | None]] = (
                ("local", "cache_aware", hits[0], seconds[0]), ("global", _THEIRS, hits[1], seconds[1]),
                ("moonbus", OURS, None, None))
            for name, policy, hit, prefill_s in published:
                summary = self._simulate(trace, policy=policy, **changes).summary
                share = 100 * summary.hit_tokens / max(summary.prompt_tokens, 1)
                value = summary.prefill_compute_s
                data[f"{trace}/{name}"] = {"hit_percent": share, "prefill_s": value}
                if hit is not None:
                    drawn.setdefault(f"{name}, published", []).append(hit)
                drawn.setdefault(f"{name}, simulated", []).append(share)
                rows.append((_SHORT[trace], name, _number(hit), f"{share:.1f}", _number(prefill_s), f"{value:.2f}",
                             _deviation(value, prefill_s) if prefill_s else ""))
        heads = ("workload", "cache", "hit % published", "simulated", "prefill, s published", "simulated", "deviation")
        note = ("The paper's rule for the local cache is not published; ours routes by queue and own prefix, which "
                "finds more. Its blocks are smaller than the trace's 512 tokens, so its hits are a little more.")
        figure = figures.bars([_SHORT[trace] for trace in self._traces], drawn, unit="percent of prompt tokens reused")
        return Outcome([Table("FAST'25 figure 10: local and global cache", heads, rows, note)],
                       {"fig10": ("Figure 10: what is reused", figure)}, {"fig10": data})

    def _slo(self) -> Outcome:
        """Share of requests inside TTFT 30 s and a TBT threshold, at the trace's rate."""
        rows, data, drawn = [], {}, {}
        for trace in self._traces:
            runs = (("Mooncake", self._simulate(trace, policy=_THEIRS)),
                    *zip(("vLLM", "vLLM, prefix cache", "vLLM, chunked"), self._coupled(trace), strict=True),
                    ("moonbus", self._simulate(trace, policy=OURS)))
            for i, (name, result) in enumerate(runs):
                shares = [100 * _share(result, tbt_s) for tbt_s in (0.1, 0.2, 0.3)]
                published = _SLO[trace][i] if i < len(_SLO[trace]) else (None,) * 3
                data[f"{trace}/{name}"] = shares
                pairs = zip(published, shares, strict=True)
                rows.append((_SHORT[trace], name, *(text for said, share in pairs for text in (
                    _number(said), f"{share:.1f}"))))
            names = [name for name, _ in runs]
            drawn[f"slo-{trace}"] = (f"Inside TTFT 30 s and TBT 100 ms: {_SHORT[trace]}", figures.bars(names, {
                "published": [of[0] for of in _SLO[trace]] + [None] * (len(names) - len(_SLO[trace])),
                "simulated": [data[f"{trace}/{name}"][0] for name in names]}, unit="percent of all requests"))
        heads = ("workload", "system", "100 ms: published", "simulated", "200 ms: published", "simulated",
                 "300 ms: published", "simulated")
        note = "Percent of all requests; 8 prefill and 8 decode nodes against 16 instances, at the trace's own rate."
        return Outcome([Table("FAST'25 section 5.2: effective request capacity", heads, rows, note)], drawn,
                       {"slo": data})

    def _grid(self) -> Outcome:
        """Long contexts: 3 prefill nodes and 1 decode node against 4 instances."""
        rows, data = [], {}
        profile = read_profile(self.base.profile)
        for thousands, (published, published_vllm) in _GRID.items():
            trace = grid_trace(thousands * 1000)
            alone_s = profile.prefill_s(thousands * 1000)
            # the report's bounds: ten and five times the values at the lowest load
            base = replace(self.base, ttft_slo=f"{10 * alone_s:.3f}s", tbt_slo_s=5 * 0.0275, rate_scale=1.0)
            rates = []
            runs: tuple[dict[str, object], ...] = (
                {"prefill": 3, "decode": 1, "policy": _THEIRS}, {"coupled": 4, "policy": _THEIRS},
                {"prefill": 3, "decode": 1, "policy": OURS})
            for changes in runs:
                self._tell(f"grid {thousands}k: {changes}")
                if changes["policy"] != OURS:
                    changes["cache_policy"] = Lru.name
                knee = find_knee(trace, replace(base, **changes), low=0.02, high=64.0,  # type: ignore[arg-type]
                                 good_share=0.9)
                assert knee.rate_scale is not None  # find_knee raises where there is none
                rates.append(knee.rate_scale * len(trace.arrivals) / trace.duration_s)
            data[f"{thousands}k"] = rates
            rows.append((f"{thousands}k", f"{published:g}", f"{rates[0]:.2f}", f"{published_vllm:g}", f"{rates[1]:.2f}",
                         f"{published / published_vllm - 1:+.0%}", f"{rates[0] / rates[1] - 1:+.0%}", f"{rates[2]:.2f}",
                         f"{rates[2] / rates[1] - 1:+.0%}"))
        heads = ("prompt", "Mooncake published", "simulated", "vLLM published", "simulated", "gain published",
                 "simulated", "moonbus", "gain")
        note = (f"Requests a second with 90 % inside ten times the lowest TTFT and five times the lowest TBT. "
                f"{_GRID_REQUESTS} requests, Poisson, 512 tokens of answer, half of each prompt one of "
                f"{_GRID_DOCUMENTS} shared prefixes. The published rates are the highest of the few that were tried.")
        return Outcome([Table("Technical report: long contexts, 50 % cached", heads, rows, note)], {}, {"grid": data})

    def _overload(self) -> Outcome:
        """How many are turned away, and how many of those after their prefill."""
        rows, data = [], {}
        runs = [(name, _THEIRS, name) for name in _OVERLOAD] + [("moonbus", OURS, "slo")]
        outcome = Outcome()
        for rate, (name, policy, admission) in itertools.product(_OVERLOAD_RATES, runs):
            result = self._simulate("toolagent_like", policy=policy, admission=admission, rate_scale=rate)
            summary = result.summary
            turned_away = sum(summary.rejected.values())
            inside = round(summary.slo_share * summary.requests)
            data[f"{name} {rate:g}x"] = {"rejected": summary.rejected, "completed": summary.completed,
                                         "inside": inside, "wasted_prefill_s": summary.wasted_prefill_s}
            published = _OVERLOAD.get(name) if rate == _OVERLOAD_RATES[0] else None
            rows.append((f"{rate:g}x", name, _number(published), str(turned_away),
                         str(summary.rejected.get("decode", 0)), f"{summary.wasted_prefill_s:.0f}",
                         str(summary.completed), str(inside)))
            outcome.figures[f"overload-{name}-{rate:g}"] = (
                f"Overload {rate:g}x, {name}: load of the pools over time", figures.load_curve(result))
        heads = ("rate", "admission", "turned away, published", "simulated", "of those after prefill",
                 "wasted prefill, s", "completed", "inside both bounds")
        note = ("8 prefill and 8 decode nodes, TTFT 30 s, TBT 100 ms, on the stand-in of their trace. The report's "
                "system was full at twice the rate, the simulated one is not: the higher rate is one where it is.")
        outcome.tables.append(Table("Technical report, table 3: overload", heads, rows, note))
        outcome.data = {"overload": data}
        return outcome

    def _fig9(self) -> Outcome:
        """Load of the two pools over 20 minutes of overload on 20 nodes, by admission."""
        rows, outcome = [], Outcome()
        trace = self._traces["toolagent_like"]
        for prefill, decode, rate in _FIG9:
            needed_s, results = _FIG9_S * rate, {}
            arrivals = tuple(arrival for arrival in trace.arrivals if arrival.at_s <= needed_s)
            repeat = max(math.ceil(needed_s / max(trace.duration_s, 1.0)), 1)
            for name, policy, admission in (("baseline", _THEIRS, "baseline"), ("early rejection", _THEIRS, "early"),
                                            ("by prediction", _THEIRS, "early_prediction"), ("moonbus", OURS, "slo")):
                self._tell(f"figure 9, {prefill} + {decode}: {name}")
                result = results[name] = simulate(replace(trace, arrivals=arrivals), replace(
                    self.base, policy=policy, admission=admission, prefill=prefill, decode=decode, rate_scale=rate,
                    repeat=repeat, cache_policy=self.base.cache_policy if policy == OURS else Lru.name))
                curve = np.array([sample for sample in result.curve if sample.at_s <= _FIG9_S])
                swing = np.std(curve[:, 3:], axis=0)
                rows.append((f"{prefill} + {decode} at {rate:g}x", name,
                             f"{curve[:, 3].mean():.2f} ± {swing[0]:.2f}", f"{curve[:, 4].mean():.2f} ± {swing[1]:.2f}",
                             f"{np.corrcoef(curve[:, 3], curve[:, 4])[0, 1]:+.2f}" if swing.all() else "",
                             f"{sum(result.summary.rejected.values()) / result.summary.requests:.1%}",
                             f"{result.summary.slo_share:.1%}"))
            outcome.figures[f"fig9-{prefill}-{decode}"] = (
                f"Load of {prefill} prefill and {decode} decode nodes at {rate:g}x",
                figures.pool_loads(results, until_s=_FIG9_S))
        outcome.tables.append(Table(
            "Technical report, figure 9: load over 20 minutes", (
                "nodes, rate", "admission", "prefill load", "decode load", "correlation", "turned away", "inside both"),
            rows, "Mean and standard deviation over time. Prefill: seconds of computing on hand a node, over the TTFT "
                  "bound of 30 s; decode: the larger of step over TBT bound and of memory in use, a node. On the "
                  "stand-in of their trace, repeated with fresh ids where it is short. In anti-phase: below 0."))
        outcome.data = {"fig9": rows}
        return outcome


def grid_trace(prompt_tokens: int, *, seed: int = 1, block_tokens: int = 512) -> Trace:
    """Poisson arrivals, one a second, of equal prompts; the first half of each is one of a few shared prefixes."""
    rng = random.Random(seed)
    blocks = -(-prompt_tokens // block_tokens)
    shared = blocks // 2
    arrivals, at_s = [], 0.0
    for index in range(_GRID_REQUESTS):
        document = rng.randrange(_GRID_DOCUMENTS)
        ids = tuple(document * blocks + i for i in range(shared)) + tuple(
            (_GRID_DOCUMENTS + index) * blocks + i for i in range(blocks - shared))
        arrivals.append(Arrival(index, at_s, prompt_tokens, 512, ids))
        at_s += rng.expovariate(1.0)
    return Trace(name=f"grid-{prompt_tokens // 1000}k", arrivals=tuple(arrivals), block_tokens=block_tokens)


def _share(result: Result, tbt_s: float) -> float:
    table = result.outcomes.table()
    good = (table[:, 3] <= table[:, 5]) & (np.isnan(table[:, 4]) | (table[:, 4] <= tbt_s))
    return float(np.sum(good)) / max(len(table), 1)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _deviation(value: float, published: float) -> str:
    return f"{value / published - 1:+.0%}"
