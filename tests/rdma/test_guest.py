"""RDMA without hardware: boots a machine with a Soft-RoCE device (``tests/rdma/vm``) and runs tests there.

Skipped, with the reason, where there can be no such machine. ``MOONBUS_TEST_CACHE`` names the directory in which the
machine and the bindings are kept; else it is the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import platformdirs
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VM = (sys.executable, str(HERE / "vm"))
TIMEOUT_S = 600
"""Five times what the longest takes on two idle processors: on a busy machine emulated ones starve first."""
UNAVAILABLE = 77

pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


@pytest.fixture(scope="session")
def cache() -> Path:
    """Where what is downloaded is kept."""
    directory = Path(os.environ.get("MOONBUS_TEST_CACHE") or platformdirs.user_cache_dir("moonbus")) / "rdma"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def environment(cache: Path) -> dict[str, str]:
    """With the bindings on the path of imports."""
    environment = {**os.environ, "RDMA_VM_CACHE": str(cache / "vm"), "OPENBLAS_NUM_THREADS": "1",
                   "PYTHONDONTWRITEBYTECODE": "1"}
    prepared = subprocess.run([*VM, "--prepare"], env=environment, check=False, capture_output=True, text=True)
    if prepared.returncode == UNAVAILABLE:
        pytest.skip(prepared.stderr.strip())
    assert prepared.returncode == 0, prepared.stderr
    found, reasons = [], []
    for get in (pyverbs, ibverbs):
        try:
            found.append(str(get(cache)))
        except (OSError, subprocess.CalledProcessError) as error:
            reasons.append(f"{get.__name__}: {getattr(error, 'stderr', None) or error}".strip())
    if not found:
        pytest.skip(f"no binding of libibverbs for this Python: {'; '.join(reasons)}")
    return {**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *found])}


def pyverbs(cache: Path) -> Path:
    """The distribution's package, unpacked: it installs nothing here. For the distribution's version of Python only."""
    directory = cache / f"pyverbs-{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "usr/lib/python3/dist-packages"
    if not packages.exists():
        directory.mkdir(exist_ok=True)
        run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", "python3-pyverbs", cwd=directory)
        run("dpkg-deb", "-x", str(next(directory.glob("*.deb"))), str(directory))
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any(tag in path.name for path in packages.glob("pyverbs/*.so")):
        raise FileNotFoundError(f"it has no modules for {tag}")
    return packages


def ibverbs(cache: Path) -> Path:
    """The wheel that serves where pyverbs cannot be imported."""
    directory = cache / "ibverbs"
    if not (directory / "ibverbs").exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--target", str(directory), "ibverbs")
    return directory


def run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)


def start_machine(environment: dict[str, str], command: Sequence[str], *options: str) -> subprocess.Popen[str]:
    """Runs the command in a machine of its own."""
    return subprocess.Popen([*VM, "--timeout", str(TIMEOUT_S), *options, "--", *command], cwd=ROOT, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(machine: subprocess.Popen[str]) -> str:
    """What its command wrote; fails the test with it when the command fails."""
    output, _ = machine.communicate()
    if machine.returncode:
        pytest.fail(f"status {machine.returncode}:\n{output[-20_000:]}", pytrace=False)
    return output


def pytest_there(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Runs pytest in a machine, without what would take an emulated processor most of the time.

    Up to the first failure: what it says is lost when the machine is stopped for being slow.
    """
    spared = ["-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:faker", "-p", "no:hypothesispytest",
              "--assert=plain", f"--confcutdir={HERE / 'guest'}", "-p", "tests.rdma.guest.loops"]
    return start_machine(environment, [sys.executable, "-m", "pytest", "-qx", *spared, "--durations=5", *arguments])


@pytest.fixture(scope="session")
def runs(environment: dict[str, str]) -> Iterator[dict[str, Future[str]]]:
    """{group of tests: what it wrote}; each in a machine of its own with one processor, at the same time."""
    groups = {
        # An emulated processor takes 40 s to import torch, and a quarter of a minute for hypothesis' examples.
        "contract": ["-k", "rdma and not tensor and not any_slices", "tests/contract/test_transfer.py"],
        "faults": ["tests/rdma/guest"],
    }
    with ThreadPoolExecutor(len(groups)) as pool:
        # started here and now: a process that begins in the middle of a test would count as left behind by it
        yield {name: pool.submit(output_of, pytest_there(environment, *arguments))
               for name, arguments in groups.items()}


def test_the_contract_of_transports_holds(runs: dict[str, Future[str]]) -> None:
    assert " passed" in runs["contract"].result()


def test_faults_between_processes_of_one_machine(runs: dict[str, Future[str]]) -> None:
    assert " passed" in runs["faults"].result()


def test_two_machines(environment: dict[str, str]) -> None:
    output = output_of(start_machine(environment, [sys.executable, "tests/rdma/guest/pair.py"], "--pair"))
    assert f"[0] pushed {8 << 20} bytes by rdma\n" in output and "[1] all of it arrived\n" in output, output
