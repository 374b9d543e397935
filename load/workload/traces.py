"""Traces to arrivals: the Mooncake JSON-lines format and the Azure LLM inference CSV.

Mooncake: one object a line with ``timestamp`` (milliseconds, from whenever), ``input_length`` and
``output_length`` (tokens) and ``hash_ids``, one id for each ``block_tokens`` tokens of the prompt, the last
one maybe of a partial block. An id names a block *and everything before it*: two prompts that carry the same
id share that whole prefix. So an id has one place and one parent in the whole file, which the reader checks.
Azure: columns ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``. It says nothing about sharing, so every
prompt is its own. Times count from the first request, so a trace may carry the time of day.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.errors import UserError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens a hash id stands for in the published Mooncake traces."""

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_GAP_S = 30 * 86_400.0
"""Between two requests; more is a wrong unit or two traces in one file."""
_UNSHARED_BASE = 1 << 62
"""Ids from here on are made by the reader for prompts that share nothing."""
_NOT_JSON = re.compile(r'"(\w+)"\s*:\s*(-?(?:NaN|nan|Infinity|inf))\b')
_SECOND_DIGITS = re.compile(r"(\.\d{6})\d+")


class TraceError(UserError):
    """A trace cannot be read; names file, line and what is wrong there."""

    def __init__(self, path: Path, why: str, *, line: int | None = None) -> None:
        self.path, self.line, self.why = path, line, why
        super().__init__(f"trace {path}{'' if line is None else f', line {line}'}: {why}")


class Source(msgspec.Struct, frozen=True):
    """Which requests: the first ``limit`` of a trace file."""

    path: str
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    limit: int | None = None

    @property
    def name(self) -> str:
        """For people."""
        return Path(self.path).stem

    def read(self) -> Trace:
        """These; raises :class:`TraceError`."""
        return read(Path(self.path), limit=self.limit, block_tokens=self.block_tokens)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    index: int
    """Position in the trace, from 0."""
    at_s: float
    """Seconds from the trace's first request."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One id a block of the prompt, first block first."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order of time, and how many tokens a hash id stands for."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int

    @property
    def duration_s(self) -> float:
        """From the start to the last arrival."""
        return self.arrivals[-1].at_s if self.arrivals else 0.0


class _Row(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[Annotated[int, Meta(ge=0, lt=_UNSHARED_BASE)]] | None = None


def read(path: Path, *, limit: int | None = None, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    """The first ``limit`` requests of the trace at ``path``; ``.csv`` is read as Azure, all else as Mooncake.

    Raises :class:`TraceError` at the first line that does not fit.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read_rows = _azure if path.suffix.lower() == ".csv" else _mooncake
            arrivals = tuple(islice(read_rows(path, file, block_tokens), limit))
    except UnicodeDecodeError as error:
        raise TraceError(path, f"not UTF-8 text ({error.reason}); expected JSON lines or an Azure CSV") from error
    except OSError as error:
        raise TraceError(path, f"{error.strerror or error}; give the path of a readable file") from error
    if not arrivals:
        raise TraceError(path, "no requests in it")
    return Trace(name=path.stem, arrivals=arrivals, block_tokens=block_tokens)


def _mooncake(path: Path, lines: Iterable[str], block_tokens: int) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_Row)
    places: dict[int, tuple[int, int]] = {}  # {hash id: (block index, parent id or -1)}
    index, first_ms, previous_ms = 0, -1.0, 0.0
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row = decoder.decode(text)
        except msgspec.DecodeError as error:
            if (field := _NOT_JSON.search(text)) is not None:
                raise TraceError(path, f"{field[1]} is {field[2]}; expected a number", line=number) from error
            raise TraceError(path, f"{_plain(error)}; expected one object with timestamp, input_length, "
                                   "output_length and hash_ids", line=number) from error
        if row.timestamp < previous_ms:
            raise TraceError(path, f"timestamp {row.timestamp:.15g} is before {previous_ms:.15g} of an earlier line; "
                                   "sort the file by timestamp", line=number)
        if index == 0:
            first_ms = row.timestamp
        elif row.timestamp - previous_ms > _MOST_GAP_S * 1e3:
            raise TraceError(path, f"timestamp {row.timestamp:.15g} is "
                                   f"{(row.timestamp - previous_ms) / 86_400e3:.0f} days after the line before, more "
                                   f"than {_MOST_GAP_S / 86_400:.0f}; timestamps are milliseconds", line=number)
        previous_ms = row.timestamp
        blocks = -(-row.input_length // block_tokens)
        ids = _unshared_ids(index, blocks) if row.hash_ids is None else tuple(row.hash_ids)
        if len(ids) != blocks:
            raise TraceError(path, f"{len(ids)} hash_ids for input_length {row.input_length}, expected {blocks} of "
                                   f"{block_tokens} tokens each; another block size is set with --block-tokens",
                             line=number)
        for block, hash_id in enumerate(ids):
            place = (block, ids[block - 1] if block else -1)
            if places.setdefault(hash_id, place) != place:
                raise TraceError(path, f"hash id {hash_id} stands at another place than in an earlier line; an id "
                                       "names a block with everything before it", line=number)
        yield Arrival(index, (row.timestamp - first_ms) / 1e3, row.input_length, row.output_length, ids)
        index += 1


def _azure(path: Path, lines: Iterable[str], block_tokens: int) -> Iterator[Arrival]:
    reader = csv.DictReader(lines)
    missing = [column for column in _AZURE_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(path, f"column {missing[0]} is missing; an Azure trace has {', '.join(_AZURE_COLUMNS)}",
                         line=1)
    start: datetime | None = None
    previous_s = 0.0
    for index, row in enumerate(reader):
        line = reader.line_num
        cells = {column: (row[column] or "").strip() for column in _AZURE_COLUMNS}
        empty = next((column for column, cell in cells.items() if not cell), None)
        if empty is not None:
            raise TraceError(path, f"{empty} is empty; a row has {', '.join(_AZURE_COLUMNS)}", line=line)
        try:
            # Seven digits of a second are published; datetime takes six. Without a zone it is taken as UTC.
            at = datetime.fromisoformat(_SECOND_DIGITS.sub(r"\1", cells["TIMESTAMP"]))
        except ValueError as error:
            raise TraceError(path, f"TIMESTAMP is {cells['TIMESTAMP']!r}; expected a time like "
                                   "2023-11-16 18:15:46.68", line=line) from error
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        input_tokens, output_tokens = (_azure_count(path, line, column, cells[column])
                                       for column in _AZURE_COLUMNS[1:])
        start = start or at
        at_s = (at - start).total_seconds()
        if at_s < previous_s:
            raise TraceError(path, f"{row['TIMESTAMP']} is before an earlier line; sort the file by TIMESTAMP",
                             line=line)
        if input_tokens < 1 or output_tokens < 0:
            raise TraceError(path, f"ContextTokens {input_tokens} or GeneratedTokens {output_tokens} is too small",
                             line=line)
        if at_s - previous_s > _MOST_GAP_S:
            raise TraceError(path, f"{cells['TIMESTAMP']} is {(at_s - previous_s) / 86_400:.0f} days after the line "
                                   f"before, more than {_MOST_GAP_S / 86_400:.0f}", line=line)
        previous_s = at_s
        yield Arrival(index, at_s, input_tokens, output_tokens,
                      _unshared_ids(index, -(-input_tokens // block_tokens)))


def _azure_count(path: Path, line: int, column: str, cell: str) -> int:
    try:
        return int(cell)
    except ValueError as error:
        raise TraceError(path, f"{column} is {cell!r}; expected a whole number", line=line) from error


def _unshared_ids(index: int, blocks: int) -> tuple[int, ...]:
    """Ids that no other request has; a prompt has fewer than 2^20 blocks."""
    return tuple(_UNSHARED_BASE + (index << 20) + block for block in range(blocks))


def _plain(error: msgspec.DecodeError) -> str:
    """msgspec's message, which begins with a capital letter, inside a sentence of ours."""
    text = str(error)
    return text if text.startswith("JSON") else text[:1].lower() + text[1:]
