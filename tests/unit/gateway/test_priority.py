"""Priority classes from a setting."""

from __future__ import annotations

import pytest

from services.gateway.core.priority import Priority, priorities
from services.gateway.settings import Settings
from shared.errors import SettingError

USUAL = Priority(head_start_s=0.0, ttft_slo_s=10.0, tbt_slo_s=None)


def test_a_class_has_what_it_says_and_else_what_is_usual() -> None:
    assert priorities(("high=20s/2s/100ms", "Bulk=-1min", "chat=0//50ms"), usual=USUAL) == {
        "high": Priority(head_start_s=20.0, ttft_slo_s=2.0, tbt_slo_s=0.1),
        "bulk": Priority(head_start_s=-60.0, ttft_slo_s=10.0, tbt_slo_s=None),
        "chat": Priority(head_start_s=0.0, ttft_slo_s=10.0, tbt_slo_s=0.05)}


def test_the_default_classes_are_some() -> None:
    assert [(name, one.head_start_s) for name, one in priorities(Settings().priorities, usual=USUAL).items()] == [
        ("normal", 0.0), ("low", -20.0)], "nobody goes before others unless an operator says so"


@pytest.mark.parametrize("texts", [
    ("high",), ("high=",), ("=3s",), ("high=soon",), ("high=1s/never",), ("high=1s/1s/1s/1s",), ("a=1s", "a=2s"),
    ("high=2h",), ("high=--3s",), ("high=" + "9" * 400,),
    ("high=1s/0s",), ("high=1s//0ms",)])
def test_what_is_no_class_is_refused_with_its_text(texts: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match="setting priorities is '" + texts[-1][:20].replace("(", r"\(")):
        priorities(texts, usual=USUAL)
