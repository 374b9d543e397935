"""``moonbus models``: what is in the cache directory, and getting more into it."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

from services.cli.output import compact_table, console, notes
from shared.errors import ModelError, UserError
from shared.models import SMOLLM2, TINY_RANDOM, describe, models_dir
from shared.units import format_bytes


def pull(name: str, cache: Path) -> None:
    """Fetches a model and says where it lies; a bar a stage on a terminal, a line a stage elsewhere."""
    try:
        # The engine brings torch: this command runs in a process of its own, which ends when the model is there.
        from shared.engine.pull import pull as fetch
    except ModuleNotFoundError as error:
        raise UserError(f"pulling a model needs {error.name}, which is not installed; "
                        "run: pip install 'moonbus[engine]'") from error
    with _Stages(name) as stages:
        model = fetch(name, cache, stages.report)
    console.print(f"{model.name} is in {model.path}", soft_wrap=True, highlight=False)


def ls(cache: Path) -> None:
    """Prints the models in the cache directory, unusable ones with the reason."""
    found = sorted(path for path in models_dir(cache).glob("*") if path.is_dir() and not path.name.startswith("."))
    if not found:
        console.print(f"no models in {models_dir(cache)}; run: moonbus models pull {SMOLLM2}", soft_wrap=True)
        return
    table = compact_table("name", "size", "layers", "context", "weights", title=str(models_dir(cache)))
    for path in found:
        name = path.name.replace("--", "/")
        size = format_bytes(sum(file.stat().st_size for file in path.iterdir() if file.is_file()))
        try:
            model = describe(name, path)
        except ModelError as error:
            table.add_row(name, size, "", "", f"[red]{error}[/]")
            continue
        table.add_row(name, size, str(model.layers), str(model.max_context), model.weights_digest[:12])
    console.print(table)
    if not any(path.name == TINY_RANDOM for path in found):
        console.print(f"[dim]{TINY_RANDOM} is made on the spot by: moonbus models pull {TINY_RANDOM}[/]")


class _Stages:
    """Progress of one pull: stages follow each other, each with or without a known size."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage = ""
        self._task: TaskID | None = None
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"),
            TimeRemainingColumn(), console=notes, disable=not notes.is_terminal)

    def __enter__(self) -> _Stages:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def report(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` (bytes where the stage moves bytes; 0: unknown) of ``stage``."""
        if stage != self._stage:
            self._finish()
            self._stage = stage
            self._task = self._progress.add_task(f"{self._name}: {stage}", total=total or None, size="")
            if not notes.is_terminal:
                notes.print(f"{self._name}: {stage}", highlight=False)
        if self._task is not None:
            size = format_bytes(total) if total else ""
            self._progress.update(self._task, completed=done, total=total or None, size=size)

    def _finish(self) -> None:
        if self._task is not None:
            total = self._progress.tasks[self._task].total or 1
            self._progress.update(self._task, total=total, completed=total)
