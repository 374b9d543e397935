"""The engine on real files: loading, the demo model's answers, and its pool over somebody else's memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
from platformdirs import user_cache_path
from tokenizers import Tokenizer

from shared.engine import libraries
from shared.engine.kv_pool import KVPool
from shared.engine.profile import measure
from shared.engine.pull import pull
from shared.engine.runtime import Engine, Row
from shared.engine.sampler import sample
from shared.errors import ModelError
from shared.messages import Sampling
from shared.models import SMOLLM2, TINY_RANDOM, ModelDir, cache_spec

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 64


def quiet(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="session")
def smollm2() -> ModelDir:
    """The demo model; pulled once a machine, since conversion takes half a minute."""
    cache = os.environ.get("MOONBUS_TEST_CACHE")
    return pull(SMOLLM2, Path(cache) if cache else user_cache_path("moonbus"), quiet)


@pytest.fixture(scope="session")
def loaded(smollm2: ModelDir) -> Engine:
    """The demo model on one thread, with room for 2,560 tokens."""
    spec = cache_spec(smollm2, dtype="float32", block_tokens=BLOCK_TOKENS)
    return Engine.load(smollm2, spec, KVPool(spec, 40), threads=1)


@pytest.fixture
def tiny(tmp_path: Path) -> ModelDir:
    """A toy model, freshly made."""
    return pull(TINY_RANDOM, tmp_path, quiet)


@pytest.fixture
def segment() -> Iterator[mmap.mmap]:
    """Shared memory as the transfer engine hands it out; closing fails while a tensor still looks at it."""
    memory = mmap.mmap(-1, 2**22)
    yield memory
    memory.close()


def chat(model: ModelDir, question: str) -> np.ndarray:
    """Token ids of a prompt that asks for an answer."""
    text = jinja2.Template(model.chat_template()).render(
        messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)


def answer(engine: Engine, model: ModelDir, prompt: np.ndarray, values: Sampling, slots: list[int], *,
           reuse: int = 0) -> list[int]:
    """Ids up to an end token, with the KV of the first ``reuse`` tokens taken from the pool."""
    ids: list[int] = []
    logits = engine.forward([Row(prompt[reuse:], reuse, slots)])
    while len(ids) < values.max_tokens:
        token = sample(logits, [values], [len(prompt) + len(ids)], [len(ids)])[0]
        if token in model.eos_ids:
            break
        ids.append(token)
        logits = engine.forward([Row(np.array([token], np.uint32), len(prompt) + len(ids) - 1, slots)])
    return ids


def test_the_demo_model_knows_a_capital(loaded: Engine, smollm2: ModelDir) -> None:
    prompt = chat(smollm2, "What is the capital of France?")
    ids = answer(loaded, smollm2, prompt, Sampling(max_tokens=30), list(range(4)))
    assert "Paris" in Tokenizer.from_file(str(smollm2.tokenizer_path)).decode(ids)
    assert len(ids) < 30  # it ended its turn by itself


def test_the_demo_model_survived_its_conversion(smollm2: ModelDir) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_path))
    assert smollm2.eos_ids == [tokenizer.token_to_id("<|im_end|>")] == [2]
    assert tokenizer.token_to_id("<|im_start|>") == smollm2.bos_id == 1
    assert "You are a helpful AI assistant named SmolLM" in smollm2.chat_template()
    assert (smollm2.max_context, smollm2.vocab) == (8192, tokenizer.get_vocab_size())
    pieces = tokenizer.encode("in  2024", add_special_tokens=False).tokens
    assert pieces == ["in", "ĠĠ", "2", "0", "2", "4"]  # digits stand alone, as the model was trained


def test_a_prefix_in_the_pool_gives_the_same_answer(loaded: Engine, smollm2: ModelDir) -> None:
    question = "Here are facts about a lighthouse keeper. " * 30 + "What is this text about?"
    prompt, values = chat(smollm2, question), Sampling(max_tokens=12)
    slots = [int(slot) for slot in np.random.default_rng(1).permutation(loaded.pool.num_blocks)]
    reuse = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert reuse >= 4 * BLOCK_TOKENS
    uncached = answer(loaded, smollm2, prompt, values, slots[:12])
    assert answer(loaded, smollm2, prompt, values, slots[:12], reuse=reuse) == uncached
    for start in range(0, reuse, 2 * BLOCK_TOKENS):  # computed again in chunks, elsewhere
        loaded.forward([Row(prompt[start:min(start + 2 * BLOCK_TOKENS, reuse)], start, slots[12:24])])
    assert answer(loaded, smollm2, prompt, values, slots[12:24], reuse=reuse) == uncached


def test_the_demo_model_equals_plain_transformers(loaded: Engine, smollm2: ModelDir) -> None:
    prompt = chat(smollm2, "Name a colour.")
    plain = libraries.transformers().AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(loaded.forward([Row(prompt, 0, [3])])[0], expected, rtol=1e-4, atol=1e-3)


def test_a_sampled_answer_continues_elsewhere_as_it_would_have_here(loaded: Engine, smollm2: ModelDir) -> None:
    prompt = chat(smollm2, "Tell me a story.")
    values = Sampling(max_tokens=16, temperature=0.9, top_p=0.95, seed=4)
    whole = answer(loaded, smollm2, prompt, values, [0, 1])
    replayed = np.concatenate([prompt, np.array(whole[:7], np.uint32)])
    logits = loaded.forward([Row(replayed, 0, [5, 6])])
    assert sample(logits, [values], [len(replayed)], [7]) == [whole[7]]


def test_a_profile_is_measured_in_a_moment(loaded: Engine) -> None:
    profile = measure(loaded)
    assert profile.prefill_per_token_s < 1
    # a step of one answer; on a busy machine all of it may seem to hang on the number of answers
    assert profile.decode_fixed_s + profile.decode_per_request_s > 1e-4


def test_kv_is_computed_into_the_transfer_engines_memory(tiny: ModelDir, segment: mmap.mmap) -> None:
    spec = cache_spec(tiny, dtype="float32", block_tokens=16)
    view = memoryview(segment)
    engine = Engine.load(tiny, spec, KVPool(spec, 8, view))
    engine.forward([Row(np.arange(3, 19, dtype=np.uint32), 0, [5])])
    slot = np.frombuffer(segment, np.float32, spec.block_bytes // 4, offset=5 * spec.block_bytes)
    assert np.abs(slot).min() > 0
    assert not np.frombuffer(segment, np.float32, spec.block_bytes // 4, offset=6 * spec.block_bytes).any()
    del engine, slot
    view.release()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tiny: ModelDir, dtype: str) -> None:
    spec = cache_spec(tiny, dtype=dtype, block_tokens=16)
    engine = Engine.load(tiny, spec, KVPool(spec, 8))
    prompt = np.arange(3, 43, dtype=np.uint32)
    whole = engine.forward([Row(prompt, 0, [0, 1, 2])])
    engine.forward([Row(prompt[:32], 0, [5, 4, 3])])
    parts = engine.forward([Row(prompt[32:], 32, [5, 4, 3])])
    assert whole.dtype == torch.float32
    torch.testing.assert_close(parts, whole, rtol=0.1, atol=0.3)


def test_a_model_that_is_no_decoder_is_refused(tiny: ModelDir) -> None:
    config = Path(tiny.path) / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"bert"'))
    spec = cache_spec(tiny, dtype="float32", block_tokens=16)
    with pytest.raises(ModelError, match="model tiny-random") as caught:
        Engine.load(tiny, spec, KVPool(spec, 2))
    assert "\n" not in str(caught.value)


def test_a_spec_that_is_not_the_models_is_refused(tiny: ModelDir) -> None:
    wrong = cache_spec(tiny, dtype="float32", block_tokens=16)
    wrong = type(wrong)(**{**{name: getattr(wrong, name) for name in wrong.__struct_fields__}, "layers": 3})
    with pytest.raises(ModelError, match=r"of 3 layers, attention ran in \[0, 1\]"):
        Engine.load(tiny, wrong, KVPool(wrong, 2))


def test_loading_says_nothing(tiny: ModelDir) -> None:
    code = ("import sys\nfrom pathlib import Path\nfrom shared.engine.kv_pool import KVPool\n"
            "from shared.engine.runtime import Engine\nfrom shared.models import cache_spec, describe\n"
            "model = describe('tiny-random', Path(sys.argv[1]))\n"
            "spec = cache_spec(model, dtype='float32', block_tokens=16)\n"
            "Engine.load(model, spec, KVPool(spec, 2), threads=1)")
    done = subprocess.run([sys.executable, "-c", code, tiny.path], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
