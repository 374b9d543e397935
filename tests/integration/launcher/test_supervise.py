"""The supervisor with tiny children: real processes, no service of ours."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.launcher.plan import Fact, Unit
from services.launcher.supervise import RestartRule, StackFailed, Supervisor, UnitView, last_words

READY = "import json, sys; print(json.dumps({'ready': 'x', 'id': 'x', 'admin': '127.0.0.1:1'}), flush=True)\n"
STAY = READY + "import signal; signal.pause()\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "while 1: signal.pause()\n"
QUICK = RestartRule(first_delay_s=0.01, most_delay_s=0.02, limit=3)


def child(name: str, code: str, **values: object) -> Unit:
    return Unit(**{"name": name, "service": name, "kind": "service", "argv": (sys.executable, "-c", code),
                   "start_timeout_s": 10.0, **values})


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        await asyncio.sleep(0.01)


def view(supervisor: Supervisor, name: str) -> UnitView:
    return next(view for view in supervisor.views() if view.name == name)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


class SomeServer:
    """Runs until told that it crashed."""

    url = "nats://here:1"
    pid = 1

    def __init__(self) -> None:
        self.running = True

    async def start(self) -> None:
        self.running = True


SERVER = SomeServer()


@asynccontextmanager
async def some_server() -> AsyncIterator[SomeServer]:
    SERVER.running = True
    yield SERVER


async def test_starts_after_what_it_needs_and_hands_facts_on(tmp_path: Path) -> None:
    units = (
        Unit("nats", "nats", "server"),
        child("migrate", "import os, pathlib; pathlib.Path(os.environ['MARK']).write_text(os.environ['URL'])",
              kind="task", after=("nats",), env={"URL": Fact("nats", "url"), "MARK": str(tmp_path / "mark")}),
        child("gateway", "import os, pathlib; assert pathlib.Path(os.environ['MARK']).exists()\n" + STAY,
              after=("migrate",), env={"MARK": str(tmp_path / "mark")}),
    )
    async with Supervisor(units, log_dir=tmp_path / "logs", servers={"nats": some_server}) as supervisor:
        await supervisor.start()
        assert (tmp_path / "mark").read_text() == "nats://here:1"
        assert supervisor.facts("gateway")["admin"] == "127.0.0.1:1"
        assert [view.state for view in supervisor.views()] == ["ready", "stopped", "ready"]
        pid = view(supervisor, "gateway").pid
    assert gone(pid)
    assert [view.state for view in supervisor.views()] == ["stopped"] * 3


async def test_a_child_that_fails_to_start_gives_its_last_line(tmp_path: Path) -> None:
    code = "import sys; print('b: port 80 is taken\\nbye', file=sys.stderr); sys.exit(1)"
    async with Supervisor((child("a", STAY), child("b", code)), log_dir=tmp_path, servers={}) as supervisor:
        with pytest.raises(StackFailed, match=r"b did not start \(ended with exit code 1\): port 80.*b\.log"):
            await supervisor.start()
        await until(lambda: view(supervisor, "a").pid)
        pid = view(supervisor, "a").pid
    assert gone(pid)


async def test_a_task_that_fails_fails_the_start(tmp_path: Path) -> None:
    migrate = child("migrate", "raise SystemExit('no such table')", kind="task")
    units = (migrate, child("a", STAY, after=("migrate",)))
    async with Supervisor(units, log_dir=tmp_path, servers={}) as supervisor:
        with pytest.raises(StackFailed, match="migrate failed: no such table"):
            await supervisor.start()
        assert view(supervisor, "a").state == "waiting"


async def test_a_child_that_never_becomes_ready_meets_its_deadline(tmp_path: Path) -> None:
    units = (child("a", "import signal; print('thinking', flush=True); signal.pause()", start_timeout_s=0.5),)
    async with Supervisor(units, log_dir=tmp_path, servers={}) as supervisor:
        with pytest.raises(StackFailed, match=r"was not ready within 0\.5 s\): thinking"):
            await supervisor.start()


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    units = (child("a", "", argv=("/no/such/program",)),)
    async with Supervisor(units, log_dir=tmp_path, servers={}) as supervisor:
        with pytest.raises(StackFailed, match="/no/such/program: No such file"):
            await supervisor.start()


async def test_a_server_that_ended_is_started_again(tmp_path: Path) -> None:
    news: list[str] = []
    async with Supervisor((Unit("nats", "nats", "server"),), log_dir=tmp_path, servers={"nats": some_server},
                          rule=QUICK, on_news=news.append) as supervisor:
        await supervisor.start()
        SERVER.running = False
        await until(lambda: SERVER.running and view(supervisor, "nats").state == "ready")
    assert news == ["nats ended; starting it again in 10.0 ms"]


async def test_a_crashed_service_comes_back_under_its_name(tmp_path: Path) -> None:
    news: list[str] = []
    async with Supervisor((child("prefill-1", STAY),), log_dir=tmp_path, servers={}, rule=QUICK,
                          on_news=news.append) as supervisor:
        await supervisor.start()
        first = view(supervisor, "prefill-1").pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: view(supervisor, "prefill-1").restarts == 1
                    and view(supervisor, "prefill-1").state == "ready")
        assert view(supervisor, "prefill-1").pid not in (0, first)
    assert news[0] == "prefill-1 was ended by SIGKILL; starting it again in 10.0 ms"
    assert news[1].startswith("prefill-1 is ready again after ")


async def test_a_setting_of_the_person_who_starts_it_wins_over_what_the_launcher_would_choose(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONBUS_A_THREADS", "7")
    monkeypatch.setenv("MOONBUS_A_WORKER_ID", "mine")
    code = "import os; print('{\"ready\": \"a\", \"env\": \"%s %s %s\"}' % tuple(map(os.environ.get, " \
        "('MOONBUS_A_THREADS', 'MOONBUS_A_POOL', 'MOONBUS_A_WORKER_ID'))), flush=True); import signal; signal.pause()"
    unit = child("a", code, env={"MOONBUS_A_WORKER_ID": "a"},
                 defaults={"MOONBUS_A_THREADS": "1", "MOONBUS_A_POOL": "2"})
    async with Supervisor((unit,), log_dir=tmp_path, servers={}) as supervisor:
        await supervisor.start()
        assert supervisor.facts("a")["env"] == "7 2 a"


async def test_killing_everything_starts_nothing_again(tmp_path: Path) -> None:
    news: list[str] = []
    async with Supervisor((child("a", STAY), child("b", STAY)), log_dir=tmp_path, servers={}, rule=QUICK,
                          on_news=news.append) as supervisor:
        await supervisor.start()
        supervisor.kill()
    assert news == []


async def test_an_essential_service_that_keeps_crashing_ends_the_stack(tmp_path: Path) -> None:
    code = READY + "raise SystemExit('a: worker a is refused')"
    async with Supervisor((child("a", code),), log_dir=tmp_path, servers={}, rule=QUICK) as supervisor:
        await supervisor.start()
        with pytest.raises(StackFailed, match=r"a ended 3 times in a row .*worker a is refused"):
            async with asyncio.timeout(20):
                await supervisor.wait()


async def test_the_rest_goes_on_without_one_that_is_not_essential(tmp_path: Path) -> None:
    news: list[str] = []
    units = (child("a", STAY), child("store-manager", READY + "raise SystemExit(3)", essential=False))
    async with Supervisor(units, log_dir=tmp_path, servers={}, rule=QUICK, on_news=news.append) as supervisor:
        await supervisor.start()
        await until(lambda: view(supervisor, "store-manager").state == "failed")
        assert view(supervisor, "a").state == "ready"
    assert "giving it up, the rest goes on" in news[-1]


async def test_stops_in_reverse_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    polite = ("import signal, pathlib, time, os\nsignal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("
              "os.environ['MARK']).write_text(str(time.monotonic())), os._exit(0)))\n") + STAY
    units = (
        child("first", polite, env={"MARK": str(tmp_path / "first")}),
        child("deaf", DEAF),
        child("last", polite, env={"MARK": str(tmp_path / "last")}),
    )
    supervisor = Supervisor(units, log_dir=tmp_path, servers={}, stop_grace_s=0.5)
    await supervisor.start()
    pid = view(supervisor, "deaf").pid
    await supervisor.stop()
    assert gone(pid)
    assert float((tmp_path / "last").read_text()) + 0.4 < float((tmp_path / "first").read_text())


async def test_kill_ends_a_slow_stop_at_once(tmp_path: Path) -> None:
    supervisor = Supervisor((child("deaf", DEAF),), log_dir=tmp_path, servers={}, stop_grace_s=600)
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: view(supervisor, "deaf").state == "stopping")
    supervisor.kill()
    async with asyncio.timeout(5):
        await stopping


async def test_stop_in_the_middle_of_a_start(tmp_path: Path) -> None:
    never = "import signal; print('thinking', flush=True); signal.pause()"
    supervisor = Supervisor((child("a", never), child("b", STAY, after=("a",))), log_dir=tmp_path, servers={})
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: view(supervisor, "a").pid)
    pid = view(supervisor, "a").pid
    await supervisor.stop()
    assert gone(pid)
    starting.cancel()


async def test_children_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = f"""
import asyncio, sys, pathlib
from services.launcher.plan import Unit
from services.launcher.supervise import Supervisor
async def main():
    unit = Unit("a", "a", "service", (sys.executable, "-c", {STAY!r}))
    async with Supervisor((unit,), log_dir=pathlib.Path({str(tmp_path)!r}), servers={{}}) as supervisor:
        await supervisor.start()
        print(supervisor.views()[0].pid, flush=True)
        await supervisor.wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", launcher, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), 20))
    process.kill()
    await process.wait()
    await until(lambda: gone(pid))


async def test_logs_keep_what_a_child_says_and_the_life_before(tmp_path: Path) -> None:
    units = (child("a", "import sys; print('hello'); print('oops', file=sys.stderr)\n" + STAY),)
    for _ in range(2):
        async with Supervisor(units, log_dir=tmp_path, servers={}) as supervisor:
            await supervisor.start()
            await until(lambda: "hello" in (tmp_path / "a.log").read_text())
    assert sorted((tmp_path / "a.log").read_text().split()) == ["hello", "oops"]
    assert (tmp_path / "a.log.1").exists()


def test_restart_rule_doubles_and_gives_up() -> None:
    rule = RestartRule(first_delay_s=1, most_delay_s=3, limit=4)
    assert [rule.delay_s(n) for n in (1, 2, 3, 4)] == [1, 2, 3, None]


def test_last_words_of_nothing(tmp_path: Path) -> None:
    assert last_words(tmp_path / "missing.log", "a") == ""
    (tmp_path / "empty.log").write_text("\n\n")
    assert last_words(tmp_path / "empty.log", "a") == ""
