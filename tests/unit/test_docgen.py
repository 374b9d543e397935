"""The generated pages are those of the code as it is now."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from services import docgen
from shared.bus.subjects import ALL, PREFIX

DOCS = Path(__file__).parents[2] / "docs"


def test_committed_pages_are_up_to_date(tmp_path: Path) -> None:
    for path in docgen.write(tmp_path):
        assert (DOCS / path.name).read_text() == path.read_text(), f"docs/{path.name} is old: run `make docs`"


def test_every_subject_and_payload_is_there() -> None:
    page = docgen.wire()
    for subject in ALL:
        assert f"`{PREFIX}{subject.template}`" in page
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", page, re.MULTILINE)}
    targets = set(re.findall(r"\]\(#(\w+)\)", page))
    assert targets and targets <= headings


def test_every_table_row_has_its_heads_cells() -> None:
    for page in (docgen.wire(), docgen.configuration(), docgen.instruments()):
        for table in re.findall(r"(?:^\|.*\|$\n?)+", page, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, table


def test_sentences_under_fields_reach_the_page() -> None:
    page = docgen.wire()
    assert "| `num_tokens` | `int` | required | Prompt length. |" in page
    assert "`Literal['ttft', 'tbt', 'capacity', 'quota', 'no_worker']`" in page


def test_no_field_has_the_sentence_of_another_one() -> None:
    for path in (DOCS.parent / "shared" / "messages").glob("*.py"):
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            is_text = [isinstance(one, ast.Expr) for one in kind.body]
            twice = [kind.body[i].lineno for i in range(1, len(is_text)) if is_text[i - 1] and is_text[i]]
            assert not twice, f"{kind.name} in {path.name}, lines {twice}"


def test_settings_tell_variable_type_unit_and_default() -> None:
    page = docgen.configuration()
    assert "| `MOONBUS_*_NATS_URL` | `str` | `nats://127.0.0.1:4222` |" in page
    assert re.search(r"\| `MOONBUS_GATEWAY_MAX_BODY_BYTES` \| `int \(bytes\)` \| `8388608` \|", page)


def test_metrics_tell_type_labels_and_meaning() -> None:
    page = docgen.instruments()
    assert "| `moonbus_gateway_requests_total` | counter | `model`, `outcome`, `code` | Finished requests" in page
    assert "| `moonbus_gateway_ttft_seconds` | histogram | `model` | Arrival to first token. |" in page


def test_pages_link_to_what_is_there() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"
