"""Models of the model hub, where one can be reached."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from shared.engine import libraries
from shared.errors import ModelError

_FILES = ("*.safetensors", "*.json", "*.jinja")
"""What a model needs; formats that we don't load (and could run code) stay where they are."""


def fetch(name: str, path: Path, progress: Callable[[str, int, int], None]) -> None:
    """Downloads hub id ``name`` into ``path``, with the hub client's own settings (endpoint, token, proxy)."""
    hub = libraries.require("huggingface_hub")
    libraries.require("huggingface_hub.utils").disable_progress_bars()
    progress("download", 0, 0)
    try:
        hub.snapshot_download(name, local_dir=path, allow_patterns=list(_FILES), etag_timeout=10)
    except Exception as error:  # the client lets errors of its HTTP library through, whichever that is
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model {name} cannot be fetched from the model hub ({first_line}); "
                         "name a local Hugging Face directory instead") from error
    shutil.rmtree(path / ".cache", ignore_errors=True)  # the client's notes
