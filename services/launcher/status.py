"""What a person sees of a stack: how it starts, where it is, how to use it. Plain lines where no terminal is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.launcher.settings import Settings
from services.launcher.stack import Stack, run
from services.launcher.supervise import UnitView
from shared.units import format_seconds

_MARKS = {"ready": "[green]✓[/]", "stopped": "[green]✓[/]", "restarting": "[yellow]↻[/]", "failed": "[red]✗[/]"}


class StartDisplay:
    """Shows units becoming ready: a bar and a line each on a terminal, one line an event elsewhere.

    Use as a context manager around the stack; :meth:`settled` ends the moving part.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        #: {unit name: when its present start began, seconds}
        self._starting_s: dict[str, float] = {}
        #: {unit name: how long its start took}
        self._took_s: dict[str, float] = {}
        self._spinner = Spinner("dots")
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._settled = False

    def __enter__(self) -> StartDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.settled()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the display was made."""
        return time.monotonic() - self._began_s

    def changed(self, units: list[UnitView]) -> None:
        """Takes the units' states; shows them while the stack starts."""
        if self._settled:
            return
        for unit in units:
            if unit.state == "starting":
                self._starting_s.setdefault(unit.name, time.monotonic())
            elif unit.name in self._starting_s and unit.name not in self._took_s:
                self._took_s[unit.name] = time.monotonic() - self._starting_s[unit.name]
                if self._live is None and unit.state in ("ready", "stopped", "failed"):
                    said = "done" if unit.state == "stopped" else unit.state
                    took = format_seconds(self._took_s[unit.name])
                    self._console.print(f"{unit.name} {said} after {took}", highlight=False)
        if self._live is not None:
            if not self._live.is_started:
                self._live.start()
            self._live.update(self._picture(units))

    def news(self, line: str) -> None:
        """Prints something unexpected."""
        self._console.print(Text(line, style="yellow"))

    def settled(self) -> None:
        """The start is over: nothing moves any more."""
        self._settled = True
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def _picture(self, units: Sequence[UnitView]) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        for unit in units:
            took = self._took_s.get(unit.name)
            mark: RenderableType = self._spinner if unit.state == "starting" else _MARKS.get(unit.state, "[dim]·[/]")
            rows.add_row(mark, unit.name, f"[dim]{format_seconds(took)}[/]" if took is not None else "")
        head = Table.grid(padding=(0, 1))
        head.add_row("Starting the stack", ProgressBar(total=len(units), completed=len(self._took_s), width=40))
        return Group(head, rows)


def up(settings: Settings) -> int:
    """``moonbus up``: runs until a signal or a failure; the exit code."""
    console = Console()
    with StartDisplay(console) as display:

        async def show(stack: Stack) -> int:
            display.settled()
            console.print(summary(stack, display.elapsed_s), soft_wrap=True)
            try:
                await asyncio.Event().wait()
            finally:
                console.print("Draining and stopping; Ctrl-C again stops at once.")
            return 0

        run(settings, show, watcher=display)
    console.print("Stopped.")
    return 0


def summary(stack: Stack, took_s: float) -> RenderableType:
    """Where the stack is and how to use it."""
    url, model = stack.gateway_url, stack.model.name
    facts = Table.grid(padding=(0, 2))
    workers = ", ".join(view.name for view in stack.supervisor.views() if view.service in ("prefill", "decode"))
    workers += " (elastic)" if stack.settings.elastic else ""
    for name, value in (
        ("API", f"[bold]{url}/v1[/]"),
        ("Model", model),
        ("Workers", workers),
        ("NATS", stack.nats_url),
        ("Logs", str(stack.settings.log_path)),
        ("Traces", str(stack.settings.trace_path)),
    ):
        facts.add_row(f"[dim]{name}[/]", value)
    curl = (f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '"
            f'{{"model": "{model}", "stream": true, "temperature": 0, '
            f'"messages": [{{"role": "user", "content": "Hello"}}]}}\'')
    python = (f'from openai import OpenAI\n'
              f'client = OpenAI(base_url="{url}/v1", api_key="none")\n'
              f'answer = client.chat.completions.create(model="{model}", temperature=0,\n'
              f'    messages=[{{"role": "user", "content": "Hello"}}])\n'
              f'print(answer.choices[0].message.content)')
    return Group(
        Text.from_markup(f"[green]✓[/] The stack serves after {format_seconds(took_s)}."), facts,
        Text("\nFrom a shell:\n", style="dim"), Text(curl),
        Text("\nFrom Python:\n", style="dim"), Text(python),
        Text("\nAlso: moonbus chat, moonbus workers, moonbus kv ls. Ctrl-C drains and stops.", style="dim"),
    )
