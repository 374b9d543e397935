"""That the compiled parts are there where they can be: everything that tests them is skipped where they are not."""

from __future__ import annotations

import importlib
import re
import runpy
import shutil
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from services.conductor.core import native as conductor
from shared.transfer import native as transfer

ROOT = Path(__file__).parents[2]
PARTS = pytest.mark.parametrize("part", [conductor, transfer], ids=["conductor", "transfer"])


def cannot_compile() -> str:
    """What is missing to build them; empty where nothing is."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        return "there is no C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there is no Python.h"
    return ""


def why_not(part: ModuleType) -> Any:
    """What it says when it is imported anew."""
    assert part.__file__ is not None
    return runpy.run_path(part.__file__)["WHY_NOT"]


@PARTS
@pytest.mark.skipif(bool(cannot_compile()), reason=cannot_compile())
def test_they_are_there_wherever_they_can_be_compiled(part: ModuleType) -> None:
    assert part.WHY_NOT == "", "run make install, or python setup.py build_ext --inplace"


@PARTS
def test_why_there_is_none(part: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module(part.__name__.rpartition(".")[0])
    name = f"{package.__name__}._native"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(API=0))
    monkeypatch.setattr(package, "_native", sys.modules[name], raising=False)
    assert why_not(part) == "it was compiled from another version"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    assert why_not(part) == "it was not compiled"
    file = tmp_path / f"_native{EXTENSION_SUFFIXES[0]}"
    file.write_bytes(b"made for another machine" * 100)
    importlib.invalidate_caches()
    assert file.name in why_not(part), "what the loader says of a file that it cannot load"


def test_make_builds_them_again_when_a_source_of_theirs_changed() -> None:
    stamp = re.search(r"^\$\(STAMP\): (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert stamp is not None
    sources = re.findall(r'"([\w/]+\.c)"', (ROOT / "setup.py").read_text())
    assert len(sources) == 2 and {"setup.py", *sources} <= set(stamp[1].split())
