"""What the launcher makes of its arguments: torchrun's own stay torchrun's, ours are taken out."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.api import SignalException

from traceml_ray.launchers import arguments, cluster, torchrun
from traceml_ray.launchers.arguments import Nodes
from traceml_ray.launchers.cluster import (
    PrivateRay,
    cluster_token,
    free_port,
    kill_session,
    wait_for_idle_core,
    yield_cores,
)
from traceml_ray.monitor import private_folders as folders
from traceml_ray.ray.connection import _lacks_token, find_token, node_address
from traceml_ray.settings import check_session_name
from traceml_ray.store.session import prepare

SCRIPT = str(Path(__file__))

TORCHRUN = [
    ["--nproc-per-node", "2", SCRIPT],
    ["--nproc_per_node=2", "--standalone", SCRIPT, "--session", "mine", "--out=x", "--no-monitor"],
    ["--nnodes=1:1", "--max-restarts", "3", "--tee", "3", "-m", "pkg.mod", "-h", "--interval"],
    ["--t", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", SCRIPT],
    ["--no-python", "--log-dir", "x", "bash", "-c", "exit 3"],
    ["--nproc-per-node", "2", SCRIPT, "--", "--nproc-per-node", "4"],
]


@pytest.mark.parametrize("argv", TORCHRUN)
def test_torchrun_arguments_mean_what_they_mean_to_torchrun(argv: list[str]) -> None:
    theirs = vars(torch_run.get_args_parser().parse_args(argv))
    ours = vars(torchrun._parse(argv))
    assert theirs.items() <= ours.items()
    extra = {name: value for name, value in ours.items() if name not in theirs}
    assert not any(extra.values())


def test_own_arguments_are_taken_only_before_the_script() -> None:
    args = torchrun._parse(["--session", "s", "--nproc-per-node", "2", SCRIPT, "--session", "script's"])
    assert args.setting_session == "s"
    assert args.training_script_args == ["--session", "script's"]


def test_dashboard_flag_needs_no_port_and_leaves_those_of_the_script() -> None:
    given = ["--dashboard", "--nproc-per-node", "2", SCRIPT, "--dashboard", "--dashboard=7"]
    for argv, port in (
        (given, ""),
        (["--dashboard=8051", *given[1:]], "8051"),
        (["--dashboard=0", *given[1:]], "0"),
    ):
        args = torchrun._parse(argv)
        assert (args.dashboard, args.training_script) == (port, SCRIPT)
        assert args.training_script_args == ["--dashboard", "--dashboard=7"]
    assert torchrun._parse(["--dashboard", SCRIPT]).dashboard == ""
    assert torchrun._parse([SCRIPT, "--dashboard"]).dashboard is None


C10D = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host-0:29400"]
BAD: list[tuple[list[str], dict[str, str], str]] = [
    ([], {}, "training_script"),
    (["--nproc-per-node", "2", "no/such/train.py"], {}, "no/such/train.py"),
    (["--no-such-flag", SCRIPT], {}, "--no-such-flag"),
    (["--max-restarts", "many", SCRIPT], {}, "many"),
    (["--nproc-per-node", "two", SCRIPT], {}, "--nproc-per-node=two"),
    (["--nproc-per-node", "0", SCRIPT], {}, "at least 1"),
    (["--nnodes", "a:b", SCRIPT], {}, "--nnodes=a:b"),
    (["--nnodes", "0", SCRIPT], {}, "at least one node"),
    (["--nnodes", "2", "--rdzv-backend", "c10d", SCRIPT], {}, "--rdzv-endpoint"),
    ([*C10D, SCRIPT], {}, "--ray-address"),
    ([*C10D, "--traceml-port", "70000", SCRIPT], {}, "70000 is not a port"),
    (["--dashboard=many", SCRIPT], {}, "many is not a port"),
    (["--no-python", "-m", "x"], {}, "cannot be used together"),
    (["--session", "a/b", SCRIPT], {}, "a/b"),
    (["--interval", "soon", SCRIPT], {}, "soon"),
    (["--channel", "pigeon", SCRIPT], {}, "pigeon"),
    (["--ray-address", "auto", SCRIPT], {}, "host:port"),
    ([SCRIPT], {"RAY_ADDRESS": "ray://head:10001"}, "ray://head:10001"),
    ([SCRIPT], {"TRACEML_INTERVAL": "-1"}, "TRACEML_INTERVAL"),
    ([SCRIPT], {"TRACEML_THRESHOLD_NONSENSE": "1"}, "TRACEML_THRESHOLD_NONSENSE"),
    (["--out", "/proc/none", SCRIPT], {}, "/proc"),
    ([SCRIPT], {"TRACEML_BASELINE": "gone"}, "baseline='gone': no session 'gone'"),
]


@pytest.mark.parametrize(("argv", "environ", "named"), BAD)
def test_bad_input_is_one_line_that_names_it_and_starts_nothing(
    argv: list[str],
    environ: dict[str, str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setenv("TRACEML_OUT", str(tmp_path))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun.Monitor, "start", start)
    monkeypatch.setattr(torch_run, "run", start)
    assert torchrun.main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("traceml-ray: ")
    assert named in output.err
    assert output.err.count("\n") == 1


def test_busy_master_port_is_replaced_by_a_free_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = torchrun._parse(["--master-port", str(port), SCRIPT])
        torchrun._check(args, Nodes())
        several = torchrun._parse(["--master-port", str(port), "--nnodes", "2", SCRIPT])
        torchrun._check(several, arguments.read(several, None))
    assert several.master_port == port  # the other nodes know it, too
    assert args.master_port != port
    assert f"master port {port} is in use" in capsys.readouterr().err


def test_free_master_port_is_kept() -> None:
    port = free_port()
    args = torchrun._parse(["--master-port", str(port), SCRIPT])
    torchrun._check(args, Nodes())
    assert args.master_port == port


def read(*argv: str, address: str | None = None) -> Nodes:
    return arguments.read(torchrun._parse([*argv, SCRIPT]), address)


def test_nodes_of_a_job_find_the_same_head_and_session() -> None:
    static = ("--nnodes", "3", "--master-addr", "host-0", "--master-port", "7000")
    first, other = read(*static, "--node-rank", "0"), read(*static, "--node-rank", "2")
    assert (first.first, first.rank, other.first, other.rank) == (True, 0, False, 2)
    assert first.head == other.head == "host-0:7001"
    assert first.job == other.job != read(*static[:-1], "7002").job
    check_session_name(first.job)
    check_session_name(read(*static, "--rdzv-id", "../a b").job)
    assert read(*static, "--traceml-port", "9000").head == "host-0:9000"
    assert (first.count, first.fixed, first.several) == (3, True, True)


def test_single_node_has_no_head_that_others_could_reach() -> None:
    for argv in ([], ["--nnodes", "1"], ["--nnodes", "1:1"], ["--standalone"], ["--node-rank", "0"]):
        assert read(*argv) == Nodes()
        assert not read(*argv).several


def test_first_node_of_a_rendezvous_is_the_one_that_hosts_it() -> None:
    here = ("--nnodes", "2:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{socket.gethostname()}:29400")
    assert read(*here, address="head:6379").first
    assert not read(*C10D, address="head:6379").first
    assert not read(*here, "--rdzv-conf", "is_host=0", address="head:6379").first
    assert read(*C10D, "--rdzv-conf", "is_host=true", address="head:6379").first
    ranked = read(*C10D, "--node-rank", "1")
    assert (ranked.first, ranked.head, ranked.count, ranked.fixed) == (False, "host-0:29401", 1, False)
    assert read(*C10D, "--node-rank", "0").first


def test_launchers_on_one_machine_have_addresses_of_their_own() -> None:
    local = read("--nnodes", "2", "--master-port", "7000")
    assert local.head == "127.0.0.2:7001"
    assert [node_address(local.head, rank) for rank in (0, 1)] == ["127.0.0.2", "127.0.0.3"]
    assert node_address("10.1.1.1:7001", 5, "10.1.1.2") == "10.1.1.2"


def test_cluster_token_is_searched_as_ray_does(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    home = {"HOME": str(tmp_path)}
    assert cluster_token(home) is None
    (tmp_path / ".ray" / "auth_token").write_text("of the user\n")
    (tmp_path / "file").write_text("of the file")
    assert cluster_token(home) == "of the user"
    assert cluster_token({**home, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}) == "of the file"
    assert cluster_token({**home, "RAY_AUTH_TOKEN": "said"}) == "said"


def test_place_of_the_token_is_named_where_a_cluster_wants_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _lacks_token() == ""  # it shows none
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert f"{tmp_path}/.ray/auth_token has none" in _lacks_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/such")
    assert "/no/such (RAY_AUTH_TOKEN_PATH) has none" in _lacks_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t")
    assert _lacks_token() == "" and find_token(os.environ) == ("t", "RAY_AUTH_TOKEN")


def test_ray_token_is_the_given_one_for_several_nodes_and_generated_for_one(
    tmp_path: Path,
) -> None:
    home = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_ADDRESS": "elsewhere:1"}
    several = PrivateRay(tmp_path, home, "127.0.0.2:7001", 1)
    assert (several.token, several.environ["RAY_AUTH_MODE"]) == (None, "disabled")
    given = PrivateRay(tmp_path, {**home, "RAY_AUTH_TOKEN": "t"}, "127.0.0.2:7001", 1)
    assert (given.environ["RAY_AUTH_TOKEN"], given.environ["RAY_AUTH_MODE"]) == ("t", "token")
    alone = PrivateRay(tmp_path, {**home, "RAY_AUTH_TOKEN": "t"})
    assert alone.environ["RAY_AUTH_TOKEN"] == alone.token != "t"
    assert "RAY_ADDRESS" not in alone.environ


def test_job_info_of_several_nodes_is_known_where_their_number_is_fixed() -> None:
    args = torchrun._parse(["--nnodes", "2", "--nproc-per-node", "4", SCRIPT])
    info = torchrun._info(args, arguments.read(args, None))
    assert (info["nnodes"], info["world_size"]) == (2, 8)
    elastic = torchrun._parse(["--nnodes", "2:3", "--nproc-per-node", "4", "--node-rank", "0", SCRIPT])
    info = torchrun._info(elastic, arguments.read(elastic, None))
    assert (info["nnodes"], info["world_size"]) == (None, None)


def test_folders_of_killed_launchers_are_swept_and_no_others(tmp_path: Path) -> None:
    names = ("held", "dead", "young", "rows", "launcher", "old-rows", "foreign", "session")
    held, dead, young, rows, launcher, old, foreign, session = (
        tmp_path / f"traceml-{name}" for name in names
    )
    prepare(tmp_path, session.name).release()
    for folder in (held, dead, young, rows, launcher, old, foreign):
        folder.mkdir(mode=0o700)
        (folder / "relay.sock").touch()
    for folder in (held, dead, young, rows, launcher, old):
        os.close(folders.lock_private(folder))
    (launcher / "spool").mkdir()
    for folder in (rows, launcher / "spool", old):
        (folder / "a.spool").touch()
    locks = [folder / ".in-use" for folder in (held, dead, rows, launcher, old)]
    for file in (*locks, session / ".lock", old / "a.spool"):
        os.utime(file, (1, 1))
    with (held / ".in-use").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folders.remove_stale(tmp_path)
    assert set(tmp_path.iterdir()) == {held, young, rows, launcher, foreign, session}


def test_a_folder_into_which_a_dying_process_still_writes_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rmtree, rounds = tmp_path / "traceml-x", shutil.rmtree, []
    (folder / "ray").mkdir(parents=True)

    def written_into(path: Path, **options: Any) -> None:
        rmtree(path, **options)
        rounds.append(path)
        if len(rounds) < 3:
            (path / "ray").mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", written_into)
    folders.remove(folder, 60.0)
    assert not folder.exists() and len(rounds) == 3


def test_folder_that_others_can_reach_is_not_held(tmp_path: Path) -> None:
    opened, link, private = tmp_path / "opened", tmp_path / "link", tmp_path / "own"
    opened.mkdir()
    opened.chmod(0o777)
    os.close(folders.lock_private(private))
    link.symlink_to(private)
    for folder in (opened, link):
        assert not folders.is_private(folder)
        with pytest.raises(OSError, match="only this user can enter"):
            folders.lock_private(folder)
    (private / ".in-use").unlink()
    (private / ".in-use").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        folders.lock_private(private)
    assert {path.name for path in tmp_path.rglob("*")} == {"opened", "link", "own", ".in-use"}


def test_free_port_is_one_that_nobody_else_takes_by_chance() -> None:
    ports = [free_port() for _ in range(50)]
    assert all(not 10_002 <= port < 20_000 for port in ports), "Ray's workers"
    assert all(port < 32_768 for port in ports), "outgoing connections"
    assert not {29_400, 29_500, 29_501} & {*ports}, "torchrun's ports"
    assert len({*ports}) > 40


def test_port_that_is_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="no port from"):
            free_port()


def test_no_monitor_flag_creates_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_run, "run", seen.append)
    assert torchrun.main(["--no-monitor", "--nnodes", "2", SCRIPT, "-x"]) == 0
    assert seen[0].training_script_args == ["-x"]
    assert list(tmp_path.iterdir()) == []


def test_secrets_among_script_arguments_are_hidden() -> None:
    words = [
        "--api-key",
        "hush1",
        "--hf_token=hush2",
        "wandb.api_key=hush3",
        "--tokenizer",
        "gpt2",
        '{"api_key": "hush5"}',
        "--password",
    ]
    output = arguments.command_text(
        ["train.py", *words, "--db", "postgres://me:hush4@host/runs", "--max-tokens", "512"]
    )
    assert "hush" not in output
    for kept in ("train.py", "--api-key '***'", "--tokenizer gpt2", "--password --db", "--max-tokens 512"):
        assert kept in output


@pytest.mark.parametrize(
    ("busy", "cores", "seconds"),
    [
        ([0.0] * 40, 2, 2.0),
        ([100.0] * 40, 64, 10.0),
        ([50.0] * 40, 2, 2.0),
        ([51.0] * 40, 2, 10.0),
        ([98.0] * 40, 64, 2.0),  # one of 64 is idle
        ([0.0, 0.0, 0.0, 90.0, *[0.0] * 40], 2, 4.0),  # before the ranks are at work
    ],
)
def test_ray_waits_for_an_idle_core(busy: list[float], cores: int, seconds: float) -> None:
    now = 0.0

    def cpu_pct(window_s: float) -> float:
        nonlocal now
        now += window_s
        return busy.pop(0)

    wait_for_idle_core(10.0, cpu_pct, cores, clock=lambda: now)
    assert now == seconds


def test_job_that_is_over_waits_for_no_core() -> None:
    wait_for_idle_core(10.0, lambda _: pytest.fail("looked at the cores"), 2, lambda: True)


@pytest.mark.parametrize("error", [None, FileNotFoundError("/proc"), IndexError()])
def test_session_is_killed_also_where_processes_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """As where /proc is not mounted, or empty."""
    if error is not None:
        monkeypatch.setattr(psutil, "pids", lambda: (_ for _ in ()).throw(error))
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as leader:
        kill_session(leader.pid, 60.0)
        assert leader.wait(240) == -signal.SIGKILL


def test_all_threads_of_a_session_yield() -> None:
    code = (
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(flush=True)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    with started as process:
        assert process.stdout is not None and process.stdout.readline()
        before = os.getpriority(os.PRIO_PROCESS, process.pid)
        yield_cores(process.pid, 19)
        threads = [thread.id for thread in psutil.Process(process.pid).threads()]
        assert before < 19 and len(threads) == 2
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {19}
        assert {psutil.Process(thread).ionice().ioclass for thread in threads} == {psutil.IOPRIO_CLASS_IDLE}
        process.kill()


@pytest.mark.parametrize("number", torchrun._ENDS)
def test_signal_before_the_ranks_start_stops_the_session(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    codes = list[int]()
    monitor: Any = SimpleNamespace(
        start=lambda: signal.raise_signal(number), finish=lambda code, _failures: codes.append(code)
    )
    monkeypatch.setattr(torch_run, "run", lambda _args: pytest.fail("ranks were started"))
    with pytest.raises(SignalException) as raised:
        torchrun._train(torchrun._parse([SCRIPT]), monitor)
    assert raised.value.sigval == number and codes == [-number]


def test_sighup_that_is_ignored_stays_ignored() -> None:
    """As under nohup: torchrun itself would take it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    args = torchrun._parse([SCRIPT])
    if not hasattr(args, "signals_to_handle"):
        pytest.skip("this torchrun cannot be told which signals it handles")
    torchrun._catch_signals(args)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert args.signals_to_handle == "SIGTERM,SIGINT,SIGQUIT"


_BEATS_ON = """
import atexit, runpy, signal, sys, threading, time
from torch import distributed
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.api import SignalException

def ended_by_signal(_args):
    atexit.register(print, "left")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    beats = threading.Event()
    def beat():
        client = distributed.TCPStore("127.0.0.1", store.port, is_master=False)
        while True:
            client.add("beat", 1)
            beats.set()
    for _ in range(4):
        threading.Thread(target=beat, daemon=True).start()
    assert beats.wait(240)
    raise SignalException("a signal", signal.SIGTERM)

torch_run.run = ended_by_signal
sys.argv[1:] = ["--no-monitor", "--no-python", "true"]
runpy.run_module("traceml_ray.launch", run_name="__main__", alter_sys=True)
"""


def test_thread_that_torch_leaves_running_does_not_change_the_exit_code() -> None:
    """Python, as it ends, aborts where such a thread is in C++ code. Torch leaves its heartbeats."""
    ended = subprocess.run([sys.executable, "-c", _BEATS_ON], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout) == (1, "left\n"), ended.stderr
    assert ended.stderr.endswith("SignalException: a signal\n")
