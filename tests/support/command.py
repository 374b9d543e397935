"""The ``moonbus`` command, run in this process."""

from __future__ import annotations

import pytest

from services import cli


def moonbus(*arguments: str) -> int:
    """Exit code of ``moonbus ARGUMENTS``. Blocks until it has ended; what it says goes to this process's outputs."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)
