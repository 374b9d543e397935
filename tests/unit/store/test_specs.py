"""Which cache specs a store lends for."""

from __future__ import annotations

from services.store.core.specs import Decision, Specs
from shared.ids import SpecDigest

A, B, C = (SpecDigest(letter * 64) for letter in "abc")


def test_places_go_to_who_comes_first_and_stay_with_who_is_used() -> None:
    specs = Specs(limit=2, forget_after_s=10.0)
    assert specs.heard(A, now=0.0) == Decision(True)
    assert specs.heard(B, now=1.0) == Decision(True)
    assert specs.heard(A, now=9.0) == Decision(False)
    assert specs.heard(C, now=10.0) == Decision(False)
    assert specs.heard(C, now=11.0) == Decision(True, B)
    assert specs.heard(B, now=12.0) == Decision(False)


def test_what_is_kept_gives_its_place_to_nobody() -> None:
    specs = Specs(limit=1, forget_after_s=10.0)
    specs.keep(A)
    specs.heard(A, now=0.0)
    assert specs.heard(B, now=1e6) == Decision(False)


def test_a_place_that_became_free_is_given_away() -> None:
    specs = Specs(limit=1, forget_after_s=10.0)
    specs.heard(A, now=0.0)
    specs.ended(A)
    assert specs.heard(B, now=1.0) == Decision(True)
