"""What ``moonbus doctor`` says about one thing it looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from services.cli.output import console
from shared.errors import UserError

Verdict = Literal["ok", "absent", "warn", "fail"]
"""``absent``: something is not there, and nobody asked for it."""

_MARKS: dict[Verdict, tuple[str, str]] = {
    "ok": ("ok", "green"), "absent": ("-", "dim"), "warn": ("warn", "yellow"), "fail": ("fail", "red")}
"""{verdict: how it is shown, in which style}"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    verdict: Verdict
    what: str
    found: str
    advice: str = ""

    def show(self) -> None:
        """Prints it, the advice on a line of its own."""
        mark, style = _MARKS[self.verdict]
        line = Text()
        line.append(f"{mark:4} ", style=style)
        line.append(f"{self.what}: {self.found}")
        console.print(line, soft_wrap=True)
        if self.advice:
            console.print(Text(f"     {self.advice}", style="dim"), soft_wrap=True)


def judge(what: str, check: Callable[[], object], fine: str) -> Finding:
    """``fine`` unless ``check`` raises a :class:`UserError`."""
    try:
        check()
    except UserError as error:
        return Finding("fail", what, str(error))
    return Finding("ok", what, fine)
