"""Text to ids and back for one model, without torch.

Chat templates run in jinja's immutable sandbox with the helpers that transformers offers them, so a prompt rendered
here is the one transformers would render. ``encode_batch_fast`` is used even for one text: it computes no offsets
and lets other threads run meanwhile, which ``encode`` does only in part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.gateway.core.detokenize import ByteText, TextStream, WindowText, byte_alphabet, token_to_bytes
from services.gateway.core.problem import invalid
from shared.errors import ModelError
from shared.models import ModelDir

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelText:
    """The text side of one model. Thread-safe; loading takes up to a second for large vocabularies."""

    def __init__(self, model: ModelDir) -> None:
        self.model = model
        try:
            self._tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
            self._byte_level = _is_byte_level(model.tokenizer_path.read_bytes())
        except Exception as error:  # the library raises bare Exception for files it cannot read
            raise ModelError(f"model {model.name}: {model.tokenizer_path} is not a readable tokenizer ({error}); "
                             "pull or save the model again") from error
        # A prompt is never padded or cut here, whatever the file was saved with.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab = model.vocab
        self._special_ids = frozenset(
            index for index, added in self._tokenizer.get_added_tokens_decoder().items() if added.special)
        self._alphabet = byte_alphabet()
        #: {id: its bytes}, filled as ids occur; at most one entry for each id of the vocabulary
        self._bytes: dict[int, bytes] = {}
        self._variables = _special_tokens(model)
        self._template = _compile(model)

    def render(self, turns: Sequence[dict[str, str]], variables: dict[str, Any] | None = None) -> str:
        """The prompt that asks for the next turn; raises ``ApiError`` 400 when the template refuses."""
        if self._template is None:
            raise invalid(f"model {self.model.name} has no chat template; use /v1/completions", "messages",
                          "no_chat_template")
        try:
            return self._template.render(**{**self._variables, **(variables or {}),
                                            "messages": list(turns), "add_generation_prompt": True})
        except jinja2.TemplateError as error:
            raise invalid(f"the model's chat template refuses these messages: {error.message}", "messages") from error
        except (TypeError, ValueError, KeyError, ArithmeticError, LookupError) as error:
            raise invalid(f"the model's chat template fails on these messages: {error}", "messages") from error

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; ``special`` adds what the model puts around a plain text (a chat template has it already)."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """All text at once."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def stream(self, *, skip_special: bool = True, before: Sequence[int] = ()) -> TextStream:
        """A fresh stream of text for one answer; ``before`` are ids of the text that it continues."""
        if self._byte_level:
            return ByteText(self._visible_bytes if skip_special else self._token_bytes)
        return WindowText(lambda ids: self.decode(ids, skip_special=skip_special), before=before,
                          skipped=self._special_ids if skip_special else frozenset())

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if token in self._special_ids else self._token_bytes(token)

    def _token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            entry = self._tokenizer.id_to_token(token)  # None: the logits are wider than the vocabulary
            known = b"" if entry is None else token_to_bytes(entry, self._alphabet)
            self._bytes[token] = known
        return known


class _DecoderPart(msgspec.Struct):
    type: str = ""
    decoders: list[_DecoderPart] = []


class _TokenizerFile(msgspec.Struct):
    decoder: _DecoderPart | None = None


def _is_byte_level(data: bytes) -> bool:
    decoder = msgspec.json.decode(data, type=_TokenizerFile).decoder
    if decoder is None:
        return False
    parts = decoder.decoders if decoder.type == "Sequence" else [decoder]
    return [part.type for part in parts] == ["ByteLevel"]


def _special_tokens(model: ModelDir) -> dict[str, str]:
    config = model.tokenizer_config()
    tokens: dict[str, str] = {}
    for name in _SPECIAL:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; for serving its body is all there is."""

    tags = {"generation"}  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(model: ModelDir) -> jinja2.Template | None:
    source = model.chat_template()
    if not source:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"model {model.name}: its chat template is broken ({error}); repair or remove it") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # jinja's own filter escapes <, > and & for HTML, which a prompt is not
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
