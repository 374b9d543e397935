"""``moonbus doctor`` on transfers: paths of a host, and the path of each pair of workers with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli import doctor_transfer
from shared.ids import HostId, Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.messages import Endpoint, Hello, Role
from shared.transfer import TransferSettings

SPEC = CacheSpec(model="m", weights_digest="", tokenizer_digest="", dtype="float32", layers=1, kv_heads=1, head_dim=1,
                 block_tokens=1, max_context=1)


def hello(name: str, host: str = "here", *, shm: bool = True, tcp: bool = True) -> Hello:
    worker, incarnation = WorkerId(name), Incarnation("1")
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    endpoint = Endpoint(worker=worker, incarnation=incarnation, host=HostId(host), shm="/tmp/x.sock" if shm else "",
                        tcp="127.0.0.1:1" if tcp else "")
    return Hello(worker=worker, incarnation=incarnation, role=role, spec=SPEC, endpoint=endpoint, capacity_blocks=1,
                 max_running=1, started_at_s=0.0)


def findings(*workers: Hello) -> dict[str, str]:
    """{path: what is said of it}"""
    return {finding.what: finding.found for finding in doctor_transfer.explain(workers)}


def test_pairs_with_the_same_answer_share_a_line_and_say_why() -> None:
    said = findings(hello("prefill-1"), hello("prefill-2"), hello("decode-1", "there"))
    assert list(said) == ["shm", "tcp"]
    assert said["shm"].startswith("prefill-1 → prefill-2, prefill-2 → prefill-1 (same host; copy: another process")
    assert "prefill-1 → decode-1" in said["tcp"] and "decode-1 → prefill-2" in said["tcp"]
    assert "(network; copy: another process" in said["tcp"] and "shm: another host" in said["tcp"]


def test_decode_workers_send_each_other_nothing() -> None:
    assert findings(hello("decode-1"), hello("decode-2")) == {}


def test_many_pairs_are_counted_not_listed() -> None:
    said = findings(*(hello(f"prefill-{i}") for i in range(10)))
    assert said["shm"].count("→") == doctor_transfer.MAX_PAIRS and "and 78 more" in said["shm"]


def test_a_pair_without_a_path_is_a_failure() -> None:
    here, there = hello("prefill-1", tcp=False), hello("decode-1", "there", tcp=False)
    finding, = doctor_transfer.explain([here, there])
    assert finding.verdict == "fail" and finding.what == "no path"
    assert "tcp: peer offers none" in finding.found


def test_a_path_that_is_switched_off_or_misspelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_TRANSFER_PATHS", "tcp,shn")
    said = {finding.what: finding for finding in doctor_transfer.examine_host()}
    assert list(said)[:2] == ["tcp", "shn"]
    assert said["shn"].verdict == "fail" and said["shm"].found.startswith("switched off")


def test_an_address_that_is_not_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_TRANSFER_HOST", "203.0.113.7")
    tcp = next(finding for finding in doctor_transfer.examine_host() if finding.what == "tcp")
    assert tcp.verdict == "fail" and "203.0.113.7" in tcp.found and "MOONBUS_TRANSFER_HOST" in tcp.advice


def test_rdma_without_a_device(tmp_path: Path) -> None:
    finding = doctor_transfer._rdma(TransferSettings(), tmp_path / "none")
    assert finding.verdict == "ok" and finding.found.startswith("no device; ")


def test_rdma_tells_the_state_of_each_port(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "2: INIT")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    finding = doctor_transfer._rdma(TransferSettings(), tmp_path)
    assert finding.verdict == "warn" and finding.found.startswith("mlx5_0 is down, mlx5_1 is init; ")
