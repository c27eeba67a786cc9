"""What the launcher makes of its arguments: torchrun's own stay torchrun's, ours are taken out."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torch_run

from traceml_ray.launchers import monitor, torchrun
from traceml_ray.launchers.cluster import free_port

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


def test_our_arguments_are_ours_only_before_the_script() -> None:
    args = torchrun._parse(["--session", "s", "--nproc-per-node", "2", SCRIPT, "--session", "script's"])
    assert args.session == "s"
    assert args.training_script_args == ["--session", "script's"]


BAD: list[tuple[list[str], dict[str, str], str]] = [
    ([], {}, "training_script"),
    (["--nproc-per-node", "2", "no/such/train.py"], {}, "no/such/train.py"),
    (["--no-such-flag", SCRIPT], {}, "--no-such-flag"),
    (["--max-restarts", "many", SCRIPT], {}, "many"),
    (["--nproc-per-node", "two", SCRIPT], {}, "--nproc-per-node=two"),
    (["--nproc-per-node", "0", SCRIPT], {}, "at least 1"),
    (["--nnodes", "a:b", SCRIPT], {}, "--nnodes=a:b"),
    (["--nnodes", "2", SCRIPT], {}, "one node for now"),
    (["--nnodes", "1:2", SCRIPT], {}, "one node for now"),
    (["--no-python", "-m", "x"], {}, "cannot be used together"),
    (["--session", "a/b", SCRIPT], {}, "a/b"),
    (["--interval", "soon", SCRIPT], {}, "soon"),
    (["--channel", "actor", SCRIPT], {}, "channel=actor"),
    (["--ray-address", "auto", SCRIPT], {}, "host:port"),
    ([SCRIPT], {"RAY_ADDRESS": "ray://head:10001"}, "ray://head:10001"),
    ([SCRIPT], {"TRACEML_INTERVAL": "-1"}, "TRACEML_INTERVAL"),
    ([SCRIPT], {"TRACEML_THRESHOLD_NONSENSE": "1"}, "TRACEML_THRESHOLD_NONSENSE"),
    (["--out", "/proc/none", SCRIPT], {}, "/proc"),
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
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("traceml-ray: ")
    assert named in told.err
    assert told.err.count("\n") == 1


def test_a_busy_master_port_is_replaced_by_a_free_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = torchrun._parse(["--master-port", str(port), SCRIPT])
        torchrun._check(args)
    assert args.master_port != port
    assert f"master port {port} is in use" in capsys.readouterr().err


def test_a_free_master_port_is_kept() -> None:
    port = free_port()
    args = torchrun._parse(["--master-port", str(port), SCRIPT])
    torchrun._check(args)
    assert args.master_port == port


def test_folders_of_killed_launchers_are_swept_and_no_others(tmp_path: Path) -> None:
    held, dead, young, foreign = (
        tmp_path / f"traceml-{name}" for name in ("held", "dead", "young", "foreign")
    )
    for folder in (held, dead, young, foreign):
        folder.mkdir()
        (folder / "relay.sock").touch()
    for folder in (held, dead, young):
        (folder / ".lock").touch()
    for folder in (held, dead):
        os.utime(folder / ".lock", (1, 1))
    with (held / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monitor._sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {held, young, foreign}


def test_no_port_of_ours_is_where_ray_workers_are() -> None:
    assert all(not 10_002 <= free_port() < 20_000 for _ in range(50))


def test_without_a_monitor_nothing_of_ours_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_run, "run", seen.append)
    assert torchrun.main(["--no-monitor", "--nnodes", "2", SCRIPT, "-x"]) == 0
    assert seen[0].training_script_args == ["-x"]
    assert list(tmp_path.iterdir()) == []
