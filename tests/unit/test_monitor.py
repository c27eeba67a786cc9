"""The monitor beside a launch, where its Ray is not needed."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from traceml_ray.launchers import command, torchrun, view_processes
from traceml_ray.launchers import monitor as monitors
from traceml_ray.launchers.arguments import Nodes
from traceml_ray.launchers.bring_up import BringUp
from traceml_ray.launchers.cluster import PrivateRay
from traceml_ray.launchers.command import Forwarder
from traceml_ray.launchers.helper import HelperRequest
from traceml_ray.launchers.monitor import Monitor, monitor_of
from traceml_ray.launchers.view_processes import DashboardProcess
from traceml_ray.monitor import offline
from traceml_ray.monitor.offline import OfflineEnd, OfflineRequest, Reply, finish_offline
from traceml_ray.ray.actors import ActorConfig
from traceml_ray.settings import Settings
from traceml_ray.store.session import SessionError, SessionFolder, holder, prepare
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no core, or whose modules come from a busy disk, is waited for."""
    for limit in ("DISK_S", "REPORT_S"):
        monkeypatch.setattr(offline, limit, 240.0)


@pytest.mark.usefixtures("patient")
def test_session_begins_with_its_launcher_even_if_ray_never_came_up(tmp_path: Path) -> None:
    """A short run on a busy machine is over before Ray is up: it still lasted as long as it did."""
    monitor = Monitor(Settings(out=str(tmp_path), session="s"), {"launcher": "torchrun"}, {}, Nodes())
    made = datetime.now(timezone.utc)
    monitor.finish(0, [])
    session = json.loads((tmp_path / "s" / "summary.json").read_bytes())["session"]
    assert datetime.fromisoformat(session["started_at"]) <= made


def test_running_session_of_the_same_job_name_does_not_prevent_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same job again, while another node is still at the end of the one before."""
    held = prepare(tmp_path, "job-1")
    settings, nodes = Settings(out=str(tmp_path)), Nodes(count=2, job="job-1")
    assert monitor_of(settings, {}, {}, nodes) is None
    assert "no monitor for this run: session 'job-1' is already running" in capsys.readouterr().err
    with pytest.raises(SessionError, match="already running"):
        monitor_of(Settings(out=str(tmp_path), session="job-1"), {}, {}, nodes)
    held.release()
    made = monitor_of(settings, {}, {}, nodes)
    assert made is not None
    made.discard()


class InThisProcess:
    """Ends a session from its file, as `OfflineEnd` does."""

    def __init__(self, request: OfflineRequest, _environ: object, _cwd: Path) -> None:
        self._request = request

    def finish(self, why: str = "") -> Reply:
        asked = self._request
        finish_offline(Path(asked.folder), asked.settings, asked.finish, None, asked.info, why)
        return Reply()


OF_THE_END = {
    "the live view": (view_processes.LiveView, "end"),
    "the dashboard": (DashboardProcess, "end"),
    "the dashboard, at last": (DashboardProcess, "kill"),
    "the helper": (BringUp, "end"),
    "the relay": (monitors, "ask_finish"),
    "Ray": (PrivateRay, "stop"),
    "processes, without /proc": (psutil, "pids"),
    "the files": (InThisProcess, "finish"),
    "the verdict": (monitors, "_report"),
    "the folder": (Monitor, "_clear"),
    "the thread": (BringUp, "close"),
    "the session": (SessionFolder, "release"),
    "the end": (Monitor, "_finish"),
}


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A launcher gives its own process the variables of ranks."""
    before = {**os.environ}
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    """
    Return a monitor with all parts; each of its processes is one that ends when its stdin is closed. None of
    them outlasts the test.
    """
    processes = list[subprocess.Popen[bytes]]()
    monkeypatch.setattr(BringUp, "begin", lambda _self: None)
    monkeypatch.setattr(monitors, "OfflineEnd", InThisProcess)
    monkeypatch.setattr(monitors, "terminal", lambda: os.open(os.devnull, os.O_WRONLY))
    settings = Settings(out=str(tmp_path), session="s", nice=0)
    made = Monitor(settings, {}, {**os.environ}, Nodes(), {"port": "0", "linger": "0"}, live=True)
    popen = subprocess.Popen

    def start(_command: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(["cat"], **options))
        return processes[-1]

    with monkeypatch.context() as stand_in:
        stand_in.setattr(subprocess, "Popen", start)
        made.start()
    assert made._ray is not None
    made._ray._process = ray = popen(["sleep", "600"], start_new_session=True)
    yield made
    ray.kill()
    ray.wait(240)
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(240)
    for thread in threading.enumerate():
        if thread.name == "traceml-dashboard":  # it says what became of its process
            thread.join(240)


def harm(monkeypatch: pytest.MonkeyPatch, part: str, error: BaseException) -> None:
    """Have a part of the end raise, once it has done what it does: nothing of this test is left."""
    where, name = OF_THE_END[part]
    does = getattr(where, name)

    def fails(*args: Any, **keywords: Any) -> None:
        if part != "processes, without /proc":
            does(*args, **keywords)
        raise error

    monkeypatch.setattr(where, name, fails)


@pytest.mark.parametrize(
    ("part", "error"), [*((part, KeyboardInterrupt()) for part in OF_THE_END), ("the relay", SystemExit(7))]
)
def test_nothing_in_the_end_changes_how_the_job_ends(
    started: Monitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    part: str,
    error: BaseException,
) -> None:
    harm(monkeypatch, part, OSError("no room") if part == "processes, without /proc" else error)
    monkeypatch.setattr(torch_run, "run", lambda _args: print("trained"))
    torchrun._train(torchrun._parse([__file__]), started)
    out, err = capfd.readouterr()
    assert out == "trained\n" and "Traceback" not in err
    failures = [line for line in err.splitlines() if "SystemExit: 7" in line or "interrupted" in line]
    assert len(failures) == (part != "processes, without /proc"), err
    assert json.loads((tmp_path / "s" / "summary.json").read_bytes())["session"]["status"] == "finished"
    assert holder(tmp_path / "s") is None


def test_failures_that_cannot_be_told_are_still_those_of_torchrun(
    started: Monitor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = ChildFailedError("train.py", {0: ProcessFailure(0, 1, 3, "")})

    def fails(*_: Any) -> None:
        raise failed

    def exits(*_: Any) -> None:
        raise SystemExit(7)

    monkeypatch.setattr(torch_run, "run", fails)
    monkeypatch.setattr(torchrun, "_failures", exits)
    with pytest.raises(ChildFailedError) as raised:
        torchrun._train(torchrun._parse([__file__]), started)
    assert raised.value is failed
    assert "the failures of ranks are not in the session: SystemExit: 7" in capfd.readouterr().err


def test_command_has_its_exit_code_whatever_happens_to_our_end(
    started: Monitor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(monkeypatch, "the end", SystemExit(7))
    closes = Forwarder.close

    def exits(self: Forwarder) -> None:
        closes(self)
        raise SystemExit(7)

    monkeypatch.setattr(Forwarder, "close", exits)
    monkeypatch.setattr(Monitor, "start", lambda _self: None)
    assert command._run(["sh", "-c", "exit 3"], started) == 3
    assert capsys.readouterr().err.count("SystemExit: 7") == 2


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Monitor]:
    """A monitor without Ray that does not let go of its session at the end."""
    made = Monitor(Settings(out=str(tmp_path), session="s"), {}, {**os.environ}, Nodes())
    yield made
    assert made._session is not None
    made._session.release()


def test_end_does_not_wait_for_a_disk_that_hangs(
    held: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who reads a FIFO waits for ever, as for a disk that does not answer."""
    os.mkfifo(tmp_path / "s" / "session.sqlite")
    spool = Path(held.rank_environment()["TRACEML_SPOOL"])
    assert not spool.resolve().is_relative_to(tmp_path)  # a rank that ends does not wait for that disk either
    (spool / "a.spool").write_bytes(b"")
    ends: list[OfflineEnd] = []
    finish = OfflineEnd.finish

    def noted(self: OfflineEnd, why: str = "") -> Reply:
        ends.append(self)
        return finish(self, why)

    monkeypatch.setattr(OfflineEnd, "finish", noted)
    monkeypatch.setattr(torch_run, "run", lambda _args: print("trained"))
    torchrun._train(torchrun._parse([__file__]), held)
    out, err = capfd.readouterr()
    assert out == "trained\n"
    line, rows = err.splitlines()
    assert f"session 's' could not be finished: the disk of {tmp_path / 's'} does not answer" in line
    assert "reports are not written" in line and f"traceml-ray report {tmp_path / 's'}" in line
    assert rows == f"traceml-ray: rows of 1 ranks could not be delivered; they are in {spool}"
    assert (spool / "a.spool").exists()
    shutil.rmtree(spool.parent)
    assert [end._process.returncode for end in ends] == [-9]
    assert holder(tmp_path / "s") == os.getpid()  # until this process ends: to let go of it is to write, too


def test_end_does_not_wait_for_a_disk_that_hangs_when_all_is_written(
    held: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "s" / "summary.json")
    monkeypatch.setattr(monitors, "ask_finish", lambda *_: wire.Finished(codec.VERSION, "written"))
    monkeypatch.setattr(monitors, "LAUNCHER_S", 0.2)
    held.finish(0, [])
    (line,) = capfd.readouterr().err.splitlines()
    assert f"the disk of {tmp_path / 's'} does not answer" in line
    with (tmp_path / "s" / "summary.json").open("w") as summary:  # the thread that waits goes on
        summary.write("{}")


def test_start_that_waits_for_the_disk_does_not_hold_up_the_end(tmp_path: Path) -> None:
    waits, answers = threading.Event(), threading.Event()

    def show(*_: str) -> None:
        waits.set()
        answers.wait(240)

    request = HelperRequest(0, "", ActorConfig("s", Settings()), 1)
    start = BringUp(None, request, {}, tmp_path, 0, show)
    start.begin()
    assert waits.wait(240)
    start.end()
    answers.set()  # the disk answers after all: nothing is started any more
    start.close()
    with start._starting:
        assert start._helper is None


@pytest.mark.usefixtures("patient")
def test_process_that_cannot_begin_is_an_error_with_its_exit_code(tmp_path: Path) -> None:
    request = OfflineRequest(str(tmp_path), Settings(), wire.Finish(codec.VERSION, 0), None, {})
    reply = OfflineEnd(request, {"PYTHONHOME": "/nowhere"}, tmp_path).finish()
    assert "ended with exit code 1" in reply.error


def test_process_that_waits_for_a_core_is_not_taken_for_one_whose_disk_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        before: tuple[Any, ...] | None = ()
        while (now := offline._progress(process.pid)) is None or now != before:
            before = now  # it is still starting
        monkeypatch.setattr(psutil.Process, "status", lambda _self: psutil.STATUS_RUNNING)
        assert offline._progress(process.pid) is None
    finally:
        process.communicate(timeout=240)
