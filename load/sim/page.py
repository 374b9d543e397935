"""What a command of ``moonbus sim`` leaves behind: a folder with one page, its figures as PNG, and JSON.

All is made before the first byte is written, and each file appears whole.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from shared.errors import UserError
from shared.files import make_folder, write_file

PAGE_FILE, JSON_FILE = "report.html", "result.json"


def cell(value: float | None, form: str) -> str:
    """``value`` in a table, a dash where there is none."""
    return "–" if value is None else format(value, form)


@dataclass(frozen=True)
class Table:
    """Rows of text under heads."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass
class Page:
    """One command's outcome."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    #: {file name without .png: (caption, PNG)}
    figures: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def html(self) -> str:
        """The page; its figures are inside."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("load", "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True)
        figures = [(caption, base64.b64encode(png).decode()) for caption, png in self.figures.values()]
        return environment.get_template("sim.html.j2").render(
            title=self.title, facts=self.facts, tables=self.tables, figures=figures)


def write(directory: Path, page: Page, data: Mapping[str, Any], *, json: Path | None) -> None:
    """Everything into ``directory``, which is made, the JSON also to ``json``.

    What can be written is, also where other things cannot; then raises the first :class:`UserError`.
    """
    encoded = msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"
    files = {directory / PAGE_FILE: page.html().encode(), directory / JSON_FILE: encoded}
    files |= {directory / "figures" / f"{name}.png": png for name, (_, png) in page.figures.items()}
    if json is not None:
        files[json] = encoded
    errors = []
    for path, content in files.items():
        try:
            if path != json:
                make_folder(path.parent)
            write_file(path, content)
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]
