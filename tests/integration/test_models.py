"""Models on disk: found, described, made once, and never found half made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.engine.pull import pull
from shared.errors import ModelError
from shared.models import TINY_RANDOM, cache_spec, resolve

ROOT = Path(__file__).resolve().parents[2]


def quiet(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a process of its own."""
    return subprocess.run([sys.executable, "-W", "error", "-c", code, *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)


PULL = """
import sys
from pathlib import Path
from shared.engine.pull import pull
model = pull("tiny-random", Path(sys.argv[1]), lambda stage, done, total: print("stage", stage))
print(model.weights_digest, model.tokenizer_digest)
"""


def test_the_control_plane_reads_models_without_torch() -> None:
    done = python("import sys, shared.models\n"
                  "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules), sys.modules.keys()")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_absent_model_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^model org/name is not in \S+/models; run `moonbus models pull org/name`$"):
        resolve("org/name", tmp_path)


@pytest.mark.parametrize("name", ["", "a b", "org/name/more", "..", "a/../b"])
def test_what_can_be_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is neither a directory nor a name|has no config\.json"):
        resolve(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_cannot_be_pulled(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model gpt-9 is unknown; pull smollm2-135m, tiny-random or a hub id"):
        pull("gpt-9", tmp_path, quiet)
    with pytest.raises(ModelError, match="is not in"):
        resolve("gpt-9", tmp_path)


def test_tiny_random_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    digests = []
    for cache in ("a", "b"):
        done = python(PULL, str(tmp_path / cache))
        assert (done.returncode, done.stderr) == (0, "")
        digests.append(done.stdout.splitlines()[-1])
    assert digests[0] == digests[1]


def test_tiny_random_is_described(tmp_path: Path) -> None:
    model = pull(TINY_RANDOM, tmp_path, quiet)
    assert model == resolve(TINY_RANDOM, tmp_path)
    assert (model.layers, model.kv_heads, model.head_dim, model.max_context, model.vocab) == (2, 2, 16, 4096, 259)
    assert (model.eos_ids, model.bos_id) == ([2], 1)
    assert "<|im_start|>assistant" in model.chat_template()
    spec = cache_spec(model, dtype="float32", block_tokens=64)
    assert spec.block_bytes == 2 * 2 * 2 * 64 * 16 * 4
    with pytest.raises(ModelError, match="dtype 'int8' is not one of float32, bfloat16, float16"):
        cache_spec(model, dtype="int8", block_tokens=64)


def test_two_processes_make_a_model_once(tmp_path: Path) -> None:
    commands = [[sys.executable, "-W", "error", "-c", PULL, str(tmp_path)]] * 3
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                 for command in commands]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert len({output.splitlines()[-1] for output, _ in outputs}) == 1
    assert sum(output.count("stage hash") for output, _ in outputs) == 1
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".tiny-random.lock", "tiny-random"]


def test_a_killed_pull_leaves_nothing_that_looks_like_a_model(tmp_path: Path) -> None:
    killed = python("import os, shared.engine.tiny_random as tiny\n"
                    "tiny._tokenizer = lambda vocab: os.kill(os.getpid(), 9)\n" + PULL, str(tmp_path))
    assert killed.returncode == -9
    leftovers = list((tmp_path / "models").glob(".tiny-random.partial-*"))
    assert leftovers
    with pytest.raises(ModelError, match="run `moonbus models pull tiny-random`"):
        resolve(TINY_RANDOM, tmp_path)

    pull(TINY_RANDOM, tmp_path, quiet)
    assert resolve(TINY_RANDOM, tmp_path).vocab == 259
    assert not any(path.exists() for path in leftovers)


def test_a_directory_is_a_model_by_its_path(tmp_path: Path) -> None:
    made = pull(TINY_RANDOM, tmp_path, quiet)
    copy = tmp_path / "my-model"
    shutil.copytree(made.path, copy)
    found = resolve(str(copy), tmp_path / "elsewhere")
    assert (found.name, found.path) == ("my-model", str(copy))
    assert (found.weights_digest, found.tokenizer_digest) == (made.weights_digest, made.tokenizer_digest)
    assert pull(str(copy), tmp_path / "elsewhere", quiet) == found


def test_digests_follow_the_files(tmp_path: Path) -> None:
    before = pull(TINY_RANDOM, tmp_path, quiet)
    path = Path(before.path)
    template = path / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    after = resolve(TINY_RANDOM, tmp_path)
    assert after.tokenizer_digest != before.tokenizer_digest
    assert after.weights_digest == before.weights_digest

    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "transformers_version": "9.9"}))
    assert resolve(TINY_RANDOM, tmp_path).weights_digest == before.weights_digest
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert resolve(TINY_RANDOM, tmp_path).weights_digest != before.weights_digest


def test_digests_are_kept_and_a_damaged_record_is_replaced(tmp_path: Path) -> None:
    made = pull(TINY_RANDOM, tmp_path, quiet)
    record = Path(made.path) / "moonbus.json"
    kept = json.loads(record.read_text())
    record.write_text(json.dumps({**kept, "weights_digest": "from the record"}))
    assert resolve(TINY_RANDOM, tmp_path).weights_digest == "from the record"
    record.write_text("{")
    assert resolve(TINY_RANDOM, tmp_path) == made
    assert json.loads(record.read_text()) == kept


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_read(tmp_path: Path) -> None:
    made = pull(TINY_RANDOM, tmp_path, quiet)
    path = Path(made.path)
    (path / "moonbus.json").unlink()
    path.chmod(0o555)
    try:
        assert resolve(TINY_RANDOM, tmp_path) == made
        assert not (path / "moonbus.json").exists()
    finally:
        path.chmod(0o755)


@pytest.mark.parametrize(("change", "message"), [
    ({"tokenizer.json": None}, r"has no tokenizer\.json"),
    ({"model.safetensors": None}, r"has no \*\.safetensors"),
    ({"config.json": "{"}, r"config\.json is not readable JSON"),
    ({"config.json": "[]"}, r"config\.json is not a JSON object"),
    ({"config.json": "{}"}, r"config\.json has no num_attention_heads"),
])
def test_a_broken_model_is_one_clear_line(change: dict[str, str | None], message: str, tmp_path: Path) -> None:
    path = Path(pull(TINY_RANDOM, tmp_path, quiet).path)
    for name, content in change.items():
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        resolve(TINY_RANDOM, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_engine_is_named_with_the_way_out(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['torch'] = None\n" + PULL.replace("tiny-random", "smollm2-135m")
    done = python(code, str(tmp_path))
    assert done.returncode == 1
    assert "UserError: torch is not installed, models cannot run here; run `pip install 'moonbus[engine]'`" in (
        done.stderr)
    assert not list((tmp_path / "models").glob(".*.partial-*"))
