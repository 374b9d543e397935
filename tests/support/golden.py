"""Writes what is missing in ``tests/golden``: ``python -m tests.support.golden``. Never changes what is there.

Bytes that lie there have been on somebody's wire or in somebody's stream: if a test says they no longer fit, the
code is wrong, not the file.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from shared import messages
from shared.kv import CacheSpec, block_keys, root_key
from shared.messages import codec

GOLDEN = Path(__file__).parents[1] / "golden"


def message_types() -> dict[str, type[messages.Message]]:
    """{name: type} of every wire message."""
    found = {name: getattr(messages, name) for name in messages.__all__}
    return {name: kind for name, kind in sorted(found.items())
            if isinstance(kind, type) and issubclass(kind, messages.Message) and kind is not messages.Message}


def sample(kind: inspect.Type, name: str) -> Any:
    """A value of ``kind``, made from ``name``: no field is empty or at its default."""
    number = zlib.crc32(name.encode()) % 1000 + 2
    match kind:
        case inspect.StructType():
            return {
                **({kind.tag_field: kind.tag} if kind.tag_field else {}),
                **{field.encode_name: sample(field.type, f"{name}.{field.name}") for field in kind.fields},
            }
        case inspect.ListType():
            options = kind.item_type.types if isinstance(kind.item_type, inspect.UnionType) else (kind.item_type,)
            return [sample(option, f"{name}[{i}]") for i, option in enumerate(options)]
        case inspect.DictType():
            return {sample(kind.key_type, f"{name}.key"): sample(kind.value_type, f"{name}.value")}
        case inspect.UnionType():
            return sample(next(option for option in kind.types if not isinstance(option, inspect.NoneType)), name)
        case inspect.LiteralType():
            return kind.values[-1]
        case inspect.EnumType():
            return list(kind.cls)[-1].value
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return number
        case inspect.FloatType():
            return number / 8
        case inspect.StrType():
            return f"{name}!"
        case inspect.BytesType():
            return bytes((number + i) % 256 for i in range(32))
        case _:
            raise TypeError(f"no sample for {kind} in {name}")


def message_entry(kind: type[messages.Message]) -> dict[str, Any]:
    """A sample of ``kind`` as people read it, and as it travels."""
    value = msgspec.convert(sample(inspect.type_info(kind), kind.__name__), kind)
    return {"message": json.loads(msgspec.json.encode(value)), "hex": codec.encode(value).hex()}


def block_vector(name: str, spec: CacheSpec, salt: str, tokens: list[int]) -> dict[str, Any]:
    """The keys of ``tokens``."""
    root = root_key(spec, salt)
    return {
        "name": name, "spec": msgspec.to_builtins(spec), "salt": salt, "tokens": tokens, "digest": spec.digest,
        "root": root.hex(), "keys": [key.hex() for key in block_keys(root, tokens, spec.block_tokens)],
    }


def _main() -> None:
    path = GOLDEN / "messages.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name, kind in message_types().items():
        if name not in known:
            known[name] = message_entry(kind)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")

    path = GOLDEN / "block_keys.json"
    if not path.exists():
        small = CacheSpec(model="tiny-random", weights_digest="00" * 32, tokenizer_digest="11" * 32, dtype="float32",
                          layers=2, kv_heads=2, head_dim=16, block_tokens=4, max_context=512)
        large = msgspec.structs.replace(small, model="smollm2-135m", dtype="bfloat16", layers=30, kv_heads=3,
                                        head_dim=64, block_tokens=64, max_context=8192, adapter_digest="22" * 32)
        vectors = [
            block_vector("no tokens", small, "", []),
            block_vector("a partial block has no key", small, "", [1, 2, 3]),
            block_vector("two blocks and a tail", small, "", list(range(11))),
            block_vector("another salt", small, "tenant-a", list(range(11))),
            block_vector("a salt beyond ASCII", small, "Käse/\n", list(range(8))),
            block_vector("token ids up to 32 bits", small, "", [0, 1, 2**31, 2**32 - 1]),
            block_vector("another spec", large, "", [7 * i % 49152 for i in range(200)]),
        ]
        path.write_text(json.dumps({"vectors": vectors}, indent=1) + "\n")


if __name__ == "__main__":
    _main()
