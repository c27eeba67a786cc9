"""
Runs the same small training with and without a monitor, does harm to the monitor while it runs, and says what
became of the run: `run(case)` gives an `Outcome`, `plain(case)` the one to compare it with.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from chaos.stopwatch import stalls_s
from ray_cluster import is_actor, until
from sessions import doubled_rows

from traceml_ray.launchers.cluster import free_port
from traceml_ray.stages import FLAG_DEVICE_CLOCK
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import LIVE
from traceml_ray.store.session_file import SessionFile

HERE = Path(__file__).parent
RANKS = 2
UP_S = 60.0
"""Until both ranks' rows are in the session file: Ray takes its time on a busy machine."""
RUN_S = 120.0
HOOK_MS = 5.0
EXIT_S = 3.0
MAX_COMPLAINTS = 8
"""Lines on stderr: one a cause, and the verdict."""
TRAIN = (str(HERE / "driver.py"),)
"""Ray Train in the launcher's place."""
RSS_MB = {"socket": 40.0, "actor": 220.0}
"""Memory that a rank may take more than without a monitor; one that attaches has Ray in it."""

Fault = Callable[["Run"], Generator[None, None, None]]
"""Does harm at the first stop; at each `yield` training goes on to the next one."""


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong."""

    name: str
    fault: Fault | None = None
    channel: str = "socket"
    script: tuple[str, ...] = ()
    """Arguments of the training script."""
    flags: tuple[str, ...] = ()
    """Of the launcher."""
    environ: dict[str, str] = field(default_factory=dict)
    up: bool = True
    """The monitor comes up, and is waited for before the harm is done."""
    nodes: int = 1
    session: bool = True
    """There is a summary at the end."""
    whole: bool = True
    """Every row is in the session: nothing is lost by this."""
    injected: bool = False
    """Every process has `injected/sitecustomize.py` in it."""
    disk_mb: int = 0
    """Sessions are written to a disk of their own, of that size."""
    can_freeze: bool = False
    """It is one that can be frozen."""
    hook_ms: float = HOOK_MS
    """How long a hook may hold the training thread up."""
    limit_s: float = RUN_S
    command: tuple[str, ...] = ("-m", "traceml_ray.launch")
    """What takes the launcher's arguments."""

    @property
    def steps(self) -> int:
        return int(self.script[self.script.index("--steps") + 1]) if "--steps" in self.script else 120

    @property
    def title(self) -> str:
        return f"{self.name} ({self.channel})"


@dataclass
class Outcome:
    """What became of a run."""

    results: list[dict[str, Any]]
    """What the ranks wrote down, by rank."""
    code: tuple[int, ...]
    """Exit code of the launcher, and of the rank that failed first."""
    end_s: float
    """From the last rank's last line to the end of the launcher."""
    stalled_s: float
    """Of that, for how long something on this machine waited for a processor."""
    complaints: list[str]
    """Lines of ours on stderr."""
    stderr: str
    ledger: dict[str, Any] | None = None
    doubled: int = 0
    """Rows that are in the session file more than once, or in it and not in the ledger."""
    on_device: int = 0
    """Rows that are of a device's clock."""
    summary: dict[str, Any] | None = None
    half_made: bool = False
    """Something is left of a profile, or a bundle, that was being made."""

    @property
    def computed(self) -> list[tuple[Any, ...]]:
        return [(result["losses"], result["weights"], result["children"]) for result in self.results]

    @property
    def free_end_s(self) -> float:
        """How long the end would have taken at least, had nothing waited for a processor."""
        return max(0.0, self.end_s - self.stalled_s)

    @property
    def hook_ms(self) -> float:
        return float(max((result["hook_ms"] for result in self.results), default=0.0))

    @property
    def rss_mb(self) -> float:
        return float(max((result["rss_mb"] for result in self.results), default=0.0))

    @property
    def lost(self) -> str:
        """Rows that are not stored, and why."""
        if self.ledger is None:
            return "no session"
        counts = {**self.ledger["dropped"], "in flight": self.ledger["in_flight"]}
        return ", ".join(f"{rows} {where}" for where, rows in counts.items() if rows) or "0"


class Run:
    """A run under way, as a fault sees it."""

    def __init__(self, case: Case, folder: Path, monitor: bool) -> None:
        self.case = case
        self.folder = folder
        self.out = folder / "out"
        self.undo: list[Callable[[], object]] = []
        """Called when the run is over, come what may."""
        self.thaw: list[Callable[[], object]] = []
        """Called before that, once the launchers have ended: until then the disk cannot even be looked at."""
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TRACEML_"))
        }
        for name in ("work", "home", "out"):
            (folder / name).mkdir()
        self._environ = {
            **environ,
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder / "home"),
            "TRACEML_INTERVAL": "0.2",
            "TRACEML_NICE": "0",  # a fault waits for a monitor that is up
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # else an end comes up to 2 s later by chance
            **({"PYTHONPATH": str(HERE / "injected"), "CHAOS_FOLDER": str(folder)} if case.injected else {}),
            **case.environ,
        }
        if case.disk_mb and monitor:
            mount(self.out, case.disk_mb, case.can_freeze)
            self.undo.append(lambda: subprocess.run(["umount", "-l", str(self.out)], check=True))
        flags = (*case.flags, "--channel", case.channel, "--out", str(self.out), "--session", "s")
        self._flags = flags if monitor else ("--no-monitor",)
        script = (*case.script, *(() if monitor else ("--ms", "0")))
        self._script = (str(HERE / "train.py"), str(folder / "work"), *script)
        self.launchers = [self._start(*where) for where in self._places(monitor)]

    @property
    def session(self) -> Path:
        return self.out / "s"

    @property
    def socket(self) -> Path:
        return Path(json.loads((self.session / LIVE).read_bytes())["socket"])

    def processes(self, name: str, node: int = 0) -> list[psutil.Process]:
        """Return the processes of that name (an actor: of that class) under a node's launcher."""
        processes = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.launchers[node].pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    first = "".join(process.cmdline()[:1])
                    if Path(first).name == name or is_actor(process, name):
                        processes.append(process)
        return processes

    def signal(self, name: str, number: int, node: int = 0) -> None:
        """Send a signal to the processes of that name."""
        processes = self.processes(name, node)
        assert processes, f"no {name}"
        for process in processes:
            process.send_signal(number)

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks' processes."""
        script = str(HERE / "train.py")
        everyone = [p for launcher in self.launchers for p in psutil.Process(launcher.pid).children()]
        return [process for process in everyone if script in process.cmdline()]

    def stored(self) -> list[int]:
        """Return the rows of each rank process that are on disk."""
        with (
            contextlib.suppress(SessionFileError, OSError),
            SessionFile(self.session / "session.sqlite") as file,
        ):
            return [process.stored for process in file.processes()]
        return []

    def wait_up(self) -> None:
        """Wait until rows of every rank are stored."""
        until(lambda: sum(map(bool, self.stored())) >= RANKS, "rows of every rank", UP_S)

    def drive(self) -> None:
        """Do the harm, stop by stop, and let training go on to its end."""
        if self.case.fault is not None:
            harm = self.case.fault(self)
            for number in range(self.case.steps // 30):
                self._reached(number)
                if number == 0 and self.case.up:
                    self.wait_up()
                if next(harm, self) is self:
                    break
                (self.folder / "work" / f"go.{number}").touch()
        (self.folder / "work" / "go.all").touch()

    def _reached(self, number: int) -> None:
        """Wait for the ranks to come to a stop."""
        stop = self.folder / "work" / f"stop.{number}"
        until(lambda: stop.exists() or self.launchers[0].poll() is not None, stop.name, self.case.limit_s)
        assert stop.exists(), (self.folder / "stderr.0").read_text()[-3000:]

    def end(self) -> Outcome:
        """Wait for the end; say how it was."""
        for launcher in self.launchers:
            launcher.wait(self.case.limit_s)
            gone = time.monotonic()
        self._thaw()
        stderr = [(self.folder / f"stderr.{node}").read_text() for node in range(len(self.launchers))]
        results = [json.loads(path.read_text()) for path in sorted((self.folder / "work").glob("result.*"))]
        stalls = max((result["stalls_s"] for result in results), default=0.0)
        ended = max((result["ended"] for result in results), default=gone)
        codes = re.findall(r"exitcode +: (-?\d+)", stderr[0])
        outcome = Outcome(
            results,
            (self.launchers[0].returncode, *map(int, codes[-1:])),
            gone - ended,
            stalls_s() - stalls,
            [line for text in stderr for line in text.splitlines() if line.startswith("traceml-ray:")],
            "\n".join(stderr),
        )
        with contextlib.suppress(SessionFileError), SessionFile(self.session / "session.sqlite") as file:
            outcome.ledger = msgspec.to_builtins(file.ledger())
            outcome.doubled = doubled_rows(file)
            flags = b"".join(chunk for (chunk,) in file._all("SELECT flags FROM chunk"))
            outcome.on_device = sum(bool(flag & FLAG_DEVICE_CLOCK) for flag in flags)
        outcome.half_made = any(self.session.glob("*/.unfinished*"))
        with contextlib.suppress(OSError):
            outcome.summary = json.loads((self.session / "summary.json").read_bytes())
        return outcome

    def close(self) -> None:
        """Leave nothing behind."""
        self._thaw()
        for launcher in self.launchers:
            with contextlib.suppress(psutil.Error):
                for process in [*psutil.Process(launcher.pid).children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            launcher.kill()
            launcher.wait()
        for path in self.folder.glob("stderr.*"):  # rows that nobody has are kept, and said where
            for kept in re.findall(r"they are in (\S+)/spool", path.read_text()):
                shutil.rmtree(kept, ignore_errors=True)
        for undo in self.undo:
            with contextlib.suppress(OSError, psutil.Error, subprocess.CalledProcessError):
                undo()

    def _thaw(self) -> None:
        while self.thaw:
            self.thaw.pop()()

    def _places(self, monitor: bool) -> list[tuple[str, ...]]:
        if self.case.nodes == 1 or not monitor:
            return [("--nproc-per-node", str(RANKS))]
        ports = ("--master-port", str(free_port()), "--traceml-port", str(free_port()))
        arguments = ("--nnodes", str(self.case.nodes), "--nproc-per-node", "1", *ports)
        return [(*arguments, "--node-rank", str(rank)) for rank in range(self.case.nodes)]

    def _start(self, *where: str) -> subprocess.Popen[bytes]:
        number = len(list(self.folder.glob("stderr.*")))
        with (self.folder / f"stderr.{number}").open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, *self.case.command, *where, *self._flags, *self._script],
                cwd=self.folder,
                env={**self._environ, **({"RAY_AUTH_TOKEN": "t" * 32} if self.case.nodes > 1 else {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )


@contextlib.contextmanager
def started(case: Case, *, monitor: bool = True) -> Iterator[Run]:
    """Start a run, and leave nothing of it."""
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    run = Run(case, folder, monitor)
    try:
        yield run
    finally:
        run.close()
        shutil.rmtree(folder, ignore_errors=True)


def mount(folder: Path, megabytes: int, can_freeze: bool) -> None:
    """Put a small disk there, one that `can_freeze`; skips the test where that is not allowed."""
    commands = [["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]]
    if can_freeze:
        image = folder.with_name("image")
        image.touch()
        os.truncate(image, megabytes << 20)
        commands = [["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mounts are not allowed here: {error}")


def run(case: Case) -> Outcome:
    """Run it under the monitor, with the harm done."""
    with started(case) as under_way:
        under_way.drive()
        return under_way.end()


def plain(case: Case) -> Outcome:
    """Run the same script without a monitor; once for each way to call it."""
    return _plain(case.script, case.command)


def after(case: Case, got: Outcome) -> Outcome:
    """Return what to compare `got` with; run it again where `got` is late: the machine may be slower now."""
    expected = plain(case)
    if got.free_end_s - expected.free_end_s >= EXIT_S:
        _plain.cache_clear()
        expected = plain(case)
    return expected


@functools.cache
def _plain(script: tuple[str, ...], command: tuple[str, ...]) -> Outcome:
    case = Case("plain", script=script, command=command)
    with started(case, monitor=False) as under_way:
        under_way.drive()
        return under_way.end()


def check(case: Case, got: Outcome, expected: Outcome) -> None:
    """Check that the run does not show that there was a monitor, and that the monitor's books are right."""
    about = f"{case.title}\n{got.stderr[-3000:]}"
    assert got.computed == expected.computed, about
    assert len(got.results) == RANKS, about
    assert got.code == expected.code, about
    assert len(set(got.complaints)) == len(got.complaints) <= MAX_COMPLAINTS, about
    assert all(result["hooks"] > case.steps for result in got.results) or not case.up, about
    assert got.hook_ms < case.hook_ms, [(result["hook_ms"], result["where"]) for result in got.results]
    late = got.free_end_s - expected.free_end_s
    assert late < EXIT_S, f"{late:.1f} s late\n{about}"
    assert got.rss_mb - expected.rss_mb < RSS_MB[case.channel], about
    assert not got.half_made, about
    assert (got.summary is not None) == case.session, about
    if got.ledger is None:
        assert not case.session
        return
    for count in (got.ledger, *got.ledger["per_rank"].values()):
        counts = count["stored"], count["in_flight"], *count["dropped"].values()
        assert count["produced"] == sum(counts) and min(counts) >= 0, count
    assert (got.ledger["in_flight"], got.doubled) == (0, 0), got.ledger
    assert _accounted(got.ledger) <= RANKS * case.steps
    assert got.on_device > RANKS * case.steps / 2 or "--device" not in case.script, got.on_device
    assert not case.whole or (got.lost, _accounted(got.ledger)) == ("0", RANKS * case.steps), got.ledger


def row(case: Case, got: Outcome, expected: Outcome) -> tuple[str, ...]:
    """Return the case's line of the table."""
    lost = got.lost
    if got.ledger and (unreported := RANKS * case.steps - _accounted(got.ledger)):
        lost += f", {unreported} not told of"
    late = got.end_s - expected.end_s
    return (
        case.name,
        case.channel,
        lost.removeprefix("0, "),
        f"{got.hook_ms:.2f}",
        f"{got.rss_mb - expected.rss_mb:+.0f}",
        f"{late:+.1f}",
        f"{got.stalled_s:.1f}",
    )


def _accounted(ledger: dict[str, Any]) -> int:
    """Return how many rows of the script's own ranks the session knows of."""
    return sum(ledger["per_rank"].get(str(rank), {"produced": 0})["produced"] for rank in range(RANKS))
