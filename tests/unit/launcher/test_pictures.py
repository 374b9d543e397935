"""What people are shown: the start, a block's lineage, a trace."""

import io
import json
from pathlib import Path

from rich.console import Console

from services.launcher.lineage import lineage_table
from services.launcher.spans import read_trace, span_tree
from services.launcher.status import StartDisplay
from services.launcher.supervise import State, UnitView
from shared.ids import BlockKey
from shared.messages import BlockRow, LineageReply, ReplicaRow


def drawn(thing: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def unit(name: str, state: State) -> UnitView:
    return UnitView(name=name, service=name, state=state, pid=1, restarts=0, facts={}, log="")


def block(depth: int, *, request: str = "r1", copies: tuple[ReplicaRow, ...] = ()) -> BlockRow:
    return BlockRow(key=BlockKey(bytes([depth]) * 32), parent=BlockKey(bytes(32)), depth=depth, model="m", tenant="t",
                    tokens=16, nbytes=1, created_by="prefill-1", created_at_s=0.0, request=request, hits=0,
                    last_used_at_s=None, replicas=list(copies))


def copy(worker: str, *, source: str = "", evicted_at_s: float | None = None, tier: str = "dram") -> ReplicaRow:
    return ReplicaRow(worker=worker, incarnation="i", tier=tier, stored_at_s=0.0, origin="computed", source=source,
                      evicted_at_s=evicted_at_s)


def test_without_a_terminal_each_unit_that_got_somewhere_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    with StartDisplay(console) as display:
        display.changed([unit("nats", "waiting"), unit("migrate", "waiting")])
        display.changed([unit("nats", "starting"), unit("migrate", "starting")])
        display.changed([unit("nats", "ready"), unit("migrate", "stopped")])
        display.changed([unit("nats", "ready"), unit("migrate", "stopped")])
        display.settled()
        display.changed([unit("nats", "stopping"), unit("migrate", "stopped")])
        display.news("decode-1 was ended by SIGKILL")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(" after")[0] for line in lines] == [
        "nats ready", "migrate done", "decode-1 was ended by SIGKILL"]


def test_lineage_merges_neighbours_of_one_story() -> None:
    copies = (copy("prefill-1"), copy("prefill-2", source="prefill-1"), copy("decode-1", evicted_at_s=1.0))
    last = block(2, request="r2", copies=(copy("decode-2", tier="ssd"),))
    blocks = [block(0, copies=copies), block(1, copies=copies), last]
    reply = LineageReply(blocks=blocks, descendants=4)
    merged = drawn(lineage_table(reply, merged=True))
    assert "0-1" in merged and "prefill-2 ← prefill-1" in merged and "decode-1" not in merged
    assert "decode-2 (ssd)" in merged and "blocks that continue it: 4" in merged
    assert "0-1" not in drawn(lineage_table(reply))


def test_lineage_of_nothing() -> None:
    assert "Lineage of nothing" in drawn(lineage_table(LineageReply(blocks=[], descendants=0)))


def test_a_trace_is_drawn_as_a_tree(tmp_path: Path) -> None:
    def span(trace: str, own: str, parent: str, name: str, start_s: float) -> str:
        return json.dumps({"trace_id": trace, "span_id": own, "parent_id": parent, "name": name, "service": "gateway",
                           "instance": "gateway-1", "start_s": start_s, "end_s": start_s + 0.5,
                           "attributes": {"tokens": 3, "long": "x" * 99}, "status": "ok"})

    path = tmp_path / "trace.jsonl"
    lines = [span("aa", "2", "1", "place", 10.25), span("bb", "9", "", "other", 1.0),
             span("aa", "1", "", "request", 10.0), span("aa", "3", "lost", "orphan", 11.0)]
    path.write_text("\n".join(lines) + '\n{"trace_id": "aa", "span_id": "hal')
    spans = read_trace(path, "aa")
    assert [found.name for found in spans] == ["request", "place", "orphan"]
    picture = drawn(span_tree(spans))
    assert "request  gateway-1  +0.0 ms  500.0 ms" in picture
    assert "│   └── place  gateway-1  +250.0 ms" in picture
    assert "other" not in picture and "└── orphan" in picture


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "none.jsonl", "aa") == []
