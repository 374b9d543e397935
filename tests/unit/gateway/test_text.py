"""Ids to text: no character is split, all deltas together are the whole, in every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.core.detokenize import ByteText, TextStream, WindowText, byte_alphabet
from services.gateway.core.problem import ApiError
from services.gateway.core.text import AnswerText
from services.gateway.tokenizer import ModelText
from shared.models import ModelDir, describe
from tests.support.text_model import write_text_model

TEXTS = ["grüße 日本語 🎉👩‍👩‍👧 und mehr", "plain", "", " leading", "tab\tnew\nline", "👍🏽" * 5]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(describe("scripted", write_text_model(tmp_path_factory.mktemp("models") / "scripted")))


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """A tokenizer that decodes as Llama 2's does: ▁ for spaces, bytes as <0xNN>, the first space stripped."""
    words = ["<unk>", "<s>", "▁the", "▁fox", "s", "▁", "x"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def piece_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    for char in text:
        known = tokenizer.token_to_id({" ": "▁"}.get(char, char))
        ids += [known] if known is not None else [tokenizer.token_to_id(f"<0x{b:02X}>") for b in char.encode()]
    return ids


def deltas(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("content", TEXTS)
def test_byte_level_deltas_are_the_whole(text: ModelText, content: str) -> None:
    ids = text.encode(content, special=False)
    said = deltas(text.stream(), ids)
    assert "".join(said) == content == text.decode(ids)
    assert not any("�" in delta for delta in said)


@given(ids=st.lists(st.integers(0, 330), max_size=40), skip=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_byte_level_deltas_are_the_whole_for_any_ids(text: ModelText, ids: list[int], skip: bool) -> None:
    assert "".join(deltas(text.stream(skip_special=skip), ids)) == text.decode(ids, skip_special=skip)


@pytest.mark.parametrize("content", [*TEXTS, "the fox", "日本 x", " x"])
def test_piece_deltas_are_the_whole(pieces: Tokenizer, content: str) -> None:
    ids = piece_ids(pieces, content)
    said = deltas(WindowText(pieces.decode), ids)
    assert "".join(said) == pieces.decode(ids)
    assert not any("�" in delta for delta in said)


@given(words=st.lists(st.sampled_from(["▁the", "▁fox", "s", "▁", "x", "<s>", "é", "日", "🎉"]), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_piece_deltas_are_the_whole_for_any_words(pieces: Tokenizer, words: list[str]) -> None:
    ids = [i for word in words for i in (
        [pieces.token_to_id(word)] if pieces.token_to_id(word) is not None else piece_ids(pieces, word))]
    stream = WindowText(pieces.decode, skipped={pieces.token_to_id("<s>")})
    assert "".join(deltas(stream, ids)) == pieces.decode(ids)


def test_a_continued_text_keeps_its_first_space(pieces: Tokenizer) -> None:
    the, fox = pieces.token_to_id("▁the"), pieces.token_to_id("▁fox")
    assert "".join(deltas(WindowText(pieces.decode, before=[the]), [fox])) == " fox"
    assert "".join(deltas(WindowText(pieces.decode), [fox])) == "fox"


def test_an_answer_that_ends_inside_a_character_says_so(text: ModelText) -> None:
    ids = [i for i in text.encode("🎉", special=False)][:-1]
    assert "".join(deltas(text.stream(), ids)) == text.decode(ids) == "�"


def test_time_per_token_does_not_grow(pieces: Tokenizer) -> None:
    broken = pieces.token_to_id("<0x80>")
    seen: list[int] = []

    def decode(ids: object) -> str:
        seen.append(len(ids))  # type: ignore[arg-type]
        text: str = pieces.decode(list(ids))  # type: ignore[call-overload]
        return text

    deltas(WindowText(decode), [broken] * 500)
    assert max(seen) <= 16


def test_byte_level_looks_at_every_token_once() -> None:
    asked: list[int] = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return b"fox "

    assert "".join(deltas(ByteText(token_bytes), list(range(1000)))) == "fox " * 1000
    assert asked == list(range(1000))


def test_the_byte_alphabet_is_a_bijection() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == ord(" ") and alphabet["Ċ"] == ord("\n")


# -- answers --------------------------------------------------------------------------------------------------------

def letters(content: str) -> tuple[Callable[[], TextStream], list[int]]:
    return lambda: ByteText(lambda token: bytes([token])), list(content.encode())


@given(cut=st.lists(st.integers(0, 20), max_size=5))
def test_an_answer_is_the_same_however_it_is_cut(cut: list[int]) -> None:
    open_stream, ids = letters("grüße END more")
    edges = sorted({0, len(ids), *cut})
    answer = AnswerText(open_stream, stops=["END"], min_tokens=0)
    said = "".join(answer.push(ids[a:b], last=b >= len(ids)) for a, b in pairwise(edges))
    assert (said, answer.matched) == ("grüße ", "END")
    assert answer.tokens == len("grüße END".encode())


def test_stop_strings_count_only_after_min_tokens() -> None:
    open_stream, ids = letters("xENDyENDz")
    answer = AnswerText(open_stream, stops=["END"], min_tokens=4)
    assert answer.push(ids, last=True) == "xENDy" and answer.matched == "END"


def test_a_restart_forgets() -> None:
    open_stream, ids = letters("abc")
    answer = AnswerText(open_stream, stops=["bcd"], min_tokens=0)
    assert answer.push(ids, last=False) == "a"
    answer.restart()
    assert answer.push(list(b"d"), last=True) == "d" and answer.tokens == 1


# -- templates ------------------------------------------------------------------------------------------------------

def with_template(tmp_path: Path, template: str) -> ModelText:
    return ModelText(describe("scripted", write_text_model(tmp_path / "scripted", template=template)))


def test_rendering(text: ModelText) -> None:
    rendered = text.render([{"role": "user", "content": "<b> & co"}])
    assert rendered == "<|start|>user\n<b> & co<|end|>\n<|start|>assistant\n"


def test_the_helpers_of_templates(tmp_path: Path) -> None:
    model = with_template(tmp_path, """
        {%- for m in messages %}
            {%- if loop.index > 1 %}{% break %}{% endif %}
            {%- generation %}{{ m | tojson }}{% endgeneration %}
        {%- endfor %}{{ eos_token }}{{ flag }}{{ strftime_now('%Y') | length }}""")
    turns = [{"role": "user", "content": "ü<"}, {"role": "user", "content": "no"}]
    assert model.render(turns, {"flag": "!"}) == '{"role": "user", "content": "ü<"}<|end|>!4'


@pytest.mark.parametrize(("template", "why"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[5].role.x }}", "fails|refuses"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% set _ = messages.append(1) %}", "unsafe|refuses"),
])
def test_a_template_that_refuses_is_a_bad_request(tmp_path: Path, template: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        with_template(tmp_path, template).render([{"role": "user", "content": "x"}])
    assert caught.value.problem.status == 400


def test_a_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="/v1/completions"):
        with_template(tmp_path, "").render([])


def test_special_ids_are_skipped_unless_asked_for(text: ModelText, tmp_path: Path) -> None:
    ids = [0, *text.encode("fox", special=False), 1]
    assert "".join(deltas(text.stream(), ids)) == "fox"
    assert "".join(deltas(text.stream(skip_special=False), ids)) == "<|start|>fox<|end|>"


def test_a_model_directory_is_described(text: ModelText) -> None:
    assert isinstance(text.model, ModelDir) and text.model.eos_ids == [1] and text.vocab == 320
