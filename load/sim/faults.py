"""What goes wrong, and when: scheduled, so that it goes wrong the same way each time.

Written as ``KIND:NODE@SECONDS``, for a while as ``KIND:NODE@FROM-TO``, with an amount as ``...xAMOUNT``::

    crash:prefill-2@100          the node is gone, for good
    crash:decode-1@100-160       it comes back, empty, after a minute
    slow:prefill-3@100-400x2.5   everything takes 2.5 times as long there
    cut:prefill-1@100-130        nothing gets in or out; with x0.1 its card has a tenth of its rate
    lose:all@100-200x0.02        conductors miss 2 % of what workers say
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from load.sim.cluster import Cluster
from shared.errors import UserError

Kind = Literal["crash", "slow", "cut", "lose"]

_FORM = re.compile(r"(?P<kind>[a-z]+):(?P<node>[a-z0-9-]+)@(?P<start>[0-9.]+)(?:-(?P<end>[0-9.]+))?"
                   r"(?:x(?P<amount>[0-9.]+))?")
_USUAL = {"crash": 0.0, "cut": 0.0, "lose": 0.01}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong from ``start_s`` to ``end_s`` (infinite: for good)."""

    kind: Kind
    node: str
    start_s: float
    end_s: float
    amount: float

    def __str__(self) -> str:
        """As it is written."""
        end = f"-{self.end_s:g}" if math.isfinite(self.end_s) else ""
        amount = f"x{self.amount:g}" if self.kind != "crash" else ""
        return f"{self.kind}:{self.node}@{self.start_s:g}{end}{amount}"

    def check(self, nodes: Sequence[str]) -> None:
        """Raises :class:`UserError` when it names a node that is not among ``nodes``."""
        if self.kind != "lose" and self.node not in nodes:
            raise UserError(f"--fault {self.kind} names node {self.node}; there are {', '.join(nodes)}")

    def schedule(self, cluster: Cluster) -> None:
        """Lets it happen; raises :class:`UserError` when there is no such node."""
        self.check(list(dict.fromkeys((*cluster.prefill, *cluster.decode))))
        loop = cluster.loop
        match self.kind:
            case "crash":
                loop.at(self.start_s, cluster.crash, self.node)
                if math.isfinite(self.end_s):
                    loop.at(self.end_s, cluster.start, self.node)
            case "slow":
                loop.at(self.start_s, cluster.set_pace, self.node, self.amount)
                if math.isfinite(self.end_s):
                    loop.at(self.end_s, cluster.set_pace, self.node, 1.0)
            case "cut":
                loop.at(self.start_s, cluster.scale_link, self.node, self.amount)
                if math.isfinite(self.end_s):
                    loop.at(self.end_s, cluster.scale_link, self.node, 1.0)
            case "lose":
                loop.at(self.start_s, cluster.set_loss, self.amount)
                if math.isfinite(self.end_s):
                    loop.at(self.end_s, cluster.set_loss, 0.0)


def node_names(prefill: int, decode: int) -> list[str]:
    """Of a cluster with so many of each."""
    return [*(f"prefill-{i + 1}" for i in range(prefill)), *(f"decode-{i + 1}" for i in range(decode))]


def parse_fault(text: str) -> Fault:
    """See the module; raises :class:`UserError`."""
    match = _FORM.fullmatch(text.strip())
    if match is None or match["kind"] not in get_args(Kind):
        raise UserError(f"--fault {text}: expected KIND:NODE@SECONDS, like slow:prefill-3@100-400x2.5; kinds are "
                        f"{', '.join(get_args(Kind))}")
    kind = cast(Kind, match["kind"])
    try:
        start_s = float(match["start"])
        end_s = float(match["end"]) if match["end"] else math.inf
        amount = float(match["amount"]) if match["amount"] else _USUAL.get(kind)
    except ValueError as error:
        raise UserError(f"--fault {text}: one of its numbers is none; expected KIND:NODE@SECONDS, like "
                        "slow:prefill-3@100-400x2.5") from error
    if amount is None:
        raise UserError(f"--fault {text}: says not how slow; {text}x2.5 takes 2.5 times as long")
    if end_s <= start_s:
        raise UserError(f"--fault {text}: it ends at {end_s:g} s, before it begins")
    if (kind == "slow" and amount <= 0) or (kind in ("cut", "lose") and not 0 <= amount <= 1):
        raise UserError(f"--fault {text}: an amount of {amount:g} cannot be; slow takes a factor above 0, cut and lose "
                        "a share from 0 to 1")
    return Fault(kind, match["node"], start_s, end_s, amount)
