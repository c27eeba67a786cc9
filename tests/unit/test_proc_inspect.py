"""What is told of other processes: from a /proc and a cgroup file system laid out by hand, and real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from traceml_ray.monitor import rank_connections as processes
from traceml_ray.signals.nodes.sampler import NodeSampler


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("oom_kill_disable 0\nunder_oom 0\n", None),
        ("", None),
        ("oom_kill\n", None),
    ],
)
def test_oom_kills_are_counted_where_the_kernel_counts_them(
    tmp_path: Path, text: str, kills: int | None
) -> None:
    file = tmp_path / "memory.events"
    file.write_text(text)
    assert processes.oom_kills(file) == kills


def test_unreadable_memory_events_give_none(tmp_path: Path) -> None:
    assert processes.oom_kills(tmp_path / "none") is None
    assert processes.oom_kills(None) is None
    assert processes.memory_events(os.getpid(), tmp_path) is None


def test_memory_events_of_both_cgroup_versions_are_found(tmp_path: Path) -> None:
    """Seen from inside a container the path of the process's cgroup may lead nowhere: then the root's."""
    for name in ("memory.events", "memory/memory.oom_control"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("oom_kill 1\n")
    assert processes.oom_kills(processes.memory_events(os.getpid(), tmp_path)) == 1


def test_missing_process_has_no_state_and_no_exit_code() -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(9)
    os.waitpid(gone, 0)
    assert (processes.state(gone), processes.exit_code(gone)) == (None, None)
    assert processes.state(os.getpid()) == "running"
    assert processes.exit_code(os.getpid()) is None


def test_process_name_cut_inside_a_character_is_read() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xe7\\xb1\\xbb\\xe5'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes.state(process.pid) in ("running", "sleeping")
        assert NodeSampler()._family(process.pid)[1][0] == os.getpid()
        process.communicate(b"\n")


def test_spy_without_py_spy_gives_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes.spy(os.getpid()) == ""
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    assert processes.spy(os.getpid()) == "", "it may not be allowed to look"
    program.write_text(
        "#!/bin/sh\nprintf 'Process 7: python train.py --key secret\\nThread 7 (idle)\\n  f (a.py:1)\\n'\n"
    )
    assert processes.spy(os.getpid()) == "Thread 7 (idle)\n  f (a.py:1)\n", "arguments may be secret"
