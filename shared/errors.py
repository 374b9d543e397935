"""The error tree.

::

    MoonbusError
    ├── UserError          the person can fix it: one line with the thing, the value and the way out
    │   ├── SettingError       a setting has a wrong value
    │   ├── UnknownSetting     a setting that nobody has
    │   ├── ModelError         a model is missing or unusable
    │   └── Unavailable        something we depend on cannot be reached
    ├── BusError           the bus did not do what was asked
    │   ├── NoResponders       nobody listens on that subject
    │   ├── RequestTimeout     no reply before the deadline
    │   ├── PayloadTooLarge    a message exceeds the bus's limit
    │   └── DecodeError        bytes that are not the message the subject promises
    ├── TransferError      see shared.transfer.types
    └── Bug                ours: an invariant does not hold; carries the story that led there

Expected outcomes (a miss, busy, a rejection) are values, not exceptions.
"""

from __future__ import annotations


class MoonbusError(Exception):
    """Root of every error moonbus raises on purpose."""


class UserError(MoonbusError):
    """One clear line for a person; the CLI prints it without a stack trace and exits with 1."""


class SettingError(UserError):
    """A setting has a wrong value."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name, self.value, self.expected = name, value, expected
        super().__init__(f"setting {name} is {value!r}; expected {expected}")


class UnknownSetting(UserError):
    """A setting that nobody has: a misspelled one, most likely."""

    def __init__(self, name: str, service: str, close: str) -> None:
        self.name, self.service, self.close = name, service, close
        meant = f"did you mean {close}?" if close else f"`moonbus serve {service} --help` lists what there is"
        super().__init__(f"{service} has no setting {name}; {meant}")


class ModelError(UserError):
    """A model is missing or cannot be used."""


class Unavailable(UserError):
    """A server we depend on cannot be reached."""


class BusError(MoonbusError):
    """The bus did not do what was asked."""


class NoResponders(BusError):
    """Nobody listens on the subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"nobody answers on {subject}")


class RequestTimeout(BusError):
    """No reply came before the deadline."""

    def __init__(self, subject: str, timeout_s: float, *, away: str = "") -> None:
        """``away`` names the bus if it could not be reached meanwhile."""
        self.subject, self.timeout_s = subject, timeout_s
        super().__init__(f"no reply on {subject} within {timeout_s:.3g} s" + (f", {away} is away" if away else ""))


class PayloadTooLarge(BusError):
    """A message exceeds what the bus carries."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        self.subject, self.size_bytes, self.limit_bytes = subject, size_bytes, limit_bytes
        super().__init__(f"message of {size_bytes} bytes on {subject} exceeds the bus limit of {limit_bytes} bytes")


class DecodeError(BusError):
    """Bytes that are not the message their subject promises."""

    def __init__(self, subject: str, why: str) -> None:
        self.subject, self.why = subject, why
        super().__init__(f"undecodable message on {subject}: {why}")


class Bug(MoonbusError):
    """An invariant of ours does not hold."""
