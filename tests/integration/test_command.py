"""`traceml-ray run -- COMMAND`: real commands; exit code, signals, input and output are theirs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(torch.ones(80, 8), batch_size=4):
    net(batch).mean().backward()
    optimizer.step()
if os.environ["RANK"] == "0":  # whoever reads first has it all
    print("rank 0 of", sys.stdin.read(), flush=True)
dist.barrier()  # the launcher ends rank 0 when rank 1 has failed
dist.destroy_process_group()
sys.exit(3 * (os.environ["RANK"] == "1"))
"""
NO_RAY = ("--ray-address", "127.0.0.1:1")
"""Nobody is there: no live monitor, but all else is as ever."""


def command(folder: Path, *words: str) -> list[str]:
    module = [sys.executable, "-m", "traceml_ray.cli", "run", "--out", str(folder / "out"), "--session", "s"]
    return [*module, *words]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def test_foreign_launcher_ranks_are_watched_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    # The launcher imports torch itself, and is no rank.
    launcher = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 train.py"
    process = start(tmp_path, "--interval", "0.2", "--", "bash", "-c", f"{launcher}; exit $(( $? + 40 ))")
    out, err = process.communicate("stdin", timeout=240)
    assert process.returncode == 41, err
    assert "rank 0 of stdin" in out and "traceml-ray" not in out
    summary = json.loads((tmp_path / "out" / "s" / "summary.json").read_text())
    assert summary["session"]["launcher"] == "bash"
    assert {rank: counts["produced"] for rank, counts in summary["ledger"]["per_rank"].items()} == {
        "0": 20,
        "1": 20,
    }
    assert summary["ledger"]["produced"] == summary["ledger"]["stored"]
    assert f"files: {tmp_path / 'out' / 's'}" in err


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 3", 3), ("kill -TERM $$", -signal.SIGTERM), ("kill -KILL $$", -signal.SIGKILL), ("exit 0", 0)],
)
def test_exit_code_is_that_of_the_command(tmp_path: Path, script: str, code: int) -> None:
    process = start(tmp_path, *NO_RAY, "--", "bash", "-c", f"echo to stdout; {script}")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (code, "to stdout\n"), err
    assert (tmp_path / "out" / "s" / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_is_forwarded_and_the_command_chooses_its_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = f"trap 'echo heard; exit 7' {number:d}; echo ready; while :; do sleep 0.05; done"
    process = start(tmp_path, *NO_RAY, "--", "bash", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (7, "heard\n"), err


COUNTING = """
import signal, sys, time
heard = []
def hear(number, _):
    heard.append(number)
    print("heard", number, flush=True)
for name in ("INT", "HUP", "QUIT", "TERM", "USR1"):
    signal.signal(getattr(signal, "SIG" + name), hear)
print("ready", flush=True)
while not heard:
    time.sleep(0.05)
time.sleep(1)  # for another one
sys.exit(5)
"""
COUNT = ("--", sys.executable, "-S", "-c", COUNTING)


def to_the_group(launcher: int, number: int) -> None:
    os.kill(launcher, signal.SIGSTOP)  # it comes to see its own later than the command does
    os.killpg(launcher, number)
    time.sleep(0.2)
    os.kill(launcher, signal.SIGCONT)


def as_timeout_does(launcher: int, number: int) -> None:
    os.kill(launcher, number)
    to_the_group(launcher, number)


def without_a_witness(launcher: int, number: int) -> None:
    [witness] = [child for child in psutil.Process(launcher).children() if "-I" in child.cmdline()]
    witness.kill()
    os.kill(launcher, number)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGTERM, to_the_group),
        (signal.SIGUSR1, as_timeout_does),
        (signal.SIGINT, os.kill),
        (signal.SIGTERM, without_a_witness),
    ],
)
def test_signal_reaches_the_command_once(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    process = start(tmp_path, *NO_RAY, *COUNT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)  # the first moment of a command, when it could not handle a signal yet
    send(process.pid, number)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (5, f"heard {number:d}\n"), err


def test_signal_to_the_launcher_alone_reaches_a_command_on_a_terminal(tmp_path: Path) -> None:
    code, seen = on_a_terminal(
        command(tmp_path, *NO_RAY, *COUNT), lambda launcher, _: os.kill(launcher, signal.SIGINT)
    )
    assert code == 5 and seen.count(b"heard") == seen.count(b"heard 2") == 1, seen


def test_terminal_job_can_be_stopped_and_resumed(tmp_path: Path) -> None:
    words = shlex.join(
        command(tmp_path, *NO_RAY, "--", "bash", "-c", "echo ready; read line; echo got $line")
    )
    shell = f"set -m; {words}; echo stopped; fg; echo over"

    def stop_it(_launcher: int, terminal: int) -> None:
        os.write(terminal, b"\x1a")
        os.write(terminal, b"typed\n")

    _, seen = on_a_terminal(["bash", "-c", shell], stop_it)
    assert seen.index(b"stopped") < seen.index(b"got typed") < seen.index(b"over"), seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_container_init_exits_with_the_shell_code_of_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    words = command(tmp_path, *NO_RAY, "--", "bash", "-c", f"kill -{number:d} $$")
    done = subprocess.run([*apart, *words], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 128 + number, done.stderr


@pytest.mark.parametrize("monitor", [NO_RAY, ("--no-monitor",)])
def test_script_without_an_interpreter_line_is_run_by_a_shell(
    tmp_path: Path, monitor: tuple[str, ...]
) -> None:
    executable(tmp_path / "job.sh", b"echo of $1; exit 4\n")
    process = start(tmp_path, *monitor, "--", "./job.sh", "a shell")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (4, "of a shell\n"), err


@pytest.mark.parametrize("monitor", [NO_RAY, ("--no-monitor",)])
@pytest.mark.parametrize(
    ("contents", "why"),
    [(b"\x7fELF\0\0", "Exec format error"), (b"#!/there/is/none\n", "the interpreter that it names")],
)
def test_program_the_kernel_cannot_start_leaves_no_session(
    tmp_path: Path, monitor: tuple[str, ...], contents: bytes, why: str
) -> None:
    executable(tmp_path / "program", contents)
    (tmp_path / "out" / "s").mkdir(parents=True)
    (tmp_path / "out" / "s" / "session.sqlite").write_text("of an older run")
    process = start(tmp_path, *monitor, "--", "./program")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err.count("\n")) == (126, "", 1), err
    assert f"./program cannot be executed: {why}" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["s"]
    assert (tmp_path / "out" / "s" / "session.sqlite").read_text() == "of an older run"


def executable(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ((), 2, "which command?"),
        (("--",), 2, "which command?"),
        (("--", "there-is-none"), 127, "there-is-none is not a command here"),
        (("--", "./text"), 126, "./text cannot be executed"),
        (("--nnodes", "2", "--", "true"), 2, "--master-addr"),
        (("--interval", "no", "--", "true"), 2, "interval"),
        (("--ray-address", "nowhere", "--", "true"), 2, "host:port"),
    ],
)
def test_bad_command_is_refused_in_one_line_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], code: int, line: str
) -> None:
    (tmp_path / "text").write_text("no program")
    process = start(tmp_path, *words)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err.count("\n")) == (code, "", 1)
    assert line in err
    assert not (tmp_path / "out").exists()


def test_run_without_a_monitor_is_the_command_alone(tmp_path: Path) -> None:
    process = start(
        tmp_path, "--no-monitor", "--", "bash", "-c", "echo $$ ${PYTHONPATH:-none} $TRACEML_SOCKET"
    )
    out, err = process.communicate(timeout=240)
    assert (out.split(), err) == ([str(process.pid), os.environ.get("PYTHONPATH", "none")], "")


def test_terminal_interrupt_reaches_the_command_once(tmp_path: Path) -> None:
    script = "trap 'echo heard' INT; echo ready; sleep 0.6; sleep 0.6; exit 5"
    code, seen = on_a_terminal(
        command(tmp_path, *NO_RAY, "--", "bash", "-c", script),
        lambda _, terminal: os.write(terminal, b"\x03"),
    )
    assert code == 5, seen
    assert seen.count(b"heard") == 1


def on_a_terminal(words: list[str], when_ready: Callable[[int, int], object]) -> tuple[int, bytes]:
    """Run `words` in the foreground of a terminal; return the exit code and what is on its screen."""
    master, slave = os.openpty()
    child = os.fork()
    if child == 0:
        os.login_tty(slave) if hasattr(os, "login_tty") else _take(slave)
        os.execvp(words[0], words)
    os.close(slave)
    seen, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            data = os.read(master, 4096)
        except OSError:  # everybody has gone
            break
        before, seen = seen, seen + data
        if b"ready" in seen and b"ready" not in before:  # a terminal hands a line out in parts
            time.sleep(0.2)
            when_ready(child, master)
        if not data:
            break
    _, status = os.waitpid(child, 0)
    os.close(master)
    return os.waitstatus_to_exitcode(status), seen


def _take(terminal: int) -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
