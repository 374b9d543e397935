"""A process that answers questions: a line of JSON in, a line of JSON out, a deadline on every answer."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any

import msgspec

from shared.errors import UserError

START_S = 30.0
"""Time for a process to say that it is ready."""
_LEAVE_S = 3.0
_MAX_LINE_BYTES = 16 << 20
_TAIL_BYTES = 4096


class ChildLost(UserError):
    """A process ended, or did not answer in time; it was killed."""


class Child:
    """Made by :meth:`start`; leads its own process group, which ends with it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._errors = errors
        self.greeting: Any = None
        """The line it said when it was ready."""

    @classmethod
    @asynccontextmanager
    async def start(cls, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None,
                    start_s: float = START_S) -> AsyncIterator[Child]:
        """Runs ``command`` and waits for its greeting; leaving kills its whole group.

        ``env`` comes on top of ours. Raises :class:`ChildLost`.
        """
        with tempfile.TemporaryFile() as errors:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                    env={**os.environ, **(env or {})}, start_new_session=True, limit=_MAX_LINE_BYTES)
            except OSError as error:
                raise ChildLost(f"{name} does not start: {command[0]}: {error.strerror or error}") from error
            child = cls(name, process, errors)
            try:
                child.greeting = await child.hear(start_s)
                yield child
            finally:
                await child._end()

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._process.pid

    async def ask(self, question: object, *, timeout_s: float) -> Any:
        """Its answer. Raises :class:`ChildLost`; after that, and after a cancelled question, every question does."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(question) + b"\n")
        try:
            return await self.hear(timeout_s)
        except asyncio.CancelledError:
            self._kill()  # its answer would be taken for that of the next question
            raise

    async def hear(self, timeout_s: float) -> Any:
        """The next line it says. Raises :class:`ChildLost`."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
            return msgspec.json.decode(line)
        except TimeoutError as error:
            self._kill()
            raise ChildLost(f"{self.name} did not answer within {timeout_s:g} s{self._last_words()}") from error
        except (msgspec.DecodeError, OSError, ValueError) as error:
            self._kill()
            raise ChildLost(f"{self.name} ended{self._last_words()}") from error

    def _last_words(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        lines = [line.strip(" |+-") for line in said.splitlines() if line.strip(" |+-")]  # the frame of a group's trace
        return f"; its last words: {lines[-1]}" if lines else ""

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of it has ended

    async def _end(self) -> None:
        """The end of its stdin asks it to leave, with those it started; then nobody is asked any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _LEAVE_S)
        except TimeoutError:
            pass
        finally:
            self._kill()
        await self._process.wait()
