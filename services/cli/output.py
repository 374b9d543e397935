"""Where commands print: ``console`` for results, ``notes`` (stderr) for what goes along with them."""

from __future__ import annotations

from rich.console import Console

console = Console()
notes = Console(stderr=True)
