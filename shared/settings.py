"""One frozen value a service, made at the edge; the only reader of the environment.

A field ``queue_limit`` of service ``conductor`` is taken from, first that is set: a CLI flag,
``MOONBUS_CONDUCTOR_QUEUE_LIMIT``, ``MOONBUS_QUEUE_LIMIT``, table ``[conductor]`` and then the top level of the
TOML file that ``MOONBUS_CONFIG`` names, the default. A wrong value stops the start with the name, the value
and what was expected. Each field's description travels in its type, so the reference in the docs is generated.

A field that is itself a struct holds the settings of a part: field ``lanes`` of ``transfer`` is the setting
``transfer_lanes``.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from platformdirs import user_cache_path

from shared.errors import SettingError, UnknownSetting
from shared.units import parse_bytes, parse_seconds

T = TypeVar("T", bound="CommonSettings")

BYTES: dict[str, Any] = {"unit": "bytes"}
SECONDS: dict[str, Any] = {"unit": "seconds"}

_LONGER = {"store": ("store-manager",)}
"""{service: those whose names begin with its own}: their variables look like its."""


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every service takes."""

    nats_url: Annotated[str, Meta(description="NATS server, as nats://host:port.")] = "nats://127.0.0.1:4222"
    nats_wait_s: Annotated[float, Meta(description="Longest wait for NATS at the start; later it is waited for without end.", gt=0, extra=SECONDS)] = 5.0
    nats_credentials: Annotated[str, Meta(description="Path of a NATS credentials file; empty for none.")] = ""
    cache_dir: Annotated[str, Meta(description="Directory of downloaded and converted models; empty for the user's cache.")] = ""
    admin_host: Annotated[str, Meta(description="Address of the admin HTTP port (/health, /ready, /metrics).")] = "127.0.0.1"
    admin_port: Annotated[int, Meta(description="Admin HTTP port; 0 picks a free one.", ge=0, le=65535)] = 0
    otlp_endpoint: Annotated[str, Meta(description="OTLP/HTTP endpoint for traces, as http://host:4318; empty for none.")] = ""
    trace_file: Annotated[str, Meta(description="JSON-lines file that finished spans are appended to; empty for none.")] = ""
    log_level: Annotated[str, Meta(description="debug, info, warning or error.")] = "info"
    drain_s: Annotated[float, Meta(description="Longest time a stopping service finishes its work.", ge=0, extra=SECONDS)] = 10.0
    heartbeat_s: Annotated[float, Meta(description="Pause between two heartbeats of a worker.", gt=0, extra=SECONDS)] = 0.5
    suspect_after_s: Annotated[float, Meta(description="Silence after which a worker gets no new work.", gt=0, extra=SECONDS)] = 2.0
    dead_after_s: Annotated[float, Meta(description="Silence after which a worker's blocks leave the index.", gt=0, extra=SECONDS)] = 8.0

    def cache_path(self) -> Path:
        """Directory of models, made absolute; the user's cache directory unless set."""
        return Path(self.cache_dir).expanduser().absolute() if self.cache_dir else user_cache_path("moonbus")


class Field(msgspec.Struct, frozen=True):
    """One setting as the reference shows it."""

    name: str
    env: str
    kind: str
    default: Any
    description: str


class _Option(msgspec.Struct, frozen=True):
    """One setting and where its value belongs: ``place`` is the path of field names to it."""

    name: str
    place: tuple[str, ...]
    hint: Any
    default: Any


def _options(kind: type[msgspec.Struct], place: tuple[str, ...] = ()) -> Iterator[_Option]:
    """The settings in ``kind``, in order of declaration, with those of its parts."""
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        here, base = (*place, field.name), _base(hints[field.name])
        if isinstance(base, type) and issubclass(base, msgspec.Struct):
            yield from _options(base, here)
            continue
        default = field.default if field.default is not msgspec.NODEFAULT else (
            field.default_factory() if field.default_factory is not msgspec.NODEFAULT else "required")
        yield _Option("_".join(here), here, hints[field.name], default)


def describe(kind: type[CommonSettings], service: str) -> Iterator[Field]:
    """The settings of ``service`` in order of declaration, for ``--help`` and the generated reference."""
    for option in _options(kind):
        meta = _meta(option.hint)
        unit = f" ({meta.extra['unit']})" if meta and meta.extra and "unit" in meta.extra else ""
        yield Field(
            name=option.name,
            env=f"MOONBUS_{_env(service)}_{option.name.upper()}",
            kind=_kind(_base(option.hint)) + unit,
            default=option.default,
            description=(meta.description or "") if meta else "",
        )


def load(
    kind: type[T],
    service: str,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    whole: bool = True,
) -> T:
    """Builds ``kind`` for ``service``; raises :class:`SettingError` on the first value that does not fit.

    A name in the service's own name that is no setting of it is an error too, since it is a misspelled one; not so
    when ``kind`` is only a part of the service's settings (``whole`` false). A part is always known as a
    whole: ``MOONBUS_TRANSFER_LANE`` is an error to every service that has the part ``transfer``.
    """
    env = os.environ if env is None else env
    options = list(_options(kind))
    known = [option.name for option in options]
    file_values, own_table = _read_file(env.get("MOONBUS_CONFIG", ""), service)
    if whole:
        prefix = f"MOONBUS_{_env(service)}_"
        others = [f"MOONBUS_{_env(other)}_" for other in _LONGER.get(service, ())]
        own = [name.removeprefix(prefix) for name in env
               if name.startswith(prefix) and not name.startswith(tuple(others))]
        _refuse_unknown(own, [name.upper() for name in known], service, prefix)
        _refuse_unknown(own_table, known, service)
    for part_name in dict.fromkeys(option.place[0] for option in options if len(option.place) > 1):
        begins = f"{part_name}_"
        for prefix in (f"MOONBUS_{_env(service)}_", "MOONBUS_"):
            given = [name.removeprefix(prefix) for name in env if name.startswith(prefix + _env(begins))]
            _refuse_unknown(given, [name.upper() for name in known], service, prefix)
        _refuse_unknown([name for name in file_values if name.startswith(begins)], known, service)
    values: dict[str, Any] = {}
    for option in options:
        own_name, any_name = f"MOONBUS_{_env(service)}_{option.name.upper()}", f"MOONBUS_{option.name.upper()}"
        sources = (
            (option.name, (overrides or {}).get(option.name)),
            (own_name, env.get(own_name)),
            (any_name, env.get(any_name)),
            (f"{option.name} in {env.get('MOONBUS_CONFIG')}", file_values.get(option.name)),
        )
        for source, value in sources:
            if value is not None:
                part = values
                for step in option.place[:-1]:
                    part = part.setdefault(step, {})
                part[option.place[-1]] = _convert(source, value, option.hint)
                break
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise SettingError(service, values, str(error)) from error


def _convert(name: str, value: Any, hint: Any) -> Any:
    meta, base = _meta(hint), _base(hint)
    try:
        if isinstance(value, str):
            unit = (meta.extra or {}).get("unit") if meta else None
            if unit == "bytes":
                value = parse_bytes(value)
            elif unit == "seconds":
                value = parse_seconds(value)
            elif get_origin(base) in (list, tuple):
                value = [part.strip() for part in value.split(",") if part.strip()]
            elif base is bool and value.lower() in ("yes", "on", "no", "off"):
                value = value.lower() in ("yes", "on")
        return msgspec.to_builtins(msgspec.convert(value, hint, strict=False))
    except (msgspec.ValidationError, ValueError) as error:
        raise SettingError(name, value, f"{_kind(base)} ({error})") from error


def _refuse_unknown(names: Iterable[str], known: list[str], service: str, prefix: str = "") -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UnknownSetting(prefix + name, service, prefix + close[0] if close else "")


def _read_file(path: str, service: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What holds for ``service``, and of that what stands in its own table."""
    if not path:
        return {}, {}
    try:
        top = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingError("MOONBUS_CONFIG", path, f"a readable TOML file ({error})") from error
    table = top.get(service, {})
    return {**{key: value for key, value in top.items() if not isinstance(value, dict)}, **table}, table


def _env(service: str) -> str:
    return service.upper().replace("-", "_")


def _meta(hint: Any) -> Meta | None:
    return next((part for part in get_args(hint) if isinstance(part, Meta)), None) if get_origin(hint) is Annotated else None


def _kind(base: Any) -> str:
    """A type as a person reads it: words to choose from are listed."""
    if get_origin(base) is Literal:
        return ", ".join(map(str, get_args(base)))
    return str(getattr(base, "__name__", base)).replace("NoneType", "None")


def _base(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint
