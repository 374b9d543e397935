"""Asking the store-managers, and showing what they answer: tables of eighty columns, JSON, a page."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.markup import escape
from rich.table import Column, Table
from rich.tree import Tree

from services.cli.find import ask, settings
from services.cli.output import compact_table, console, format_age, name_column, notes, number_column, print_json
from services.launcher.lineage import KEY_DIGITS, copies, lineage_table
from shared.bus.subjects import (
    BLOCKS,
    DESCENDANTS,
    EVICTIONS,
    HOT,
    LINEAGE,
    REQUEST,
    REQUESTS,
    REUSE,
    STATS,
    STORAGE,
    Subject,
)
from shared.errors import SettingError
from shared.messages import (
    BlocksQuery,
    BlocksReply,
    DescendantsQuery,
    DescendantsReply,
    EvictionsQuery,
    EvictionsReply,
    HotQuery,
    HotReply,
    LineageQuery,
    LineageReply,
    PrefixRow,
    RequestQuery,
    RequestReply,
    RequestRow,
    RequestsQuery,
    RequestsReply,
    ReuseQuery,
    ReuseReply,
    StatsQuery,
    StatsReply,
    StorageQuery,
    StorageReply,
)
from shared.units import format_bytes, format_seconds, parse_seconds

_ORDERS = ("recent", "hot", "deep")
_REUSE_BY = ("tenant", "model", "day")
_OUTCOME_COLOURS = {"ok": "green", "cancelled": "yellow", "rejected": "yellow", "failed": "red"}
_MAX_NODES = 60
"""Stretches that a tree in the terminal shows."""
_BARS = " ▁▂▃▄▅▆▇█"


def blocks(nats_url: str | None, data_dir: str | None, json: bool, *, limit: int, worker: str, tenant: str, order: str,
           everything: bool) -> None:
    """Prints blocks."""
    if order not in _ORDERS:
        raise SettingError("--order", order, " or ".join(_ORDERS))
    query = BlocksQuery(limit=limit, worker=worker, tenant=tenant, order=order, all=everything)  # type: ignore[arg-type]
    reply = cast(BlocksReply, _ask(nats_url, data_dir, BLOCKS, query))
    if worker and not reply.blocks:
        known = [row.worker for row in cast(StatsReply, _ask(nats_url, data_dir, STATS, StatsQuery())).workers]
        if worker not in known:
            notes.print(f"the catalog knows no worker {worker}; those it knows: {', '.join(known) or 'none'}",
                        markup=False, highlight=False, soft_wrap=True)
    if json:
        print_json(reply)
        return
    table = compact_table(name_column("key", KEY_DIGITS), "depth", "model", "tenant", "hits", "last used", "made by",
                          "copies now", title=f"{len(reply.blocks)} of {_about(reply.is_about)}{reply.total:,} blocks")
    for block in reply.blocks:
        table.add_row(
            _short(block.key), str(block.depth), block.model, block.tenant, str(block.hits),
            _age(block.last_used_at_s), block.created_by, copies(block.replicas, separator="\n", sources=False))
    console.print(table)
    if reply.looked_at and len(reply.blocks) < limit:
        notes.print(f"looked at the {reply.looked_at:,} most {order} blocks only", highlight=False)


def _about(is_about: bool) -> str:
    return "about " if is_about else ""


def stats(nats_url: str | None, data_dir: str | None, json: bool) -> None:
    """Prints the totals."""
    reply = cast(StatsReply, _ask(nats_url, data_dir, STATS, StatsQuery()))
    if json:
        print_json(reply)
        return
    hit_rate = f" ({reply.hit_tokens / reply.prompt_tokens:.0%})" if reply.prompt_tokens else ""
    _print_facts((
        ("blocks known", f"{_about(reply.is_about)}{reply.blocks:,}"),
        ("blocks with a live copy", f"{_about(reply.is_about)}{reply.live_blocks:,}"),
        ("live copies", f"{reply.live_replicas:,} ({format_bytes(reply.live_bytes)})"),
        ("requests", f"{reply.requests:,}"),
        ("prompt tokens", f"{reply.prompt_tokens:,}"),
        ("of them not computed", f"{reply.hit_tokens:,}{hit_rate}"),
        ("feed still to write", f"{reply.feed_pending:,} messages"),
    ))
    table = compact_table("worker", "role", "state", number_column("blocks"), number_column("size"))
    for worker in reply.workers:
        table.add_row(worker.worker, worker.role, worker.state, f"{worker.blocks:,}", format_bytes(worker.nbytes))
    console.print(table)


def lineage(key: str, nats_url: str | None, data_dir: str | None, json: bool, *, limit: int, html: Path | None) -> None:
    """Prints a block's chain from the root; ``html`` gets what continues it, at most ``limit`` blocks."""
    reply = cast(LineageReply, _ask(nats_url, data_dir, LINEAGE, LineageQuery(key_hex=_digits(key))))
    if html is not None:
        descendants(key, nats_url, data_dir, json=False, limit=limit, html=html)
    if json:
        print_json(reply)
    elif html is None:
        console.print(lineage_table(reply))


def descendants(key: str, nats_url: str | None, data_dir: str | None, json: bool, *, limit: int,
                html: Path | None) -> None:
    """Prints what continues a block as a tree, or draws it."""
    query = DescendantsQuery(key_hex=_digits(key), limit=limit)
    reply = cast(DescendantsReply, _ask(nats_url, data_dir, DESCENDANTS, query))
    asked = _short(reply.prefixes[0].key) if reply.prefixes else "nothing"
    said = f"{reply.descendants:,} blocks continue {_digits(key)[:KEY_DIGITS]}."
    if html is not None:
        _write_page(html, reply.prefixes, title=f"Prefix tree below {asked}", said=said)
    if json:
        print_json(reply)
        return
    if html is None:
        console.print(_tree(reply.prefixes, title=said))


def hot(nats_url: str | None, data_dir: str | None, json: bool, *, limit: int, blocks: int, tenant: str, model: str,
        html: Path | None) -> None:
    """Prints the hottest prefixes, or draws their tree."""
    reply = cast(HotReply, _ask(nats_url, data_dir, HOT, HotQuery(limit=blocks, tenant=tenant, model=model)))
    if html is not None:
        whose = f" of tenant {tenant}" if tenant else ""
        _write_page(html, reply.prefixes, title=f"Hot prefixes{whose}",
                    said=f"The {sum(row.blocks for row in reply.prefixes):,} blocks reused most, with all that they "
                         "continue.")
    if json:
        print_json(reply)
        return
    if html is not None:
        return
    ranked = sorted((row for row in reply.prefixes if row.hits), key=lambda row: -row.hits * row.tokens)
    table = compact_table(name_column("key", KEY_DIGITS), "tenant", number_column("depth"), number_column("tokens"),
                          number_column("hits"), number_column("saved"), "last used", "copies now",
                          title=f"{min(limit, len(ranked))} of {len(ranked)} hot stretches; all saved "
                                f"{sum(row.hits * row.tokens for row in ranked):,} tokens")
    for row in ranked[:limit]:
        table.add_row(_short(row.key), row.tenant, _depths(row), f"{row.tokens:,}", f"{row.hits:,}",
                      f"{row.hits * row.tokens:,}", _age(row.last_used_at_s), _joined(row.workers))
    console.print(table)
    if ranked:
        console.print("moonbus kv lineage KEY shows a chain, --html FILE draws them all", style="dim", highlight=False)


def evictions(nats_url: str | None, data_dir: str | None, json: bool, *, since: str, limit: int, worker: str,
              tenant: str, why: str, key: str) -> None:
    """Prints who evicted what and why."""
    query = EvictionsQuery(window_s=_window_s(since), limit=limit, worker=worker, tenant=tenant, why=why,
                           key_hex=_digits(key))
    reply = cast(EvictionsReply, _ask(nats_url, data_dir, EVICTIONS, query))
    if json:
        print_json(reply)
        return
    if not query.key_hex:
        table = compact_table(name_column("worker", 9), "tier", "why", number_column("blocks"), number_column("size"),
                              number_column("held for"),
                              title=f"Evicted during the last {since}")
        for group in reply.groups:
            table.add_row(group.worker, group.tier, group.why, f"{group.blocks:,}", format_bytes(group.nbytes),
                          _duration(group.held_s))
        console.print(table)
    table = compact_table(Column("when", no_wrap=True), name_column("key", KEY_DIGITS), number_column("depth"),
                          "tenant", name_column("worker", 9), "tier", "why", number_column("held for"),
                          title=f"The latest {len(reply.evictions)}")
    for row in reply.evictions:
        table.add_row(_age(row.at_s), _short(row.key), str(row.depth) if row.depth >= 0 else "?", row.tenant,
                      row.worker, row.tier, row.why, _duration(row.held_s))
    console.print(table)


def reuse(nats_url: str | None, data_dir: str | None, json: bool, *, by: str, since: str) -> None:
    """Prints prompt tokens and how many of them needed no computing."""
    if by not in _REUSE_BY:
        raise SettingError("--by", by, " or ".join(_REUSE_BY))
    query = ReuseQuery(by=by, window_s=_window_s(since))  # type: ignore[arg-type]
    reply = cast(ReuseReply, _ask(nats_url, data_dir, REUSE, query))
    if json:
        print_json(reply)
        return
    table = compact_table(name_column(by, 10), number_column("requests"), number_column("prompt tokens"),
                          number_column("not computed"), number_column("share"), Column("", no_wrap=True),
                          number_column("predicted"), number_column("TTFT"),
                          title=f"Reuse during the last {since}")
    for row in reply.rows:
        share = row.hit_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
        predicted = row.predicted_hit_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
        table.add_row(row.name or "(none)", f"{row.requests:,}", f"{row.prompt_tokens:,}", f"{row.hit_tokens:,}",
                      f"{share:.1%}", _meter(share), f"{predicted:.1%}", _duration(row.ttft_s))
    console.print(table)


def requests(nats_url: str | None, data_dir: str | None, json: bool, *, since: str, limit: int, tenant: str, model: str,
             outcome: str, worker: str) -> None:
    """Prints requests."""
    query = RequestsQuery(window_s=_window_s(since), limit=limit, tenant=tenant, model=model, outcome=outcome,
                          worker=worker)
    reply = cast(RequestsReply, _ask(nats_url, data_dir, REQUESTS, query))
    if json:
        print_json(reply)
        return
    table = compact_table(Column("when", no_wrap=True), name_column("request", 12), "tenant", "outcome",
                          number_column("prompt"), number_column("hit"), number_column("TTFT"),
                          number_column("total"), name_column("workers", 9),
                          title=f"The latest {len(reply.requests)} requests of the last {since}")
    for row in reply.requests:
        table.add_row(_age(row.received_at_s), row.request[:20], row.tenant, outcome_of(row), f"{row.prompt_tokens:,}",
                      f"{row.hit_tokens:,}", _duration(row.ttft_s), _duration(row.duration_s),
                      "\n".join(worker for worker in (row.prefill, row.decode) if worker))
    console.print(table)


def request(name: str, nats_url: str | None, data_dir: str | None, json: bool) -> None:
    """Prints one request."""
    row = cast(RequestReply, _ask(nats_url, data_dir, REQUEST, RequestQuery(request=name))).request
    if json:
        print_json(row)
        return
    hit = f" ({row.hit_tokens / row.prompt_tokens:.0%})" if row.prompt_tokens else ""
    _print_facts((
        ("request", row.request), ("for its client", escape(row.client_id) or "(none)"),
        ("received", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.received_at_s))),
        ("outcome", outcome_of(row) + (f", finish {row.finish}" if row.finish else "")),
        ("model", row.model), ("tenant", row.tenant or "(none)"),
        ("prompt tokens", f"{row.prompt_tokens:,}"),
        ("of them not computed", f"{row.hit_tokens:,}{hit}, predicted {row.predicted_hit_tokens:,}"),
        ("answer tokens", f"{row.completion_tokens:,}"),
        ("TTFT", f"{_duration(row.ttft_s)}, predicted {format_seconds(row.predicted_ttft_s)}"),
        ("TBT", _duration(row.tbt_s)), ("whole", format_seconds(row.duration_s)), ("attempts", str(row.attempts)),
        ("gateway", row.gateway), ("conductor", row.conductor), ("prefill", row.prefill), ("decode", row.decode),
        ("trace", row.trace or "(none)"),
        ("last full block", row.last_key.hex()[:KEY_DIGITS] or "(none)"),
    ))
    if row.stages is not None:
        table = compact_table("stage", number_column("value"))
        for field, value in msgspec.structs.asdict(row.stages).items():
            table.add_row(field.removesuffix("_s").removesuffix("_bytes").replace("_", " "), _stage(field, value))
        console.print(table)
    if row.decisions:
        console.print(f"moonbus explain {row.request} shows why it ran there", style="dim", highlight=False)


def storage(nats_url: str | None, data_dir: str | None, json: bool, *, since: str, steps: int, worker: str) -> None:
    """Prints what workers held over time."""
    query = StorageQuery(window_s=_window_s(since), steps=steps, worker=worker)
    reply = cast(StorageReply, _ask(nats_url, data_dir, STORAGE, query))
    if json:
        print_json(reply)
        return
    series: dict[tuple[str, str], dict[float, tuple[int, int]]] = defaultdict(dict)
    for row in reply.rows:
        series[row.worker, row.tier][row.at_s] = (row.blocks, row.nbytes)
    moments = sorted({row.at_s for row in reply.rows})
    table = compact_table(name_column("worker", 9), "tier", Column("over time", no_wrap=True), number_column("most"),
                          number_column("blocks now"), number_column("size now"),
                          title=f"Held during the last {since}, a bar for {format_age(reply.step_s)}")
    for (name, tier), held in sorted(series.items()):
        most = max(nbytes for _, nbytes in held.values())
        last_blocks, last_bytes = held.get(moments[-1], (0, 0))
        table.add_row(name, tier, _spark([held.get(at_s, (0, 0))[1] for at_s in moments], most), format_bytes(most),
                      f"{last_blocks:,}", format_bytes(last_bytes))
    console.print(table)
    if not reply.rows:
        console.print("no sample yet: the store-managers take one every few minutes", style="dim")


def _ask(nats_url: str | None, data_dir: str | None, subject: Subject, question: Any) -> Any:
    return ask(settings(nats_url, data_dir), subject.at(), question, who="store-manager")


def _write_page(path: Path, prefixes: Sequence[PrefixRow], *, title: str, said: str) -> None:
    from services.cli.kv_page import write_page

    write_page(path, prefixes, title=title, said=said)
    notes.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _tree(prefixes: Sequence[PrefixRow], *, title: str) -> Tree:
    """In the terminal: stretches as nodes, the hottest first; what is too much is counted."""
    root = Tree(title)
    nodes: dict[bytes, Tree] = {}
    hidden: dict[int, tuple[Tree, int]] = {}
    for row in prefixes:
        above = nodes.get(row.parent, root) if row.parent in nodes or not nodes else None
        if above is None or len(nodes) >= _MAX_NODES:
            near = nodes.get(row.parent)
            if near is not None:
                hidden[id(near)] = (near, hidden.get(id(near), (near, 0))[1] + 1)
            continue
        hits = f"[bold]{row.hits:,}[/] hit{'' if row.hits == 1 else 's'}"
        nodes[row.key] = above.add(
            f"{_short(row.key)}  depth {_depths(row)}  {row.tokens:,} tokens  {hits}  [dim]"
            f"{escape(row.tenant)}  {escape(_joined(row.workers) or 'no copy')}[/]", highlight=False)
    for node, count in hidden.values():
        node.add(f"[dim]… {count} more[/]")
    return root


def _print_facts(facts: Sequence[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(name, value)
    console.print(table)


def _digits(key: str) -> str:
    return key.strip().lower().removeprefix("0x")


def _short(key: bytes) -> str:
    return key.hex()[:KEY_DIGITS]


def _depths(row: PrefixRow) -> str:
    return str(row.depth) if row.blocks == 1 else f"{row.depth}-{row.depth + row.blocks - 1}"


def _joined(workers: Sequence[str]) -> str:
    return ", ".join(workers[:3]) + (f" +{len(workers) - 3}" if len(workers) > 3 else "")


def outcome_of(row: RequestRow) -> str:
    """How a request ended, in colour."""
    colour = _OUTCOME_COLOURS.get(row.outcome, "default")
    return f"[{colour}]{escape(row.outcome)}[/]" + (f" {escape(row.code)}" if row.code else "")


def _stage(name: str, value: Any) -> str:
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _meter(share: float) -> str:
    return "█" * round(8 * share) + "░" * (8 - round(8 * share))


def _spark(values: Sequence[int], most: int) -> str:
    return "".join(_BARS[max(1, round(8 * value / most)) if value and most else 0] for value in values)


def _duration(seconds: float | None) -> str:
    return "?" if seconds is None else format_age(seconds)


def _age(at_s: float | None) -> str:
    return "never" if at_s is None else f"{format_age(max(0.0, time.time() - at_s))} ago"


def _window_s(since: str) -> float:
    text = since.strip()
    try:
        if text.endswith("d"):
            return float(text[:-1]) * 86_400
        return parse_seconds(text)
    except ValueError as error:
        raise SettingError("--since", since, f"a duration like 90s, 2h or 7d ({error})") from error
