"""The compiled pass over prefill workers comes to the numbers of the one with arrays, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from load.sim.experiment import simulate
from services.conductor.core import native
from services.conductor.core.board import PrefillBoard
from services.conductor.core.policy import Policy
from services.conductor.core.survey import Prompt, take_survey, with_arrays
from shared.machine import Reply
from shared.order import FCFS, ORDER, SRPT
from tests.unit.conductor.builders import answer, ask, chain, progress
from tests.unit.conductor.test_cluster import busy_town
from tests.unit.sim.test_experiment import busy, options

needs_it = pytest.mark.skipif(bool(native.WHY_NOT), reason=f"there is no compiled part: {native.WHY_NOT}")


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


@needs_it
@pytest.mark.parametrize("seed", range(12))
def test_the_compiled_survey_is_that_with_arrays(seed: int) -> None:
    rng = random.Random(seed)
    play, prefill, _ = busy_town(seed)
    board = PrefillBoard(prefill)
    board.refresh()
    for _ in range(60):
        policy = Policy(regard=rng.choice((0.0, 1.0, 2.5)), trust_s=rng.choice((0.5, 3.0, 15.0)))
        board.order = rng.choice((FCFS, SRPT, ORDER))
        covered = rng.choice((0, 0, rng.randint(1, 60)))
        now = play.now + rng.choice((0.0, rng.uniform(0.0, 20.0)))
        prompt = Prompt(
            num_tokens=rng.randint(1, 4000), now=now, since_s=now - rng.choice((0.0, rng.uniform(-9.0, 9.0))),
            own={worker.id: rng.randint(0, 62) for worker in rng.sample(prefill, rng.randint(0, 5))}, covered=covered,
            ranked={place: rng.uniform(0.0, 4.0) for place in rng.sample(range(5), rng.choice((0, 0, 2)))},
            known=rng.choice((None, prefill[0].costs)))
        ours, arrays = take_survey(board, prompt, policy), with_arrays(board, prompt, policy)
        left_out = () if covered else ("rest_s", "pull_s", "bound_s")
        for field in dataclasses.fields(ours):
            if field.name not in left_out:
                found, expected = getattr(ours, field.name), getattr(arrays, field.name)
                assert same(found, expected), (field.name, found, expected)


@needs_it
@pytest.mark.parametrize("seed", range(4))
def test_compiled_or_not_the_same_is_written_on_a_board(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play, prefill, _ = busy_town(seed)
    boards = PrefillBoard(prefill), PrefillBoard(prefill)
    for board in boards:
        board.refresh()
    for i in range(40):
        worker = random.Random(i).choice(prefill)
        if i % 3 == 0 and worker.prefilling:
            play >> progress(next(iter(worker.prefilling)), worker.id, "prefilled", num_tokens=2000)
        else:
            answer(play, ask(f"more-{seed}-{i}", chain("doc", 8), tokens=600 + 50 * i))
        play.take()
        boards[0].refresh()
        with monkeypatch.context() as patch:
            patch.setattr(native, "WHY_NOT", "left out")
            boards[1].refresh()
        for name in ("_cells", "_lengths", "_count"):
            assert same(getattr(boards[0], name), getattr(boards[1], name)), name
        room = [min(board._queues.shape[1] for board in boards)] * 2
        ours, others = (board._queues[:, :end].copy() for board, end in zip(boards, room, strict=True))
        ours[:2, 0] = others[:2, 0] = 0.0  # of the one that is computed, which only arrays write there
        assert same(ours, others)


@needs_it
def test_boards_that_contradict_themselves_are_refused() -> None:
    _, prefill, _ = busy_town(0)
    board = PrefillBoard(prefill)
    board.refresh()
    prompt = Prompt(100, 0.0, 0.0, {}, 0, {9: 1.0}, None)
    with pytest.raises(ValueError, match="not on the board"):
        take_survey(board, prompt, Policy())
    board._lengths[0] = 10**6
    with pytest.raises(ValueError, match="longer than its room"):
        take_survey(board, dataclasses.replace(prompt, ranked={}), Policy())
    board._lengths[0] = 1
    board._views = (board._cells[:3].copy().data, *board._views[1:])
    with pytest.raises(ValueError, match="bytes"):
        take_survey(board, dataclasses.replace(prompt, ranked={}), Policy())


@needs_it
@pytest.mark.parametrize(("what", "message"), [
    ("room", "no memory could hold"), ("no room", "no room|not on the board"), ("workers", "no memory could hold"),
    ("numbers", "expected"), ("lengths", "expected"), ("bytes", "expected")])
def test_arrays_of_other_sizes_or_kinds_are_refused(what: str, message: str) -> None:
    _, prefill, _ = busy_town(0)
    board = PrefillBoard(prefill)
    board.refresh()
    cells, queues, room, lengths, counts = board._views
    workers = len(prefill)
    match what:
        case "room":
            room = 2**62  # fifteen times as many are less than none, in 64 bits
        case "no room":
            room = 0
        case "workers":
            workers = 2**62
        case "numbers":
            cells = board._cells.view(np.int64).data
        case "lengths":
            lengths = board._lengths.astype(np.float64).data
        case _:
            queues = queues.cast("B")
    if what != "workers":  # there it counts them
        prompt = Prompt(100, 0.0, 0.0, {}, 0, {}, None)
        board._views = cells, queues, room, lengths, counts
        with pytest.raises(ValueError, match=message):
            take_survey(board, prompt, Policy())
    row = (0.0,) * len(board._cells)
    with pytest.raises(ValueError, match=message):
        native.write(cells, queues, room, lengths, counts, workers, 0, row, (), 0.0)


@needs_it
def test_a_simulation_decides_the_same_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decisions() -> list[Any]:
        said: list[Any] = []
        simulate(busy(80), options(tmp_path, policy="moonbus", prefill=3), log=lambda now, event, effects: said.extend(
            (now, effect.message) for effect in effects if isinstance(effect, Reply)))
        return said

    with_it = decisions()
    monkeypatch.setattr(native, "WHY_NOT", "left out")
    assert decisions() == with_it
