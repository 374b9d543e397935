"""``moonbus doctor`` on transfers: paths of a host, and the path of each pair of workers with its reason."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from services.cli import doctor_transfer
from services.cli.doctor import report
from services.cli.findings import Finding
from shared.ids import HostId, Incarnation, WorkerId
from shared.kv import CacheSpec
from shared.messages import Endpoint, Hello, Role
from shared.transfer import TransferSettings, cuda, verbs
from shared.transfer.device import CardFacts

SPEC = CacheSpec(model="m", weights_digest="", tokenizer_digest="", dtype="float32", layers=1, kv_heads=1, head_dim=1,
                 block_tokens=1, max_context=1)


def hello(name: str, host: str = "here", *, shm: bool = True, tcp: bool = True, paths: str = "") -> Hello:
    worker, incarnation = WorkerId(name), Incarnation("1")
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    endpoint = Endpoint(worker=worker, incarnation=incarnation, host=HostId(host), shm="/tmp/x.sock" if shm else "",
                        tcp="127.0.0.1:1" if tcp else "", paths=paths.split())
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
    assert report([("pairs", [finding])]) == 1


def test_a_pair_takes_the_paths_of_its_sender_not_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_TRANSFER_PATHS", "shm")
    here, there = hello("prefill-1", paths="tcp"), hello("decode-1", paths="shm tcp")
    assert findings(here, there) == {"tcp": "prefill-1 → decode-1 (network)", "shm": "decode-1 → prefill-1 (same host)"}


def test_workers_whose_paths_differ_altogether_are_a_failure() -> None:
    one, other = hello("prefill-1", shm=False, paths="tcp"), hello("decode-1", tcp=False, paths="shm")
    found = list(doctor_transfer.explain([one, other]))
    assert [(finding.verdict, finding.found) for finding in found] == [
        ("fail", "prefill-1 → decode-1 (tcp: peer offers none)"),
        ("fail", "decode-1 → prefill-1 (shm: peer offers none)")]
    assert report([("pairs", found)]) == 1


def test_a_path_of_a_newer_worker_is_left_out() -> None:
    assert list(findings(hello("prefill-1", paths="warp tcp"), hello("decode-1", paths="tcp"))) == ["tcp"]


def test_a_misspelt_setting_is_said_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_TRANSFER_PATH", "tcp")
    for finding in doctor_transfer.examine_host():
        assert finding.verdict == "fail" and "did you mean MOONBUS_TRANSFER_PATHS?" in finding.found
    pairs, = doctor_transfer.explain([hello("prefill-1"), hello("decode-1")])
    assert pairs.verdict == "fail"


def host() -> dict[str, Finding]:
    """{what: the finding of this host}"""
    return {finding.what: finding for finding in doctor_transfer.examine_host()}


@pytest.mark.parametrize("paths", ["", "copy", "rdma", "nvlink,rdma"])
def test_paths_none_of_which_serves_two_workers_here(paths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "rdma" in paths and verbs.nics():
        pytest.skip("this host has RDMA")
    monkeypatch.setenv("MOONBUS_TRANSFER_PATHS", paths)
    said = host()
    assert said["paths"].verdict == "fail" and "name shm or tcp in MOONBUS_TRANSFER_PATHS" in said["paths"].advice
    assert report([("host", said.values())]) == 1
    if "rdma" in paths:
        assert said["rdma"].verdict == "warn"


def test_one_path_that_serves_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_TRANSFER_PATHS", "shm")
    said = host()
    assert "paths" not in said and said["tcp"].verdict == "absent"
    assert report([("host", said.values())]) == 0


def test_each_kind_of_worker_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_DECODE_TRANSFER_PATHS", "copy")
    said = host()
    assert said["paths of decode workers"].verdict == "fail" and said["tcp of prefill workers"].verdict == "ok"


def test_an_rdma_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_TRANSFER_RDMA_DEVICES", "mlx5_77")
    rdma = host()["rdma"]
    assert rdma.verdict == "fail" and "there is no mlx5_77" in rdma.found
    assert "MOONBUS_TRANSFER_RDMA_DEVICES" in rdma.advice
    monkeypatch.setenv("MOONBUS_TRANSFER_PATHS", "tcp")
    assert host()["rdma devices"].verdict == "warn"


@pytest.mark.parametrize("directory", ["missing", "file", "x" * 120, "/proc/self"])
def test_a_socket_directory_that_takes_none(directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / ("x" * 120)).mkdir()
    monkeypatch.setenv("MOONBUS_TRANSFER_SOCKET_DIR", str(tmp_path / directory))
    said = host()["socket directory"]
    assert said.verdict == "fail" and "MOONBUS_TRANSFER_SOCKET_DIR" in said.advice


def test_a_socket_directory_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("MOONBUS_TRANSFER_SOCKET_DIR", short)
        assert host()["socket directory"].verdict == "ok"
        assert list(Path(short).iterdir()) == []


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
    finding = doctor_transfer._rdma(TransferSettings(), False, tmp_path / "none")
    assert finding.verdict == "absent" and finding.found.startswith("no device; ")


def test_how_the_cards_get_at_each_gpus_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [CardFacts(), CardFacts(no_dma_buf="this driver exports none"), CardFacts("no libcuda", "it is not loaded")]
    devices = tuple(cuda.CudaDevice(i, "one", f"uuid-{i}", ()) for i in range(3))
    monkeypatch.setattr(cuda, "probe", lambda: cuda.CudaProbe(devices))
    monkeypatch.setattr(cuda, "card_facts", lambda index: facts[index])
    assert list(doctor_transfer._gpu_memory("")) == [
        "memory of GPU 0 by dma-buf", "memory of GPU 1 by peer memory (no dma-buf: this driver exports none)",
        "memory of GPU 2 staged through host memory (no dma-buf: no libcuda; no peer memory: it is not loaded)"]


def test_rdma_tells_the_state_of_each_port(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "2: INIT")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    finding = doctor_transfer._rdma(TransferSettings(), False, tmp_path)
    assert finding.verdict == "warn" and finding.found.startswith("mlx5_0 is down, mlx5_1 is init; ")
    assert doctor_transfer._rdma(TransferSettings(rdma_devices=("mlx5_1",)), False, tmp_path).verdict == "fail"
