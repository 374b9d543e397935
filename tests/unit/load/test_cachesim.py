"""The cache simulator against traces whose answer is known, and its command's files and mistakes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load.cachesim import show
from load.cachesim.belady import bound
from load.cachesim.grid import BELADY, INFINITE, LRU, cells_of, run
from load.cachesim.replay import infinite, prompts_of, replay
from load.workload.traces import Arrival, Source, Trace
from shared.store.blocks import BlockPool
from shared.store.policies import DEFAULT, POLICIES, make
from tests.support.command import moonbus

TOKENS = 10


def trace_of(*prompts: tuple[int, ...], every_s: float = 1.0) -> Trace:
    """Full blocks; ids of one chain must always come in the same order."""
    arrivals = tuple(Arrival(i, i * every_s, TOKENS * len(ids), 1, ids) for i, ids in enumerate(prompts))
    return Trace("t", arrivals, TOKENS)


def write(path: Path, *prompts: tuple[int, ...], last_tokens: int = TOKENS) -> Path:
    path.write_text("".join(json.dumps({
        "timestamp": 1000 * i, "input_length": TOKENS * (len(ids) - 1) + last_tokens, "output_length": 1,
        "hash_ids": ids}) + "\n" for i, ids in enumerate(prompts)))
    return path


def chats(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng, prompts, open_chats = random.Random(seed), [], []
    for n in range(count):
        if open_chats and rng.random() < 0.5:
            chat = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            chat = (n * 100,)
        chat = (*chat, *(chat[-1] + 1 + i for i in range(rng.randrange(1, 4))))
        prompts.append(chat)
        open_chats = [*open_chats, chat][-8:]
    return prompts


def cache_sim(*arguments: str) -> int:
    return moonbus("load", "cache-sim", *arguments)


def test_a_hit_is_the_leading_blocks_that_are_cached() -> None:
    prompts = prompts_of(trace_of((1, 2, 3), (1, 2, 9), (7,), (1, 2, 3)))
    assert infinite(prompts).hit_tokens == 5 * TOKENS
    assert replay(prompts, BlockPool(50, make("lru"))).hit_tokens == 5 * TOKENS
    hits = replay(prompts, BlockPool(3, make("lru")))  # (7,) takes the place of 9, whose chain is short by one then
    assert (hits.hit_tokens, hits.prompt_tokens, hits.evicted_blocks) == (4 * TOKENS, 10 * TOKENS, 3)


def test_the_partial_block_at_the_end_counts_its_own_tokens(tmp_path: Path) -> None:
    source = Source(str(write(tmp_path / "t.jsonl", (1, 2), (1, 2), last_tokens=3)), TOKENS)
    grid = run(cells_of([source], [8], ["lru"]), jobs=1, on_result=lambda result: None)
    assert grid.share(source, 8, LRU) == 13 / 26


def test_a_prompt_larger_than_the_pool_is_cached_as_far_as_it_fits() -> None:
    prompts = prompts_of(trace_of((1, 2, 3, 4), (1, 2, 3, 4)))
    assert replay(prompts, BlockPool(2, make("lru"))).hit_tokens == 2 * TOKENS


def test_belady_keeps_what_is_used_next() -> None:
    prompts = prompts_of(trace_of((1,), (2,), (3,), (1,), (2,), (4,), (1,)))
    assert bound(prompts, 2).hit_tokens == 3 * TOKENS
    assert replay(prompts, BlockPool(2, make("lru"))).hit_tokens == 0


@given(seed=st.integers(0, 10_000), blocks=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_no_policy_exceeds_belady_and_belady_not_an_infinite_cache(seed: int, blocks: int) -> None:
    prompts = prompts_of(trace_of(*chats(60, seed)))
    best = bound(prompts, blocks).hit_tokens
    assert best <= infinite(prompts).hit_tokens
    for name in POLICIES:
        assert replay(prompts, BlockPool(blocks, make(name))).hit_tokens <= best


def test_processes_change_nothing(tmp_path: Path) -> None:
    source = Source(str(write(tmp_path / "t.jsonl", *chats(40))), TOKENS)
    cells = cells_of([source], [5, 20], ["lru", "s3fifo"])
    alone = run(cells, jobs=1, on_result=lambda result: None)
    seen: list[str] = []
    together = run(cells, jobs=2, on_result=lambda result: seen.append(result.cell.policy))
    assert alone.results == together.results
    assert sorted(seen) == sorted([*[LRU, "s3fifo", BELADY] * 2, INFINITE])


def test_the_command_prints_a_table_and_writes_what_was_asked(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "toolagent_like.jsonl", *chats(60))
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "png", "html")}
    assert cache_sim("--trace", str(trace), "--blocks", "4,16", "--block-tokens", str(TOKENS), "--jobs", "1",
                   "--policy", DEFAULT, "--json", str(files["json"]), "--plot", str(files["png"]),
                   "--html", str(files["html"])) == 0
    said = capsys.readouterr().out
    assert "toolagent_like (synthetic)" in said and all(name in said for name in (DEFAULT, LRU, BELADY, INFINITE))
    results = json.loads(files["json"].read_text())["results"]
    assert len(results) == 2 * 3 + 1 and {row["cell"]["blocks"] for row in results} == {0, 4, 16}
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert page.count("<tr") == 5 and "data:image/png" in page and "http" not in page


def test_a_trace_without_reuse_has_no_share_of_belady(tmp_path: Path) -> None:
    source = Source(str(write(tmp_path / "t.jsonl", (1,), (2,))), TOKENS)
    grid = run(cells_of([source], [4], [LRU]), jobs=1, on_result=lambda result: None)
    assert show.rows_of(grid, source, [4], [LRU, BELADY]) == [
        [LRU, "0.0000  +0.00      -"], [BELADY, "0.0000  +0.00      -"], [INFINITE, "0.0000"]]


def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", *chats(5))
    with trace.open("a") as file:
        file.write('{"timestamp": 9000, "input_length": "ten", "output_length": 1, "hash_ids": [1]}\n')
    assert cache_sim("--trace", str(trace), "--json", str(tmp_path / "out.json"), "--block-tokens", str(TOKENS)) != 0
    said = capsys.readouterr().err
    assert f"{trace}, line 6" in said and "input_length" in said
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["--blocks", "1k"], "--blocks is 1k; expected numbers of blocks above 0"),
    (["--blocks", "0,5"], "--blocks is 0,5; expected"),
    (["--policy", "mru"], "--policy mru is unknown; expected one of"),
    (["--json", "nowhere/out.json"], "--json nowhere/out.json cannot be written"),
])
def test_a_wrong_option_is_one_line(arguments: list[str], said: str, tmp_path: Path,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", *chats(3))
    assert cache_sim("--trace", str(trace), *arguments) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--plot", "--html"])
def test_a_full_device_is_one_line_and_stays_a_device(option: str, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    trace, full = write(tmp_path / "t.jsonl", *chats(3)), tmp_path / "full"
    full.symlink_to("/dev/full")
    assert cache_sim("--trace", str(trace), "--block-tokens", str(TOKENS), "--blocks", "4", "--jobs", "1",
                   "--policy", LRU, option, str(full)) == 1
    out, error = capsys.readouterr()
    assert f"{full} cannot be written (No space left on device); give another path" in error.splitlines()[-1]
    assert BELADY in out, "what was computed is shown all the same"
    assert full.is_char_device() and full.is_symlink()


def test_two_traces_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", *chats(3))
    assert cache_sim("--trace", str(trace), "--trace", str(trace)) == 1
    assert "two traces have one name" in capsys.readouterr().err
