"""Nodes that prefill and decode: what each side takes of the other, and that whatever breaks everybody is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from load.sim.experiment import Result, RunOptions, simulate
from load.sim.faults import parse_fault
from load.sim.node import CHUNK_COST, STRETCH
from load.sim.paper import _FIG8
from shared.errors import UserError
from shared.machine import Reply
from shared.messages import Placement
from tests.unit.sim.builders import job, profile_file, quick, run, trace


def test_a_prompt_beside_an_answer_takes_turns_with_its_steps() -> None:
    first, second = job(0, 0.0, 10, output=101), job(1, 1.0, 300)
    first.excluded, second.excluded = ["decode-1"], ["prefill-1"]
    run([first, second], profile=quick(), decode=2, policy="moonbus", elastic=True)
    assert first.placement is not None and second.placement is not None
    assert second.placement.prefill == first.placement.decode == "decode-2"
    step_s, turn_s = 0.03, STRETCH * 0.03
    assert second.own_s == pytest.approx(0.3)
    assert second.computed_s == pytest.approx(0.3 * CHUNK_COST * turn_s / (turn_s - step_s))
    assert first.gap_s == pytest.approx(turn_s)  # ten of its gaps, and a prompt of 0.72 s
    assert first.finished_s - first.joined_s == pytest.approx(100 * step_s + second.computed_s * (1 - step_s / turn_s))


def busy(count: int) -> Any:
    """Prompts for about three prefill nodes, with short answers."""
    return trace(*((i * 0.1, 200 + 70 * (i % 4), 2 + i % 12, tuple(range(7 * i, 7 * i + 3))) for i in range(count)))


def options(folder: Path, **changes: Any) -> RunOptions:
    profile = profile_file(folder, quick(vram_bytes=640e3, max_running=16, dram_tokens=5000))
    return RunOptions(**{"profile": profile, "prefill": 2, "decode": 3, **changes})


def roles(result: list[Any]) -> set[str]:
    return {message.prefill for message in result if isinstance(message, Placement)}


def run_logged(folder: Path, **changes: Any) -> tuple[Result, list[Any]]:
    said: list[Any] = []
    result = simulate(busy(100), options(folder, **changes), log=lambda now, event, effects: said.extend(
        effect.message for effect in effects if isinstance(effect, Reply)))
    return result, said


def test_decode_nodes_help_where_prompts_wait(tmp_path: Path) -> None:
    elastic, said = run_logged(tmp_path)
    at_home, there = run_logged(tmp_path, elastic=False)
    assert roles(there) == {"prefill-1", "prefill-2"} and roles(said) > roles(there)
    assert all(one.prefill != one.decode for one in said if isinstance(one, Placement))
    assert elastic.summary.completed == at_home.summary.completed == 100
    assert elastic.summary.ttft_s.mean < 0.7 * at_home.summary.ttft_s.mean
    assert run_logged(tmp_path)[1] == said


@pytest.mark.parametrize("fault", [
    "crash:decode-1@3-6", "crash:prefill-1@3", "slow:decode-2@2-8x3", "cut:decode-3@2-4", "lose:all@1-9x0.05"])
def test_whatever_breaks_everybody_is_served(fault: str, tmp_path: Path) -> None:
    result, _ = run_logged(tmp_path, faults=(parse_fault(fault),))
    assert result.summary.completed == 100


def test_only_ours_moves_workers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--elastic with --policy least_load"):
        simulate(busy(3), options(tmp_path, policy="least_load", elastic=True))
    with pytest.raises(UserError, match="--elastic with --pipeline 2"):
        simulate(busy(3), options(tmp_path, pipeline=2, elastic=True))
    assert roles(run_logged(tmp_path, policy="least_load")[1]) == {"prefill-1", "prefill-2"}


def test_what_chunks_cost_is_what_the_paper_s_seconds_say() -> None:
    _, whole_s, _, chunked_s = _FIG8["conversation_trace"]
    assert pytest.approx(chunked_s / whole_s, rel=0.02) == CHUNK_COST
