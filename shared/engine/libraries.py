"""torch and transformers, imported once, quietly, or with a clear word when they are missing."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from typing import Any

from shared.errors import UserError


@cache
def torch() -> Any:
    """The module; raises :class:`UserError` when the engine is not installed."""
    return require("torch")


@cache
def transformers() -> Any:
    """The module, with its progress bars, advice and telemetry off: users see only what moonbus says."""
    torch()
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    module = require("transformers")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


def require(name: str) -> Any:
    """Imports ``name``; raises :class:`UserError` with the way out when it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside other people's packages
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed, models cannot run here; "
                        "run `pip install 'moonbus[engine]'`") from error
