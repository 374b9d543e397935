"""Token ids to text, a token at a time, in constant time per token.

Both kinds promise: no character is split, and all deltas together are what decoding all ids at once gives.
``ByteText`` is exact for byte-level BPE, whose tokens are bytes. ``WindowText`` serves every other decoder
(SentencePiece pieces, byte fallback, WordPiece) by decoding a short window before and after each token; where the
ids are no valid UTF-8, it keeps the valid characters that a whole decode would replace too.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

_REPLACEMENT = "�"
_MAX_PENDING = 8
"""Tokens that may wait for the rest of a character: UTF-8 needs four bytes at most."""


class TextStream(Protocol):
    """The text of one answer."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The answer is over: what an incomplete last character decodes to."""
        ...


class ByteText:
    """Answers of byte-level tokenisers: ``token_bytes`` gives each id's bytes (empty for special tokens)."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowText:
    """Answers of any tokeniser whose ``decode`` takes ids.

    ``before`` are ids that precede the answer and give its first token its context (a leading space, say); they
    are not part of the text. ``skipped`` are ids that ``decode`` leaves out, as if they were not there.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, before: Sequence[int] = (),
                 skipped: Container[int] = ()) -> None:
        self._decode, self._skipped = decode, skipped
        self._window = [token for token in before if token not in skipped][-_MAX_PENDING:]
        #: text of ``_window``; what a later decode of window and more starts with
        self._window_text = decode(self._window) if self._window else ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._pending.append(token)
        text = self._decode(self._window + self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        delta = text[len(self._window_text):]
        if delta:
            self._window = self._pending
            self._window_text = self._decode(self._window)
        elif len(self._window) < _MAX_PENDING:
            self._window += self._pending  # without text, yet context: a stripped first space is stripped only once
        self._pending = []
        return delta


def byte_alphabet() -> dict[str, int]:
    """{character of a byte-level vocabulary: the byte it stands for}: printable bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(rest)}


def token_to_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes of one vocabulary entry; an entry with a foreign character stands for its own UTF-8."""
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()
