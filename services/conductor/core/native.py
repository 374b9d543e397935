"""The compiled part of the conductor, ``_native.c``, where it was built.

It takes time away and nothing else: :mod:`~services.conductor.core.survey`, :mod:`~services.conductor.core.board` and
:mod:`~services.conductor.core.table` have the same in Python, and come to the same decisions bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

_API = 3
"""What is asked of it; a file that was built before this source was written may not have it."""

try:
    import services.conductor.core._native as _native
except ModuleNotFoundError:  # no compiler when this was installed
    WHY_NOT = "it was not compiled"
except ImportError as error:  # there is a file, for another machine or Python
    WHY_NOT = str(error)
else:
    WHY_NOT = "" if _native.API == _API else "it was compiled from another version"
"""Why there is none; empty where there is one."""

if TYPE_CHECKING or not WHY_NOT:
    Table, fill_survey, write = _native.Table, _native.fill_survey, _native.write
