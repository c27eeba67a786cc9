"""`python -m traceml_ray.launch` as people run it: real launches of small scripts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import is_actor, until
from sessions import check_ledger, watch

from traceml_ray.identity import RankIdentity
from traceml_ray.launchers import control
from traceml_ray.launchers.cluster import PrivateRay, free_port, members
from traceml_ray.stages import N_STAGES, SEGMENT_BITS
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import LIVE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

# Plays a rank whose agent finds the relay: sends one batch, waits for the reply; of the last one it leaves a
# copy. Does not import torch.
RANK = """
import os, socket, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def talk(data):
    end = time.monotonic() + 150
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            try:
                sock.connect(os.environ["TRACEML_SOCKET"])
                sock.send(data)
                sock.recv(65536)
                return
            except OSError:
                time.sleep(0.05)
    raise SystemExit("no relay")
for flag, number in (("--batch", "0"), ("--other", "2")):
    if flag in sys.argv and rank == number:
        talk(bytes.fromhex(sys.argv[sys.argv.index(flag) + 1]))
print("rank", rank, "is up", flush=True)
if "--environ" in sys.argv and rank == ("1" if "--fail" in sys.argv else "0"):  # who fails ends the others
    print("environ", sorted(name for name in os.environ if name.startswith(("TRACEML", "RAY"))))
if "--fail" in sys.argv and rank == "1":
    raise ValueError("this is the reason")
if "--wait" in sys.argv:
    time.sleep(60)
if "--then" in sys.argv:
    go, data = sys.argv[sys.argv.index("--then") + 1:][:2]
    while not os.path.exists(go):
        time.sleep(0.05)
    if rank == "0":
        talk(bytes.fromhex(data))
        from traceml_ray.wire.spool import write_spool
        write_spool(Path(os.environ["TRACEML_SPOOL"]) / "rank0.spool", [bytes.fromhex(data)])
        open(go + ".sent", "w").close()
    while not os.path.exists(go + ".end"):
        time.sleep(0.05)
    raise SystemExit(1)
"""


def batch(
    process_id: str = "rank0", pid: int = 1, rank: int = 0, *, seq: int = 0, first: int = 0, n: int = 1,
    final: bool = True,
) -> str:  # fmt: skip
    who = RankIdentity(rank, 0, rank // 2, 4, 2, 2, "host", None, "job", 0, pid, "explicit")
    keys = b"".join((step << 8).to_bytes(8, "little") for step in range(first + 1, first + 1 + n))
    rows = (5_000_000).to_bytes(8, "little") * N_STAGES * n
    sent = codec.VERSION, process_id, seq, 0, first + n, 0, first, keys, bytes(n), rows, who
    return codec.encode(wire.RankBatch(*sent, final=final)).hex()


class Bench:
    """A place to launch from. Every process started there carries a mark, until Ray renames it."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.script = folder / "train.py"
        self.script.write_text(RANK)
        self.mark = uuid.uuid4().hex
        self.sessions: set[int] = set()
        (folder / "home").mkdir()
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "TRACEML_"))},
            "OMP_NUM_THREADS": "1",
            "TRACEML_NICE": "0",
            "HOME": str(folder / "home"),
            "LAUNCH_MARK": self.mark,
        }

    def command(self, *args: str, module: str = "traceml_ray.launch") -> list[str]:
        return [sys.executable, "-m", module, "--nproc-per-node", "2", *args]

    def run(self, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, **environ)
        while process.poll() is None:
            self.ours()
            time.sleep(0.2)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("--out", str(self.out), *args),
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def summary(self, session: str) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / session / "summary.json").read_text())
        return summary

    def ours(self) -> list[psutil.Process]:
        """Return every living process that carries the mark, or is in a session that one was seen in."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                session = os.getsid(process.pid)
                marked = process.environ().get("LAUNCH_MARK") == self.mark
                if marked and session != os.getsid(0):
                    self.sessions.add(session)
                if marked or (session in self.sessions and process.status() != psutil.STATUS_ZOMBIE):
                    processes.append(process)
        return processes

    def assert_nothing_is_left(self) -> None:
        until(lambda: not self.ours(), "all processes end")
        assert not (Path(self.environ["HOME"]) / ".ray").exists()
        for session in self.out.iterdir():
            assert not {"live.json", "snapshots"} & {path.name for path in session.iterdir()}


def words(process: psutil.Process) -> list[str]:
    """Return the command line of a process; none of one that has just ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.fixture
def bench() -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    made = Bench(folder)
    yield made
    for process in made.ours():
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(folder)


def test_script_without_torch_ends_well_and_its_session_holds_what_ranks_report(bench: Bench) -> None:
    script = (str(bench.script), "--batch", batch(), "--environ", "--session", "script's")
    process = bench.start("--session", "live", *script)
    live = until((bench.out / "live" / LIVE).exists, "live.json") and bench.out / "live" / LIVE
    assert live.stat().st_mode & 0o777 == 0o600
    written = json.loads(live.read_bytes())
    assert written["pid"] == process.pid
    runtime = Path(written["socket"]).parent
    assert runtime.stat().st_mode & 0o777 == 0o700
    while process.poll() is None:
        bench.ours()
        time.sleep(0.2)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "rank 1 is up" in out
    assert "RAY" not in out
    assert "TRACEML_SOCKET" in out
    session = bench.summary("live")["session"]
    assert (session["status"], session["launcher"]) == ("finished", "torchrun")
    assert str(bench.out / "live") in err
    with SessionFile(bench.out / "live" / "session.sqlite") as file:
        assert file.ledger().stored == 1
        assert file.meta()["launcher"] == "torchrun"
        assert [event.kind for event in file.events()[0]].count("relay_start") == 1
    assert "without" not in err
    assert not runtime.exists()
    bench.assert_nothing_is_left()


def test_failing_rank_keeps_the_exit_code_and_table_of_torchrun(bench: Bench) -> None:
    theirs = subprocess.run(
        bench.command(str(bench.script), "--fail", module="torch.distributed.run"),
        env=bench.environ, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    ran = bench.run("--session", "failed", str(bench.script), "--fail")
    assert ran.returncode == theirs.returncode
    for line in ("ValueError: this is the reason", "train.py FAILED", "(local_rank: 1)", "exitcode  : 1"):
        assert line in theirs.stderr
        assert line in ran.stderr
    summary = bench.summary("failed")
    assert (summary["session"]["status"], summary["session"]["world_size"]) == ("failed", 2)
    assert (summary["verdict"]["label"], summary["verdict"]["rank"]) == ("rank_lost", 1)
    bench.assert_nothing_is_left()


def test_launch_without_a_monitor_leaves_no_trace(bench: Bench) -> None:
    del bench.environ["TRACEML_NICE"]
    ran = bench.run("--no-monitor", str(bench.script), "--environ", "--fail")
    assert ran.returncode == 1
    assert "environ []" in ran.stdout
    assert "traceml-ray:" not in ran.stderr
    assert not bench.out.exists()


def test_bad_input_is_one_line_and_exit_code_2(bench: Bench) -> None:
    ran = bench.run("no/such/train.py")
    assert ran.returncode == 2
    assert re.fullmatch(r"traceml-ray: .*no/such/train\.py.*\n", ran.stderr)
    assert not bench.out.exists()


@pytest.mark.parametrize("linger", [pytest.param(None, marks=pytest.mark.long), 600])
def test_dashboard_serves_while_the_job_runs_and_stays_while_a_browser_watches(
    bench: Bench, linger: int | None
) -> None:
    script, go = bench.out.parent / "waits.py", bench.out.parent / "go"
    script.write_text(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)")
    flags = ("--dashboard=0", *([] if linger is None else [f"--dashboard-linger={linger}"]))
    process = bench.start("--session", "shown", *flags, str(script))
    assert process.stderr is not None
    line = process.stderr.readline()
    url = line.removeprefix("traceml-ray: dashboard: ").strip()
    assert url.startswith("http://127.0.0.1:"), line
    for path in ("", "health", "metrics"):
        with urllib.request.urlopen(url + path, timeout=240) as answer:
            assert answer.status == 200
    if linger is not None:  # else no browser watches
        watch(url)
    else:
        command = [sys.executable, "-m", "traceml_ray.cli", "top", "shown", "--out", str(bench.out)]
        with subprocess.Popen([*command, "--interval=0.3"], stdout=subprocess.PIPE, text=True) as top:
            assert top.stdout is not None
            assert any("Ray is up, waiting for the first step" in line for line in top.stdout)
            top.kill()
    go.touch()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    stays = f"traceml-ray: dashboard: {url} stays while a browser watches\n" if linger else ""
    again = f"traceml-ray: to look at it again: traceml-ray dashboard {bench.out / 'shown'}\n"
    assert err.endswith(stays + again)
    assert "no dashboard" not in err
    if linger:
        until(lambda: "stored file" in watch(url), "it serves the session's file")
        for dashboard in bench.ours():
            dashboard.terminate()
        until(lambda: not bench.ours(), "it ends")
    with pytest.raises(OSError, match=r"refused|reset"):
        urllib.request.urlopen(url, timeout=240)
    bench.assert_nothing_is_left()


def test_concurrent_launches_stay_apart_and_a_signal_ends_everything(bench: Bench) -> None:
    args = (str(bench.script), "--batch", batch(), "--wait")
    first = bench.start("--session", "one", *args)
    second = bench.start("--session", "two", *args)
    for process in (first, second):
        assert process.stdout is not None
        until(lambda: "rank 0 is up" in process.stdout.readline(), "relay", 160)  # noqa: B023
    again = bench.run("--session", "one", str(bench.script))
    assert again.returncode == 2
    assert f"'one' is already running (pid {first.pid})" in again.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(240) == 1
    assert second.poll() is None
    control.stop(bench.out / "two")
    with SessionFile(bench.out / "two" / "session.sqlite") as file:
        assert file.ledger().stored == 1
    with pytest.raises(control.ControlError, match=r"(does|did) not answer"):
        control.stop(bench.out / "two")
    second.send_signal(signal.SIGHUP)
    assert second.wait(240) == 1
    for session in ("one", "two"):
        assert bench.summary(session)["session"]["status"] == "stopped"
        assert bench.summary(session)["ledger"]["stored"] == 1
    bench.assert_nothing_is_left()


@pytest.mark.long
def test_two_launchers_of_one_job_on_one_machine_make_one_session(bench: Bench) -> None:
    ranks = (str(bench.script), "--batch", batch(), "--other", batch("rank2", rank=2))
    job = ("--nnodes", "2", "--master-port", str(free_port()), "--traceml-port", str(free_port()))
    other = bench.start(*job, "--node-rank", "1", *ranks, RAY_AUTH_TOKEN="t" * 32)
    first = bench.start(*job, "--node-rank", "0", *ranks, RAY_AUTH_TOKEN="t" * 32)
    _, err = first.communicate(timeout=240)
    _, others = other.communicate(timeout=240)
    assert (first.returncode, other.returncode) == (0, 0), err + others
    (folder,) = bench.out.iterdir()
    assert f"files: {folder}" in err
    assert f"session {folder.name!r} is written by the launcher on 127.0.0.1" in others
    session = bench.summary(folder.name)["session"]
    assert (session["status"], session["world_size"], session["nnodes"]) == ("finished", 4, 2)
    assert [node["ranks"] for node in session["nodes"]] == [[0], [2]]
    with SessionFile(folder / "session.sqlite") as file:
        assert file.ledger().stored == 2
        assert [event.kind for event in file.events()[0]].count("relay_start") == 2
    bench.assert_nothing_is_left()


def test_node_without_the_first_node_trains_and_names_its_spool_folder(bench: Bench) -> None:
    script = bench.out.parent / "alone.py"
    script.write_text("import os; open(os.environ['TRACEML_SPOOL'] + '/left.spool', 'w').close()")
    job = (
        "--nnodes",
        "1:2",
        "--node-rank",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-conf",
        "last_call_timeout=1",
    )
    place = ("--rdzv-endpoint", f"localhost:{free_port()}", "--traceml-port", str(free_port()))
    ran = bench.run(*job, *place, str(script), RAY_AUTH_TOKEN="t" * 32)
    assert ran.returncode == 0, ran.stderr
    (kept,) = re.findall(r"rows of 1 ranks could not be delivered; they are in (\S+)", ran.stderr)
    assert [path.name for path in Path(kept).iterdir()] == ["left.spool"]
    assert [path.name for path in Path(kept).parent.iterdir()] == ["spool"]
    shutil.rmtree(Path(kept).parent)
    assert not bench.out.exists()
    until(lambda: not bench.ours(), "all processes end")


@pytest.mark.alone
def test_private_ray_has_low_priority_no_agents_and_ends_with_the_launcher(bench: Bench) -> None:
    """Alone: it waits for an idle core."""
    waits = (str(bench.script), "--batch", batch(), "--wait")
    process = bench.start("--session", "killed", *waits, TRACEML_NICE="3")
    assert process.stdout is not None
    until(lambda: "rank 0 is up" in process.stdout.readline(), "relay", 160)
    relay = until(lambda: next((p for p in bench.ours() if is_actor(p, "NodeRelay")), None), "its process")
    session = os.getsid(relay.pid)
    until(lambda: {os.getpriority(os.PRIO_PROCESS, p.pid) for p in members(session)} == {3}, "it yields")
    of_ray = members(session)
    autogroup = Path(f"/proc/{relay.pid}/autogroup")
    until(lambda: not autogroup.exists() or autogroup.read_text().endswith("nice 3\n"), "its session, too")
    commands = [" ".join(words(p)) for p in of_ray]
    assert not [text for text in commands if re.search("ray::\\w*Agent|dashboard.py", text)]
    process.kill()
    until(
        lambda: not [p for p in bench.ours() if (command := words(p)) and str(bench.script) not in command],
        "only ranks are left",
    )


def test_killed_ray_leaves_training_running_and_the_session_is_finished(
    bench: Bench,
) -> None:
    process = bench.start("--session", "orphan", str(bench.script), "--batch", batch(), "--wait")
    assert process.stdout is not None
    until(lambda: "rank 0 is up" in process.stdout.readline(), "relay", 160)
    until((bench.out / "orphan" / "session.sqlite-wal").exists, "the session file")
    ranks = [p for p in bench.ours() if str(bench.script) in words(p) and p.pid != process.pid]
    for killed in bench.ours():
        if killed not in ranks and killed.pid != process.pid:
            with contextlib.suppress(psutil.Error):
                killed.kill()
    assert len(ranks) == 2
    assert all(rank.is_running() for rank in ranks)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    assert bench.summary("orphan")["session"]["status"] == "stopped"
    assert str(bench.out / "orphan") in err
    bench.assert_nothing_is_left()


def test_ray_that_cannot_start_is_one_warning_and_training_goes_on(bench: Bench) -> None:
    broken = bench.out.parent / "broken"
    (broken / "ray").mkdir(parents=True)
    (broken / "ray" / "__init__.py").write_text("raise ImportError('Ray is not well')")
    script = bench.out.parent / "slow.py"
    script.write_text("import time; time.sleep(4)")
    ran = bench.run("--session", "s", str(script), PYTHONPATH=str(broken))
    assert ran.returncode == 0
    warnings = [line for line in ran.stderr.splitlines() if "without a live monitor" in line]
    assert len(warnings) == 1
    assert "Ray is not well" in warnings[0]
    assert bench.summary("s")["session"]["status"] == "finished"
    bench.assert_nothing_is_left()


def test_given_cluster_is_used_and_left_running(bench: Bench) -> None:
    """By one launch, then by two of one job, on the same node of it."""
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    cluster = PrivateRay(folder, os.environ)
    cluster.start()
    try:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.environ["RAY_AUTH_TOKEN"]}
        there = ("--ray-address", cluster.address)
        ran = bench.run("--session", "guest", *there, str(bench.script), "--batch", batch(), **token)
        assert ran.returncode == 0, ran.stderr
        assert bench.summary("guest")["ledger"]["stored"] == 1
        ranks = (str(bench.script), "--batch", batch(), "--other", batch("rank2", rank=2))
        job = ("--nnodes", "2", "--master-port", str(free_port()), *there, "--session", "two")
        both = [bench.start(*job, "--node-rank", rank, *ranks, **token) for rank in "01"]
        for process in both:
            _, err = process.communicate(timeout=240)
            assert process.returncode == 0 and "without a live monitor" not in err, err
        assert not cluster.exited()
        assert cluster._process is not None
        pid = cluster._process.pid
        until(lambda: not [p for p in members(pid) if "ray::A" in p.name()], "actors end")
        # On a busy machine one may end long after the other: the files are whole when both have.
        assert bench.summary("two")["ledger"]["stored"] == 2
        assert [node["ranks"] for node in bench.summary("two")["session"]["nodes"]] == [[0], [2]]
        bench.assert_nothing_is_left()
    finally:
        cluster.stop()
        shutil.rmtree(folder)


def test_relay_that_does_not_answer_is_told_from_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SILENT_S", 0.05)
    path, message = tmp_path / "relay.sock", wire.Finish(codec.VERSION, 0)
    assert control.ask_finish(path, message) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        silent = control.ask_finish(path, message)
    assert control.ask_finish(path, message) is None
    assert silent == wire.Finished(codec.VERSION, "failed", "the relay did not answer in time")


@pytest.mark.parametrize(
    ("hang", "why"),
    [
        (("Aggregator",), "did not answer in time"),
        pytest.param(("Aggregator", "NodeRelay"), "the relay did not answer", marks=pytest.mark.long),
    ],
    ids=["aggregator", "relay-too"],
)
def test_actors_that_hang_at_the_end_and_resume_change_nothing(
    bench: Bench, hang: tuple[str, ...], why: str
) -> None:
    """On a cluster that stays: the launcher has written the end from the file meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    cluster = PrivateRay(folder, os.environ)
    cluster.start()
    try:
        go, session = folder / "go", bench.out / "hung"
        later = batch(seq=1, first=5, n=20)
        process = bench.start(
            "--session", "hung", "--ray-address", cluster.address, str(bench.script),
            "--batch", batch(n=5, final=False), "--then", str(go), later,
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=cluster.environ["RAY_AUTH_TOKEN"],
        )  # fmt: skip
        assert cluster._process is not None
        pid = cluster._process.pid

        def stored() -> int:
            with contextlib.suppress(SessionFileError), SessionFile(session / "session.sqlite") as file:
                return int(file.ledger().stored)
            return 0

        until(lambda: stored() == 5, "the first rows")
        actors = {name: p for p in members(pid) for name in hang if is_actor(p, name)}
        assert len(actors) == len(hang)
        actors["Aggregator"].suspend()  # it will take the rows that come now when it goes on
        go.touch()
        until((folder / "go.sent").exists, "the relay has the other rows")
        for actor in actors.values():
            actor.suspend()
        (folder / "go.end").touch()
        _, err = process.communicate(timeout=240)
        assert process.returncode == 1, err
        summary = (session / "summary.json").read_bytes()
        assert bench.summary("hung")["session"]["status"] == "failed"
        [note] = [event["message"] for event in bench.summary("hung")["events"] if event["kind"] == "note"]
        assert why in note and note.removeprefix("finished without the aggregator: ") in err
        assert check_ledger(session)["stored"] == 25
        for actor in actors.values():
            actor.resume()
        until(lambda: not [p for p in members(pid) if "ray::A" in " ".join(words(p))], "it ends itself")
        assert check_ledger(session)["stored"] == 25
        with SessionFile(session / "session.sqlite") as file:
            assert (file.meta()["status"], file.meta()["exit_code"]) == ("failed", 1)
        assert (session / "summary.json").read_bytes() == summary
        bench.assert_nothing_is_left()
    finally:
        cluster.stop()
        shutil.rmtree(folder)


LONG = """
import json, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, began, took = dist.get_rank(), time.monotonic(), []
class Data(Dataset):
    def __len__(self):
        return 1 << 30
    def __getitem__(self, at):
        if rank == 1 and time.monotonic() < began + 15:
            time.sleep(0.005)
        return torch.ones(16)
model = DDP(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
over = torch.zeros(1)
last = time.perf_counter()
for x in DataLoader(Data(), batch_size=1):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
    took.append(time.perf_counter() - last); last = time.perf_counter()
    if len(took) % 100 == 0:
        dist.all_reduce(over.fill_(time.monotonic() > began + 60))
        if over:
            break
if rank == 0:
    print(json.dumps([len(took), 1e3 * sum(took) / len(took)]), flush=True)
"""


@pytest.mark.long
def test_report_covers_all_of_a_job_whose_first_rows_were_folded(bench: Bench) -> None:
    pytest.importorskip("torch")
    bench.script.write_text(LONG)
    ran = bench.run("--session", "long", str(bench.script), TRACEML_SESSION_BYTES=str(1 << 20))
    assert ran.returncode == 0, ran.stderr
    count, mean_ms = json.loads(ran.stdout.splitlines()[-1])
    summary = bench.summary("long")
    first = min(summary["episodes"], key=lambda episode: int(episode["from_step"]))
    with SessionFile(bench.out / "long" / "session.sqlite") as file:
        left = min(int(rank_rows.keys[0]) >> SEGMENT_BITS for rank_rows in file.rows()[0])
    assert 0 < left < count and summary["ledger"]["folded"] >= left
    assert (summary["steps"]["count"], summary["steps"]["covers"]["rows_pct"]) == (count, 100)
    assert summary["steps"]["mean_ms"] == pytest.approx(mean_ms, rel=0.01)
    assert (first["rank"], first["stage"]) == (1, "data") and first["from_step"] < 100
    assert "Covers " not in (bench.out / "long" / "report.txt").read_text()
    bench.assert_nothing_is_left()
