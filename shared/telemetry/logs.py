"""Log records on one line: ``time level service/instance action key=value ...`` on stderr.

The action is the record's message; its values come from ``extra={"fields": {...}}``. A record of a library is shown
the same way, its text as the action.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from opentelemetry import trace

from shared.errors import SettingError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

#: Libraries that say at INFO what only matters to their authors.
_QUIET = ("asyncio", "httpx", "httpcore", "nats", "uvicorn", "alembic", "sqlalchemy", "urllib3", "filelock")


def setup(service: str, instance: str, level: str, stream: TextIO | None = None) -> None:
    """Sends every record of this process to ``stream`` (stderr). ``level`` is a key of ``LEVELS``."""
    if level not in LEVELS:
        raise SettingError("log_level", level, " or ".join(LEVELS))
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(service, instance))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


class LineFormatter(logging.Formatter):
    """One record, one line; a stack trace follows on lines of its own."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._who = f"{service}/{instance}"

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{clock}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._who} {_flat(record.getMessage())}"
        fields: Mapping[str, object] = getattr(record, "fields", {})
        for key, value in fields.items():
            line += f" {key}={_value(value)}"
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line += f" trace={context.trace_id:032x}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class Limited:
    """Says a thing at most once in ``every_s`` seconds for each key, with the number of times it was held back."""

    def __init__(self, log: logging.Logger, *, every_s: float = 10.0, most_keys: int = 1024) -> None:
        self._log, self._every_s, self._most_keys = log, every_s, most_keys
        #: {key: (monotonic seconds it was last said, times held back since)}
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, action: str, *, key: str, **fields: object) -> None:
        """Logs ``action`` unless it was said for ``key`` a moment ago."""
        now_s = time.monotonic()
        said_s, held_back = self._said.get(f"{action} {key}", (None, 0))
        if said_s is not None and now_s - said_s < self._every_s:
            self._said[f"{action} {key}"] = (said_s, held_back + 1)
            return
        if len(self._said) >= self._most_keys:
            self._said.clear()
        self._said[f"{action} {key}"] = (now_s, 0)
        if held_back:
            fields["held_back"] = held_back
        self._log.warning(action, extra={"fields": fields})


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _flat(str(value))
    return f'"{text}"' if not text or " " in text or "=" in text else text


def _flat(text: str) -> str:
    return text.replace("\n", "\\n").replace('"', "'")
