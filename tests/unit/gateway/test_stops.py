"""Stop strings do not depend on how the text arrives, and nothing of them is ever sent."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.stops import StopStrings


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder = StopStrings(stops)
    sent = "".join(finder.push(piece) for piece in pieces)
    if finder.matched is None:
        sent += finder.flush()
    return sent, finder.matched


def test_a_stop_string_over_four_pieces_never_shows() -> None:
    finder = StopStrings(["DEFGHIJ"])
    assert [finder.push(piece) for piece in ("ABC", "DEF", "G", "HI", "JKL")] == ["ABC", "", "", "", ""]
    assert finder.matched == "DEFGHIJ"
    assert finder.push("more") == ""


def test_what_was_held_back_for_nothing_comes_out() -> None:
    finder = StopStrings(["END"])
    assert finder.push("the E") == "the "
    assert finder.push("N") == ""
    assert finder.push("ergy") == "ENergy"
    assert finder.push(" EN") == " "
    assert finder.flush() == "EN"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["a long story"], ["story", "long"]) == ("a ", "long")
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert run(["xab"], ["b", "ab"]) == ("x", "ab")


def test_without_stop_strings_nothing_is_held() -> None:
    assert run(["a", "b"], []) == ("ab", None)


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_any_split_gives_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    sent, matched = run(pieces, stops)
    assert (sent, matched) == run(list(text), stops) == run([text], stops)
    assert matched is not None or sent == text
    assert not any(stop in sent for stop in stops)
