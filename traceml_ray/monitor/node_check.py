"""
Checks a node during training when the aggregator asks for it: in a process of its own, with the lowest
priority and within a time limit.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from traceml_ray.signals.check.child import Child
from traceml_ray.signals.check.during import MOST_S, TrainingCheckPlan
from traceml_ray.signals.check.nodes import environment
from traceml_ray.signals.check.records import COMMAND, MOST_CHECKS, Checked
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Part, ready

_MOST_START_S = 120.0
"""A check that is to begin later than this was ordered by a clock that cannot be trusted."""
_SPARE_S = 5.0
_NICE = 19


class NodeCheck:
    """
    Makes the checks, one at a time. `drain` and `handle` are called with the relay's lock held.

    Args:
        pid: returns the pid of a rank process that reports from this node, by name; with the lock held.
        lock: the relay's.
        wall: the node's clock, ns since the epoch.
        run: makes a check: returns the output of its process. Raises OSError or `subprocess` errors.
    """

    def __init__(
        self,
        pid: Callable[[str], int | None],
        lock: threading.RLock,
        wall: Callable[[], int] = time.time_ns,
        run: Callable[[TrainingCheckPlan, float], bytes] | None = None,
    ) -> None:
        self.errors: Counter[str] = Counter()
        self._pid, self._lock, self._wall = pid, lock, wall
        self._run = run or self.in_process
        self._obeyed = set[object]()
        self._made: dict[str, list[Part]] = {}
        self._process: Child | None = None
        self._busy = self._closed = False

    def handle(self, commands: Sequence[wire.Command]) -> list[wire.Command]:
        """Begin the check that a command asks for. Return the other commands, which are for ranks."""
        for command in commands:
            if command.name == COMMAND and command.args.get("id") not in self._obeyed:
                self._obeyed.add(command.args.get("id"))
                self._begin(command.args)
        return [command for command in commands if command.name != COMMAND]

    def _begin(self, args: Mapping[str, object]) -> None:
        begin_ns, about, processes = args.get("begin_ns"), args.get("rank"), args.get("processes")
        if not (isinstance(begin_ns, int) and isinstance(about, int) and isinstance(processes, str)):
            self._failed("malformed order")
            return
        named = [word.partition(":") for word in processes.split()]
        pids = {
            int(rank): pid
            for rank, _, name in named
            if rank.isdigit() and (pid := self._pid(name)) is not None
        }
        ahead_s = (begin_ns - self._wall()) / 1e9
        if self._closed:
            return
        for why, is_so in (
            ("another one is made", self._busy),
            ("no rank is known here", not pids),
            ("it would begin in the past, or too late", not 0 < ahead_s < _MOST_START_S),
        ):
            if is_so:
                self._failed(why)
                return
        self._busy = True
        owner = next(name for rank, _, name in named if rank.isdigit() and int(rank) in pids)
        plan = TrainingCheckPlan(begin_ns, about, pids, number=MOST_CHECKS - 1)
        most_s = ahead_s + plan.trials * plan.period_s + MOST_S + _SPARE_S
        threading.Thread(
            target=self._check, args=(plan, owner, most_s), name="traceml-check-node", daemon=True
        ).start()

    def _failed(self, why: str) -> None:
        self.errors[f"check during training: {why}"] += 1

    def _check(self, plan: TrainingCheckPlan, owner: str, most_s: float) -> None:
        try:
            checked = msgspec.json.decode(self._run(plan, most_s), type=ready(Checked))
            with self._lock:
                self._made.setdefault(owner, []).append(checked)
        except Exception as error:  # a check that fails is a check less
            ended = isinstance(error, subprocess.CalledProcessError)
            why = f"exit code {error.returncode}" if ended else type(error).__name__  # type: ignore[attr-defined]
            with self._lock:
                if not self._closed:
                    self._failed(why)
        finally:
            with self._lock:
                self._busy = False

    def in_process(self, plan: TrainingCheckPlan, most_s: float) -> bytes:
        """
        Run the process, and return its output. It inherits the priority of this thread, which is lowered.
        Raises OSError, and `subprocess.SubprocessError` if it fails or takes longer than `most_s` seconds.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        process = Child("traceml_ray.signals.check.during", environment(os.environ), quiet=True)
        with self._lock:
            self._process = process
            if self._closed:
                process.kill()
        try:
            return process.result(msgspec.json.encode(plan), most_s)
        finally:
            with self._lock:
                self._process = None

    @property
    def waiting(self) -> bool:
        """Whether a check has not been drained yet."""
        return bool(self._made)

    def drain(self) -> dict[str, list[Part]]:
        """Return new checks by the rank process that they are stored with."""
        made, self._made = self._made, {}
        return made

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
