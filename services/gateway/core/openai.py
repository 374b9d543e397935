"""OpenAI's requests as typed values, and what they mean here.

Wrong types and values are refused with the field's name, ``null`` means "not set", unknown fields are ignored, and
known fields that would change the answer but are not built yet are refused by name: never ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta

from services.gateway.core.problem import ApiError, context_length_exceeded, invalid, unsupported
from shared.messages import Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Longest stop string: each may hold back that much text."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default length of a completion (not of a chat)."""

#: {field that is not built yet: the values that mean "off"}; null always does
_OFF: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
}

_Count = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk (an extension that load testers ask for)."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chats and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _Count | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0, lt=2**32)]] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    """The answer's token ids come with its end, as ``token_ids`` of the choice (an extension)."""
    user: str | None = None
    cache_salt: str | None = None

    logit_bias: Any = UNSET
    tools: Any = UNSET
    tool_choice: Any = UNSET
    functions: Any = UNSET
    function_call: Any = UNSET
    response_format: Any = UNSET
    logprobs: Any = UNSET
    top_logprobs: Any = UNSET
    prompt_logprobs: Any = UNSET
    echo: Any = UNSET
    suffix: Any = UNSET
    presence_penalty: Any = UNSET
    frequency_penalty: Any = UNSET
    repetition_penalty: Any = UNSET
    min_p: Any = UNSET
    best_of: Any = UNSET
    modalities: Any = UNSET
    audio: Any = UNSET
    prediction: Any = UNSET
    reasoning_effort: Any = UNSET
    guided_json: Any = UNSET
    guided_regex: Any = UNSET
    guided_choice: Any = UNSET
    guided_grammar: Any = UNSET
    structured_outputs: Any = UNSET
    chat_template: Any = UNSET
    bad_words: Any = UNSET
    use_beam_search: Any = UNSET


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class ChatRequest(Generation, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Handed to the model's chat template (an extension)."""


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    """A text, a list of token ids, or a list with one of these."""


T = TypeVar("T", bound=Generation)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer, after all checks that need no model."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    min_tokens: int
    skip_special_tokens: bool
    return_token_ids: bool
    cache_salt: str


def decode(body: bytes, kind: type[T]) -> T:
    """The request in ``body``; raises :class:`ApiError` 400 naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error


def wanted(request: ChatRequest | CompletionRequest) -> Wanted:
    """Checks what types cannot say; raises :class:`ApiError` 400 naming the field."""
    for name, off in _OFF.items():
        value = getattr(request, name)
        if value is not UNSET and value is not None and not _among(value, off):
            raise unsupported(name)
    if request.n is not None and request.n != 1:
        raise unsupported("n", f"n is {request.n}; only 1 answer a request is supported yet")
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    usage = request.stream_options or StreamOptions()
    max_tokens = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens is {min_tokens}, more than max_tokens, which is {max_tokens}", "min_tokens")
    return Wanted(
        stream=stream, include_usage=bool(usage.include_usage), continuous_usage=bool(usage.continuous_usage_stats),
        max_tokens=max_tokens, stops=_stops(request.stop), min_tokens=min_tokens,
        skip_special_tokens=request.skip_special_tokens is not False,
        return_token_ids=bool(request.return_token_ids),
        cache_salt=request.cache_salt or "")


def sampling(request: Generation, wanted: Wanted, *, num_tokens: int, max_context: int, default_max_tokens: int,
             eos_ids: Sequence[int], seed: int) -> Sampling:
    """How to choose tokens for a prompt of ``num_tokens``; ``seed`` is used when the client gave none.

    Raises :class:`ApiError` 400 with both numbers when prompt and answer do not fit into the context. An answer
    length that the client did not ask for is clamped instead; ``default_max_tokens`` (of chats) 0 means all that is
    left.
    """
    room = max_context - num_tokens
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    if room < 1:
        raise context_length_exceeded("the prompt alone has", num_tokens, max_context, field)
    if wanted.max_tokens is None:
        default = default_max_tokens if isinstance(request, ChatRequest) else COMPLETION_MAX_TOKENS
        max_tokens = min(room, default or room)
    elif wanted.max_tokens > room:
        raise context_length_exceeded(
            f"the prompt's {num_tokens} tokens and an answer of {wanted.max_tokens} make",
            num_tokens + wanted.max_tokens, max_context, field)
    else:
        max_tokens = wanted.max_tokens
    stop_ids = set(request.stop_token_ids or ())
    if not request.ignore_eos:
        stop_ids.update(eos_ids)
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=(seed if request.seed is None else request.seed) & (2**63 - 1),
        stop_token_ids=sorted(stop_ids),
        min_tokens=min(wanted.min_tokens, max_tokens))


def chat_turns(request: ChatRequest) -> list[dict[str, str]]:
    """The messages as chat templates take them: role and text."""
    turns: list[dict[str, str]] = []
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        if message.tool_calls:
            raise unsupported(f"{where}.tool_calls")
        role = "system" if message.role == "developer" else message.role
        if role not in ("system", "user", "assistant"):
            raise unsupported(f"{where}.role", f"{where}.role is {message.role!r}; supported are system, "
                              "developer, user and assistant")
        turns.append({"role": role, "content": _text_of(message, where)})
    return turns


def completion_prompt(request: CompletionRequest) -> str | list[int]:
    """The one prompt: a text or token ids."""
    prompt: Any = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    elif isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
        raise unsupported("prompt", f"prompt holds {len(prompt)} prompts; only one a request is supported yet")
    if isinstance(prompt, list):
        for i, token in enumerate(prompt):
            if type(token) is not int or token < 0:
                raise invalid(f"prompt[{i}] is {token!r}; expected a token id", "prompt")
    if not prompt:
        raise invalid("prompt is empty; it must have at least one token", "prompt")
    return prompt  # type: ignore[no-any-return]  # the checks above leave str or list[int]


def _among(value: Any, off: tuple[Any, ...]) -> bool:
    """``value in off``, but false is not 0: ``logprobs: 0`` asks for something, ``logprobs: false`` does not."""
    return any(value == entry and isinstance(value, bool) == isinstance(entry, bool) for entry in off)


def _text_of(message: ChatMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{where}.content is missing", f"{where}.content")
    texts: list[str] = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise unsupported(f"{where}.content[{i}].type",
                              f"{where}.content[{i}].type is {part.type!r}; only text is supported yet")
        if part.text is None:
            raise invalid(f"{where}.content[{i}].text is missing", f"{where}.content[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
    if any(not text for text in stops):
        raise invalid("stop has an empty string", "stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise invalid(f"stop has a string of {longest} characters; at most {MAX_STOP_CHARS} are allowed", "stop")
    return stops


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _explain(text: str) -> ApiError:
    """msgspec's words ("Expected `int`, got `str` - at `$.max_tokens`") with the field first."""
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(f"{path} is missing", path, "missing_required_parameter")
    what = what.replace("`", "")
    if not path:
        return invalid(f"the body must be a JSON object: {what}", code="invalid_type")
    return invalid(f"{path}: {what[:1].lower()}{what[1:]}", path, "invalid_type")
