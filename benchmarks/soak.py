"""
Does anything grow? Runs many small steps with random faults, and samples every process once a second.

    python benchmarks/soak.py [--seconds 600] [--ranks 8] [--rate 200] [--seed 0] [--no-dashboard]

This is a real launch of `training/soaking.py`: real ranks, the private Ray, relay, aggregator, and a
dashboard that receives a browser's requests once a second. In the first two fifths, relay and aggregator are
killed repeatedly. During the whole run they are stopped for seconds, flooded with events and named parts, and
sent garbage.

For each process, the longest life counts, without its first half, in which bounded buffers fill up. The slope
of its memory is the median of the slopes between any two samples (Theil-Sen), which a few steps up or down do
not change. At the end the ledger is compared with the ranks' own counts. The exit code is 1 when a limit is
missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np
import psutil
from figures import publish  # type: ignore[import-not-found]
from overhead import machine, until  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from sessions import doubled_rows, refresh_request

from traceml_ray.stages import ROW_BYTES
from traceml_ray.store.session import LIVE, Live
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

SCRIPT = Path(__file__).parent / "training" / "soaking.py"
LONG_S = 300
"""
Shorter runs are still warming up. For them the second, looser of two limits applies, which
detects runaways.
"""
SLOPE_MB_MIN = (1.0, 150.0)
FLAT = (2, 8)
"""
Largest increase of file descriptors, or of threads, from the first to the last quarter: in a run of LONG_S
or more, and in a shorter one.
"""
LIFE = (0.5, 0.25)
"""Share of a run that a process must live to be measured: for runs from LONG_S on, and for shorter runs."""
BACK_S = 10.0
"""Time within which a killed process must be back, in s."""
HOUR_MB = 100
"""Largest session file for one hour of 8 ranks with 10 steps a second, in MB."""
KILLS_UNTIL = 0.4
KINDS = ("kill relay", "kill aggregator", "stop relay", "stop aggregator", "stop both")
KINDS += ("events", "parts", "garbage")
EVERY_S = 15.0
ROW_BYTES = 9 + ROW_BYTES
START_S, END_S = 120.0, 60.0
MB = 1e6


# -- the processes -------------------------------------------------------------------------------


class Look(NamedTuple):
    """One process at one moment: seconds, bytes, counts, CPU seconds so far."""

    t: float
    rss: int
    uss: int
    fds: int
    threads: int
    cpu: float


class Life:
    """The life of one process, from when it was first seen."""

    def __init__(self, role: str, process: psutil.Process) -> None:
        self.role = role
        self.process = process
        self.looks: list[Look] = []

    def look(self) -> None:
        """Sample the process once. Raises `psutil.Error` or OSError when it is gone."""
        sizes: Counter[str] = Counter()
        for line in Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split()[:2]
            sizes[name.partition("_")[0].rstrip(":")] += 1024 * int(size)
        counts = self.process.num_fds(), self.process.num_threads()
        cpu = sum(self.process.cpu_times()[:2])
        self.looks.append(Look(time.monotonic(), sizes["Rss"], sizes["Private"], *counts, cpu))

    @property
    def seconds(self) -> float:
        """Return the time from the first to the last sample, in s."""
        return self.looks[-1].t - self.looks[0].t if self.looks else 0.0

    def settled(self) -> list[Look]:
        """Return the samples without those of the first half."""
        return [look for look in self.looks if look.t >= self.looks[0].t + self.seconds / 2]


class Lives:
    """Every process of a launch that is sampled."""

    def __init__(self, launcher: psutil.Process) -> None:
        self._launcher = launcher
        self._known: dict[psutil.Process, Life] = {}

    def look(self) -> None:
        """Find the processes and sample each."""
        for process in self._launcher.children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                life = self._known.get(process)
                if life is None and (role := role_of(process)):
                    life = self._known[process] = Life(role, process)
                if life is not None:
                    life.look()

    def begin(self) -> None:
        """Forget all samples so far."""
        for life in self._known.values():
            life.looks.clear()

    def now(self, role: str) -> psutil.Process | None:
        """Return the living process of that role."""
        living = (life.process for life in reversed([*self._known.values()]) if life.role == role)
        return next((process for process in living if process.is_running()), None)

    def of(self, role: str) -> list[Life]:
        """Return every life of that role, or of roles with that prefix."""
        return [life for life in self._known.values() if life.role.startswith(role)]


def role_of(process: psutil.Process) -> str | None:
    """Return the role of a process. None: it is not sampled, or not yet."""
    command = process.cmdline()
    if not command:
        return None
    if command[0].startswith("ray::"):
        return {"NodeRelay": "relay", "Aggregator": "aggregator"}.get(command[0][5:].partition(".")[0])
    if str(SCRIPT) in command and "LOCAL_RANK" in (environ := process.environ()):
        return f"rank {environ['LOCAL_RANK']}"
    if "traceml_ray.cli" in command and "dashboard" in command:
        return "dashboard"
    return {"raylet": "raylet", "gcs_server": "GCS"}.get(Path(command[0]).name)


def slope_mb_min(times: list[float], values: list[int]) -> float:
    """Return the median of the slopes between any two of at most 600 points (Theil-Sen), MB a minute."""
    every = -(-len(times) // 600)
    t, v = np.array(times[::every]), np.array(values[::every], float)
    first, second = np.triu_indices(len(t), 1)
    return float(np.median((v[second] - v[first]) / (t[second] - t[first]))) * 60 / MB


# -- the faults ----------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A fault: what happens, when (in seconds from the first step), and for how long."""

    start_s: float
    kind: str
    seconds: float


def planned(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a run: each kind at least once, and no kill in the last three fifths."""
    rng = random.Random(seed)
    count = max(len(KINDS), int(seconds / EVERY_S))
    room = 0.85 * seconds / count
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += rng.sample(KINDS, len(KINDS))
    kinds = sorted(kinds[: len(KINDS)], key=lambda kind: not kind.startswith("kill")) + kinds[len(KINDS) :]
    faults = []
    for number, kind in enumerate(kinds[:count]):
        start_s = 0.05 * seconds + room * (number + 0.3 * rng.random())
        if kind.startswith("kill") and start_s > KILLS_UNTIL * seconds:
            kind = kind.replace("kill", "stop")
        faults.append(Fault(start_s, kind, min(rng.uniform(3, 8), 0.6 * room)))
    return faults


class Faults:
    """Causes the planned faults, each in a separate thread."""

    def __init__(self, plan: list[Fault], lives: Lives, path: str, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._plan = list(plan)
        self._lives = lives
        self._path = path
        self._rng = random.Random(seed)
        self._threads: list[threading.Thread] = []

    def turn(self, now: float) -> None:
        """Begin the faults that are due."""
        while self._plan and self._plan[0].start_s <= now:
            self._threads.append(threading.Thread(target=self._do, args=(self._plan.pop(0),)))
            self._threads[-1].start()

    def end(self) -> None:
        """Wait for the faults that have begun."""
        for thread in self._threads:
            thread.join()

    def _do(self, fault: Fault) -> None:
        what, _, who = fault.kind.partition(" ")
        try:
            if what == "kill":
                self._signal(who, signal.SIGKILL)
            elif what == "stop":
                stopped = [self._signal(one, signal.SIGSTOP) for one in roles(who)]
                time.sleep(fault.seconds)
                for process in stopped:
                    process.send_signal(signal.SIGCONT)
            elif what != "parts":  # the ranks do that themselves
                {"events": self._events, "garbage": self._garbage}[what](fault.seconds)
            self.done[fault.kind] += 1
        except (psutil.Error, OSError, RuntimeError) as error:
            self.failed[f"{fault.kind}: {error}"] += 1

    def _signal(self, role: str, number: int) -> psutil.Process:
        process = until(lambda: self._lives.now(role), f"{role} is there", BACK_S)
        process.send_signal(number)
        return process

    def _connect(self) -> socket.socket:
        def connected() -> socket.socket | None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(5)
            try:
                sock.connect(self._path)
            except OSError:  # it was killed and is not back yet
                sock.close()
                return None
            return sock

        connection: socket.socket = until(connected, "relay listens", BACK_S)
        return connection

    def _events(self, seconds: float) -> None:
        """Act as a process that only sends events: 300 of them every 0.1 s."""
        process, batches = f"{self._rng.getrandbits(64):016x}", int(10 * seconds)
        with self._connect() as sock:
            for seq in range(batches):
                events = [wire.Event("note", time.time_ns(), message=f"{n} " + "x" * 100) for n in range(300)]
                batch = wire.RankBatch(
                    codec.VERSION, process, seq, time.time_ns(), 0, 0, 0, b"", b"", b"",
                    events=events, final=seq == batches - 1,
                )  # fmt: skip
                sock.send(codec.encode(batch))
                sock.recv(wire.MAX_BATCH_BYTES)
                time.sleep(0.1)

    def _garbage(self, seconds: float) -> None:
        """Connect repeatedly to send invalid or truncated messages."""
        good = codec.encode(
            wire.RankBatch(codec.VERSION, "garbage", 0, 0, 1, 0, 0, bytes(8), b"\0", bytes(48))
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._connect() as sock:
                for _ in range(20):
                    size = self._rng.choice((1, 10, 1000, 60_000, 100_000))
                    sock.send(
                        self._rng.choice((self._rng.randbytes(size), good[: self._rng.randrange(1, 40)]))
                    )
            time.sleep(0.05)


def roles(who: str) -> tuple[str, ...]:
    """Return the roles that a fault affects."""
    return ("relay", "aggregator") if who == "both" else (who,)


# -- the browser ---------------------------------------------------------------------------------


class Browser(threading.Thread):
    """Sends, once a second, the requests of a browser on a page. Stays ten seconds on each page."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.answers: Counter[str] = Counter()
        self.stale = 0
        """Number of answers in which the aggregator was first reported as not answering."""
        self.took_ms: list[float] = []
        self._url = url.rstrip("/")
        self._over = threading.Event()
        self._pages = (
            "/",
            "/rank/1",
            f"/node/{quote(socket.gethostname())}",
            "/events",
            "/ledger",
            "/sessions",
        )

    def run(self) -> None:
        """Send requests until `end`."""
        seen: dict[str, Any] = {}
        for number in range(1 << 30):
            page = self._pages[number // 10 % len(self._pages)]
            if number % 10 == 0:
                seen = {}
                self._get(page)
            self._get("/metrics")
            seen = self._refresh(page, number, seen)
            if self._over.wait(1.0):
                return

    def end(self) -> None:
        """Stop sending requests."""
        self._over.set()
        self.join(30)

    def _refresh(self, page: str, number: int, seen: dict[str, Any]) -> dict[str, Any]:
        asked = refresh_request(number, page, seen=seen)
        body = self._get("/_dash-update-component", json.dumps(asked).encode())
        if not body:
            return seen
        response = json.loads(body)["response"]
        answer, lines = response["answer"]["data"], json.dumps(response.get("problem"))
        if "could not be made" in lines:
            self.answers[f"{page}: {lines}"] += 1
        self.stale += "not answering" in lines
        newest: dict[str, Any] = answer.get("seen", seen)  # there is none where nothing is new
        return newest

    def _get(self, path: str, data: bytes | None = None) -> bytes:
        began = time.monotonic()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                body: bytes = answer.read()
                self.answers["ok"] += 1
        except (OSError, ValueError) as error:
            self.answers[f"{path}: {error}"] += 1
            return b""
        self.took_ms.append(1e3 * (time.monotonic() - began))
        return body


# -- the run -------------------------------------------------------------------------------------


class Soak:
    """One run. Call `play`; then `bars` returns the results."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.session = folder / "soak"
        self.browser: Browser | None = None
        self.file_bytes: list[int] = []
        self.wal_bytes: list[int] = []
        self._path = folder / "plan.json"
        self._said: list[str] = []
        self.plan = planned(args.seed, args.seconds)
        floods = [
            (fault.start_s, fault.start_s + fault.seconds) for fault in self.plan if fault.kind == "parts"
        ]
        plan = {"ranks": args.ranks, "rate": args.rate, "seconds": args.seconds, "floods": floods}
        self._path.write_text(json.dumps(plan))

    def play(self) -> None:
        """Launch. Once all is up, cause the faults and sample the processes. Raises RuntimeError."""
        with self._launched() as process:
            self.lives = Lives(psutil.Process(process.pid))
            until(lambda: self._is_up(process), "everything is up", START_S)
            live = msgspec.json.decode((self.session / LIVE).read_bytes(), type=Live)
            self.faults = Faults(self.plan, self.lives, live.socket, self.args.seed)
            if self.browser is not None:
                self.browser.start()
            begin = time.monotonic() + 1.0
            go = self._path.with_suffix(".tmp")
            go.write_text(repr(begin))
            go.rename(self._path.with_suffix(".go"))
            self.lives.begin()
            for second in range(int(self.args.seconds)):
                while (now := time.monotonic() - begin) < second:
                    time.sleep(min(0.05, second - now))
                    self.faults.turn(now)
                self._look()
            self.faults.end()
            if self.browser is not None:
                self.browser.end()
            process.wait(END_S)
            self.exit_code = process.returncode

    @contextlib.contextmanager
    def _launched(self) -> Iterator[subprocess.Popen[str]]:
        more = ["--session", self.session.name, "--out", str(self.session.parent)]
        more += ["--dashboard=0", "--dashboard-linger=0"] if self.args.dashboard else []
        command = [sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", str(self.args.ranks)]
        command += [*more, str(SCRIPT), str(self._path)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        try:
            yield process
        finally:
            process.terminate()  # the launcher ends its ranks and everything else it started
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._said.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)

    def _is_up(self, process: subprocess.Popen[str]) -> bool:
        if process.poll() is not None:
            raise RuntimeError("the launcher ended:\n" + "\n".join(self._said[-20:]))
        mark = "traceml-ray: dashboard: "
        url = next((line.removeprefix(mark) for line in self._said if line.startswith(mark)), None)
        if url is not None and self.browser is None:
            self.browser = Browser(url)
        self.lives.look()
        running = [self.lives.now(role) for role in ("relay", "aggregator")]
        ready = len(list(self._path.parent.glob("plan.*.ready")))
        time.sleep(0.2)
        return all(running) and ready == self.args.ranks and (url is not None or not self.args.dashboard)

    def _look(self) -> None:
        self.lives.look()
        for name, sizes in (("session.sqlite", self.file_bytes), ("session.sqlite-wal", self.wal_bytes)):
            path = self.session / name
            sizes.append(path.stat().st_size if path.exists() else 0)

    def counted(self) -> int:
        """Return the number of steps that the ranks themselves have counted."""
        files = [self._path.with_suffix(f".{rank}.json") for rank in range(self.args.ranks)]
        return sum(json.loads(file.read_text())["steps"] for file in files)


# -- what came of it -----------------------------------------------------------------------------


class Bar(NamedTuple):
    """One requirement, and whether it is met."""

    what: str
    measured: str
    ok: bool


def process_rows(soak: Soak) -> tuple[list[str], list[Bar]]:
    """Return the table of processes, and the requirements on our own ones."""
    rows, bars = [], []
    short = soak.args.seconds < LONG_S
    limit, flat, least_s = SLOPE_MB_MIN[short], FLAT[short], LIFE[short] * soak.args.seconds
    ours = ("rank", "relay", "aggregator", *(["dashboard"] if soak.args.dashboard else []))
    for role in (*ours, "raylet", "GCS"):
        lives = soak.lives.of(role)
        measured = [(slope(life, "rss"), life) for life in lives if life.seconds >= least_s]
        if not measured:
            bars.append(Bar(f"{role}: lives long enough to be measured", f"{len(lives)} lives", False))
            continue
        worst, life = max(measured, key=lambda item: item[0])
        looks = life.settled()
        fds, threads = (change([getattr(look, name) for look in looks]) for name in ("fds", "threads"))
        name = f"rank (worst of {len(lives)})" if role == "rank" else role
        rows.append(
            f"| {name} | {len(lives)} | {life.looks[0].rss / MB:.0f} | {looks[0].rss / MB:.0f} "
            f"| {looks[-1].rss / MB:.0f} | {worst:+.2f} | {slope(life, 'uss'):+.2f} "
            f"| {fds[0]} → {fds[1]} | {threads[0]} → {threads[1]} | {cpu_pct(looks)} |"
        )
        if role in ours:
            bars.append(Bar(f"{name}: MB/min < {limit:g}", f"{worst:+.2f}", worst < limit))
            for what, (before, after) in (("file descriptors", fds), ("threads", threads)):
                bars.append(Bar(f"{name}: {what} stay", f"{before} → {after}", after <= before + flat))
    head = "| process | lives | RSS first, MB | warm | last | RSS, MB/min | USS | fds | threads | CPU, % |"
    return [head, "|---|---|---|---|---|---|---|---|---|---|", *rows], bars


def slope(life: Life, name: str) -> float:
    """Return the growth of a process after its warm-up, in MB a minute."""
    looks = life.settled()
    return slope_mb_min([look.t for look in looks], [getattr(look, name) for look in looks])


def cpu_pct(looks: list[Look]) -> str:
    """Return the CPU use in the first and in the last quarter, in % of a core."""
    quarter = max(2, len(looks) // 4)
    parts = looks[:quarter], looks[-quarter:]
    shares = [(part[-1].cpu - part[0].cpu) / max(1e-9, part[-1].t - part[0].t) for part in parts]
    return " → ".join(f"{100 * share:.1f}" for share in shares)


def change(counts: list[int]) -> tuple[int, int]:
    """Return the medians of the first and of the last quarter."""
    quarter = max(1, len(counts) // 4)
    return int(np.median(counts[:quarter])), int(np.median(counts[-quarter:]))


def row_bars(soak: Soak) -> tuple[list[str], list[Bar]]:
    """Compare the ledger with the ranks' own counts and with the rows in the file."""
    with SessionFile(soak.session / "session.sqlite") as stored:
        ledger = stored.ledger()
        doubled = doubled_rows(stored)
        errors = stored.meta().get("errors", {})
    counted, dropped = soak.counted(), msgspec.structs.asdict(ledger.dropped)
    total = ledger.stored + sum(dropped.values())
    aimed = soak.args.ranks * soak.args.rate * soak.args.seconds
    lines = [
        f"Rows: {counted} made by the ranks ({counted / aimed:.1%} of the rate asked for), "
        f"{ledger.stored} stored; dropped: {', '.join(f'{name} {n}' for name, n in dropped.items())}.",
        f"Errors counted by the aggregator: {errors or 'none'}.",
    ]
    bars = [
        Bar(
            "produced = what the ranks counted",
            f"{ledger.produced}, {counted}",
            ledger.produced == counted,
        ),
        Bar("produced = stored + dropped", f"{ledger.produced}, {total}", ledger.produced == total),
        Bar("no row is in the file twice", str(doubled), doubled == 0),
    ]
    return lines, bars


def file_bars(soak: Soak) -> tuple[list[str], list[Bar]]:
    """Return the size of a row in the session file, without the floods, and the size of an hour's file."""
    path = soak.session / "session.sqlite"
    whole = path.stat().st_size
    with sqlite3.connect(path, isolation_level=None) as database:  # the file is not used any more
        (rows,) = database.execute("SELECT sum(n) FROM chunk").fetchone()
        database.execute("DELETE FROM event WHERE kind = 'note'")
        database.execute("DELETE FROM span WHERE name LIKE 'part %'")
        database.execute("VACUUM")
    size = path.stat().st_size
    seconds, ranks = soak.args.seconds, soak.args.ranks
    rest = (size - rows * ROW_BYTES) / seconds / ranks
    hour = 8 * 3600 * (10 * ROW_BYTES + rest) / MB
    here = ranks * 3600 * (soak.args.rate * ROW_BYTES + rest) / MB
    lines = [
        f"Session file: {whole / MB:.1f} MB, {size / MB:.1f} without the floods: {size / rows:.1f} B a row, "
        f"{ROW_BYTES} B of them its own, the rest {rest:.0f} B a second and rank; at most "
        f"{max(soak.wal_bytes) / MB:.1f} MB more in the WAL.",
        f"By that, an hour of 8 ranks at 10 steps/s is {hour:.0f} MB, an hour of this run {here:.0f} MB.",
    ]
    bar = Bar(f"MB of 8 ranks × 1 h × 10 steps/s < {HOUR_MB}", f"{hour:.0f}", hour < HOUR_MB)
    return lines, [bar] if seconds >= LONG_S else []  # even an empty file has a size


def other_bars(soak: Soak) -> tuple[list[str], list[Bar]]:
    """Return the faults that happened, and how the dashboard answered."""
    done = ", ".join(f"{kind} {count}" for kind, count in sorted(soak.faults.done.items()))
    failed = f"; could not: {dict(soak.faults.failed)}" if soak.faults.failed else ""
    lines = [f"Faults: {done}{failed}."]
    bars = [Bar("exit code of the run", str(soak.exit_code), soak.exit_code == 0)]
    if soak.browser is not None:
        ok, answers = soak.browser.answers["ok"], soak.browser.answers.total()
        p50, p95 = np.percentile(soak.browser.took_ms or [np.nan], [50, 95])
        stale = f"it said {soak.browser.stale} times that the aggregator does not answer"
        lines.append(f"Dashboard: {answers} requests, p50 {p50:.0f} ms, p95 {p95:.0f} ms; {stale}.")
        bad = {what: count for what, count in soak.browser.answers.items() if what != "ok"}
        bars.append(
            Bar("the dashboard answers everything", f"{ok} of {answers} {bad or ''}", ok == answers > 0)
        )
    return lines, bars


def main() -> int:
    """Run, print, return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600, help="time of the run, s (default: 600)")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks (default: 8)")
    parser.add_argument(
        "--rate", type=float, default=200, help="steps per second of each rank (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument(
        "--no-dashboard", dest="dashboard", action="store_false", help="run without a dashboard"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every sample of every process to this file"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as made:
        soak = Soak(args, Path(made))
        soak.play()
        parts: list[Callable[[Soak], tuple[list[str], list[Bar]]]]
        parts = [process_rows, row_bars, file_bars, other_bars]
        results = [part(soak) for part in parts]
        if args.json:
            lives = [[life.role, life.process.pid, life.looks] for life in soak.lives.of("")]
            args.json.write_text(json.dumps({"lives": lives, "file": soak.file_bytes, "wal": soak.wal_bytes}))
    print(f"{machine()}\n\n{args.ranks} ranks, {args.rate:g} steps/s, {args.seconds:g} s, seed {args.seed}\n")
    print("\n".join(results[0][0]), *("\n".join(lines) for lines, _ in results[1:]), sep="\n\n")
    bars = [bar for _, part in results for bar in part]
    print("\n" + "\n".join(f"{'ok  ' if bar.ok else 'MISS'}  {bar.what}: {bar.measured}" for bar in bars))
    shown = [bar for bar in bars if not bar.ok or "MB" in bar.what or "produced" in bar.what]
    rows = [(bar.what, bar.measured, "yes" if bar.ok else "**no**") for bar in shown]
    rows.append(("all limits", f"{sum(bar.ok for bar in bars)} of {len(bars)} met", ""))
    publish("soak", ("what", "measured", "met"), rows)
    return 0 if all(bar.ok for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
