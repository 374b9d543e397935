"""One row a request, the same for live and simulated runs, and the folder a run leaves behind.

``run.json`` says what was run, ``requests.jsonl`` has the rows in the order the requests ended (each row is written
as its request ends, so a run that is cut short keeps what it had), ``report.html`` is made from the two.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

import msgspec

from shared.errors import UserError

Outcome = Literal["ok", "rejected", "failed", "interrupted", "dropped"]
"""``ok``: the stream ended with its finish reason. ``rejected``: 429 or 503 before the first token. ``failed``: any
other end. ``interrupted``: the replay was stopped first. ``dropped``: never sent, the valve on requests in flight
was shut."""

RUN_FILE, ROWS_FILE, REPORT_FILE = "run.json", "requests.jsonl", "report.html"


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one request. Times are seconds from the start of the run unless the name says otherwise."""

    index: int
    """Position in the trace, from 0."""
    scheduled_s: float
    """When it should have left."""
    sent_s: float
    """When it left; for a dropped one, when it was given up."""
    finished_s: float
    outcome: Outcome
    input_tokens: int
    """Prompt length asked for."""
    output_tokens: int
    """Answer length asked for."""
    shared_tokens: int = 0
    """Prompt tokens that earlier requests of the run had as their prefix too: what an endless cache could reuse."""
    first_token_s: float | None = None
    gaps_s: list[float] = []
    """Seconds between consecutive chunks that carried text."""
    prompt_tokens: int | None = None
    """As the server counted."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens the server did not compute."""
    predicted_hit_tokens: int | None = None
    """Prompt tokens the conductor expected not to need computing."""
    predicted_ttft_s: float | None = None
    """Duration the conductor expected."""
    finish: str = ""
    """``stop`` or ``length``."""
    status: int = 0
    """HTTP status; 0 when there was no answer."""
    code: str = ""
    """Why it was rejected or failed."""
    message: str = ""
    retry_after_s: float | None = None
    headers: dict[str, str] = {}
    """Response headers that begin with ``x-moonbus-``, without that."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, for the report's head and for running it again."""

    source: Literal["live", "sim"]
    trace: str
    url: str
    model: str
    api: str
    started_at_s: float
    """Unix seconds."""
    rate_scale: float
    length_scale: float
    max_input: int | None
    output_scale: float
    max_output: int | None
    max_in_flight: int
    seed: int
    slo_ttft_s: float
    slo_tbt_s: float
    planned: int
    """Requests the run was to send."""
    host: str = ""
    """Machine and system the client ran on."""
    version: str = ""
    duration_s: float | None = None
    """From start to the last end; ``None`` while the run goes on or when it was killed."""
    interrupted: bool = False


class ResultError(UserError):
    """A result folder cannot be used."""


class RunWriter:
    """Writes a run's folder; refuses one that already holds a run unless ``overwrite``."""

    def __init__(self, directory: Path, *, overwrite: bool = False) -> None:
        self.directory = directory
        self._overwrite = overwrite
        self._rows: IO[bytes] | None = None

    def __enter__(self) -> Self:
        path = self.directory / ROWS_FILE
        if path.exists() and not self._overwrite:
            raise ResultError(f"{self.directory} already holds a run; choose another --out or add --overwrite")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._rows = path.open("wb")
        except OSError as error:
            raise ResultError(f"cannot write to {self.directory}: {error.strerror}; choose another --out") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def info(self, info: RunInfo) -> None:
        """Writes ``run.json``, at the start and again at the end."""
        (self.directory / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")

    def row(self, record: RunRecord) -> None:
        """Appends one row and hands it to the system at once."""
        if self._rows is None:
            raise RuntimeError("RunWriter.row before entering the writer")
        self._rows.write(msgspec.json.encode(record) + b"\n")
        self._rows.flush()


def read_run(directory: Path) -> tuple[RunInfo, list[RunRecord]]:
    """What ``directory`` holds, rows in order of the trace; a last line cut off by a killed run is left out.

    Raises :class:`ResultError` when it holds no run, or when a line is damaged, naming file and line.
    """
    try:
        info = msgspec.json.decode((directory / RUN_FILE).read_bytes(), type=RunInfo)
        lines = (directory / ROWS_FILE).read_bytes().split(b"\n")
    except OSError as error:
        raise ResultError(f"{directory} holds no run ({error.filename}: {error.strerror}); "
                          "give a folder that `moonbus load run` wrote") from error
    except msgspec.DecodeError as error:
        raise ResultError(f"{directory / RUN_FILE}: {error}; this file was not written by "
                          "`moonbus load run`") from error
    *whole, _cut_off = lines  # every whole line ends with a newline, so the rest is empty or cut off
    decoder = msgspec.json.Decoder(RunRecord)
    records: list[RunRecord] = []
    for number, line in enumerate(whole, start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ResultError(f"{directory / ROWS_FILE}, line {number}: {error}") from error
    return info, sorted(records, key=lambda record: record.index)
