"""Where models lie and what the control plane must know of them. No torch: gateway, launcher and CLI use this.

A model is a Hugging Face directory: ``config.json``, safetensors, ``tokenizer.json``. Names are either stored ones
(``smollm2-135m``, ``tiny-random``, a hub id such as ``org/name``), which ``moonbus models pull`` puts under
``<cache>/models``, or the path of any local directory. :func:`resolve` finds one, :func:`cache_spec` says what its
KV looks like. Digests are computed once and kept in ``moonbus.json`` beside the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ModelError
from shared.kv import CacheSpec

SMOLLM2 = "smollm2-135m"
"""The demo model: SmolLM2-135M-Instruct."""
TINY_RANDOM = "tiny-random"
"""Two layers of seeded noise, for tests."""

DTYPES = ("float32", "bfloat16", "float16")
"""What weights are computed in and KV is kept in."""

_RECORD = "moonbus.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_STORED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_CHUNK_BYTES = 2**22
#: what a configuration says about the files' history, not about the model
_INCIDENTAL = ("transformers_version", "_name_or_path", "_model_name_or_path")


class ModelDir(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine: where it lies, what identifies it, and its shape."""

    name: str
    """What clients name."""
    path: str
    """Absolute path of its directory."""
    weights_digest: str
    """Hex sha256 over config and weights."""
    tokenizer_digest: str
    """Hex sha256 over tokenizer and chat template."""
    layers: int
    kv_heads: int
    head_dim: int
    max_context: int
    """Longest prompt plus answer in tokens."""
    vocab: int
    """Width of the logits; the tokenizer may use fewer ids."""
    eos_ids: list[int]
    """Every id that ends an answer, ascending."""
    bos_id: int | None = None

    @property
    def tokenizer_path(self) -> Path:
        """Path of ``tokenizer.json``."""
        return Path(self.path) / "tokenizer.json"

    def tokenizer_config(self) -> Mapping[str, Any]:
        """``tokenizer_config.json``; empty when the model has none."""
        return _read_json(Path(self.path) / "tokenizer_config.json", required=False)

    def chat_template(self) -> str:
        """Jinja source of the chat template; empty when the model has none (a base model)."""
        path = Path(self.path) / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self.tokenizer_config().get("chat_template") or ""
        if isinstance(template, list):  # several named ones
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default", "")
        return str(template)


class _Record(msgspec.Struct, frozen=True):
    """``moonbus.json``: digests, and the files they were computed from."""

    weights_digest: str
    tokenizer_digest: str
    #: {file name: (size in bytes, modification time in ns)}
    files: dict[str, tuple[int, int]]


def models_dir(cache: Path) -> Path:
    """Where pulled models lie."""
    return cache / "models"


def stored_path(name: str, cache: Path) -> Path:
    """Where the model called ``name`` lies once pulled; raises :class:`ModelError` when it cannot be a name."""
    if not _STORED_NAME.fullmatch(name):
        raise ModelError(
            f"model {name!r} is neither a directory nor a name; give {SMOLLM2}, {TINY_RANDOM}, a hub id like "
            "org/name, or the path of a Hugging Face directory"
        )
    return models_dir(cache) / name.replace("/", "--")


def local_path(name: str) -> Path | None:
    """The directory that ``name`` is the path of; ``None`` when it is a stored name."""
    path = Path(name).expanduser()
    looks_like_a_path = name.startswith((".", "~", "/")) or name.endswith("/")
    return path.absolute() if looks_like_a_path or (path / "config.json").is_file() else None


def resolve(name: str, cache: Path) -> ModelDir:
    """The model called ``name``; hashes its files the first time.

    Raises :class:`ModelError` when it is absent or unusable.
    """
    path = local_path(name)
    if path is None:
        path = stored_path(name, cache)
        if not (path / "config.json").is_file():
            raise ModelError(f"model {name} is not in {models_dir(cache)}; run `moonbus models pull {name}`")
        return describe(name, path)
    if not (path / "config.json").is_file():
        raise ModelError(f"model {name}: {path} has no config.json; give the path of a Hugging Face model directory")
    return describe(path.resolve().name, path)


def describe(name: str, path: Path) -> ModelDir:
    """Reads the model in ``path``; raises :class:`ModelError` naming what is missing or unreadable."""
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"model {name}: {path} has no tokenizer.json; save it with a fast tokenizer")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"model {name}: {path} has no *.safetensors; save its weights as safetensors")
    config = _text_config(_read_json(path / "config.json"))
    generation = _read_json(path / "generation_config.json", required=False)
    record = _digests(path)
    heads = _number(config, path, "num_attention_heads", "n_head")
    hidden = _number(config, path, "hidden_size", "n_embd", "d_model")
    return ModelDir(
        name=name,
        path=str(path),
        weights_digest=record.weights_digest,
        tokenizer_digest=record.tokenizer_digest,
        layers=_number(config, path, "num_hidden_layers", "n_layer"),
        kv_heads=_number(config, path, "num_key_value_heads", default=heads),
        head_dim=_number(config, path, "head_dim", default=hidden // heads),
        max_context=_max_context(config, path),
        vocab=_number(config, path, "vocab_size"),
        eos_ids=sorted({*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id")),
                        *_tokenizer_eos(path)}),
        bos_id=next(iter(_ids(config.get("bos_token_id"))), None),
    )


def cache_spec(model: ModelDir, *, dtype: str, block_tokens: int) -> CacheSpec:
    """The KV of ``model`` kept as ``dtype`` in blocks of ``block_tokens``."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return CacheSpec(
        model=model.name,
        weights_digest=model.weights_digest,
        tokenizer_digest=model.tokenizer_digest,
        dtype=dtype,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_tokens=block_tokens,
        max_context=model.max_context,
    )


def _digests(path: Path) -> _Record:
    """Digests from the record, or computed and recorded when a file is newer, other or unknown."""
    tokenizer_files = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    weight_files = sorted(path.glob("*.safetensors"))
    seen = {file.name: _stamp(file) for file in (path / "config.json", *weight_files, *tokenizer_files)}
    record_path = path / _RECORD
    try:
        known = msgspec.json.decode(record_path.read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):  # none yet, or not ours: compute
        known = None
    if known is not None and known.files == seen:
        return known
    config = _read_json(path / "config.json")
    decisive = json.dumps({key: value for key, value in config.items() if key not in _INCIDENTAL}, sort_keys=True)
    record = _Record(_sha256(weight_files, decisive), _sha256(tokenizer_files), seen)
    if os.access(path, os.W_OK):
        _write_atomically(record_path, msgspec.json.encode(record))
    return record


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _sha256(files: Iterable[Path], before: str = "") -> str:
    """Over ``before``, then names, sizes and contents in the order given."""
    digest = hashlib.sha256(before.encode())
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one; a lost race is a rewrite of the same content."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as stream:
        stream.write(data)
    os.chmod(stream.name, 0o644)
    os.replace(stream.name, path)


def _read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON ({error}); pull or save the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; pull or save the model again")
    return content


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration: multimodal models keep it one level down."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _number(config: Mapping[str, Any], path: Path, *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    if default is None:
        raise ModelError(f"{path / 'config.json'} has no {names[0]}; moonbus serves decoder-only language models")
    return default


def _max_context(config: Mapping[str, Any], path: Path) -> int:
    """Positions whose rotation never depends on the prompt's length: only their KV can be shared."""
    limit = _number(config, path, "max_position_embeddings", "n_positions", "n_ctx")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind in ("dynamic", "longrope") and isinstance(original, int):
        return min(limit, original)
    return limit


def _ids(value: Any) -> list[int]:
    """``eos_token_id`` is absent, a number or a list of them."""
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _tokenizer_eos(path: Path) -> list[int]:
    """The id of the tokenizer's end token: chat models often end turns with one the config does not name."""
    eos = _read_json(path / "tokenizer_config.json", required=False).get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(content, str):
        return []
    added = _read_json(path / "tokenizer.json").get("added_tokens") or []
    return [int(token["id"]) for token in added if token.get("content") == content]
