"""
A run that is planned to the second: two kills, three checkpoints, an evaluation and a hang. It writes
down what it did.

python tests/planted_run.py FOLDER      run it under the launcher, and print what was planted

As a rank of the launcher (with RANK set) it trains. Each rank appends to `FOLDER/ATTEMPT-RANK.jsonl` what
it has planted, with times in ns of the clock of this machine. `planted` puts them together: where the
time of the ranks went, by attempt.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

WORLD = 2
STEPS = 150
PREPARE_S, FETCH_S, WORK_S, SLOWER_S = 1.0, 0.01, 0.05, 0.08
"""Rank 1 works longer than rank 0, in every step."""
SAVE_S, RESTORE_S, EVALUATE_S, HANG_S, CUT_S = 1.5, 1.0, 3.0, 12.0, 0.8
SAVED_BEFORE = {40: (0, 1), 95: (0, 1), 125: (0,)}
"""Step before which a checkpoint is saved → ranks that save it."""
EVALUATED_BEFORE, HANGS_IN = 60, 100
KILLED_IN = ((80, 1), (112, 0))
"""Of the first two attempts: in which step a rank is killed, and which."""


def rank_main(folder: Path, declares: bool) -> None:
    """Train as one rank of the planned run. `declares`: say at which step it continues."""
    import torch

    imported = time.time_ns()
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import traceml_ray

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log = os.open(folder / f"{attempt}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, since: int, to: int, **more: Any) -> None:
        os.write(log, f"{json.dumps({'what': what, 'since': since, 'to': to, **more})}\n".encode())

    note("startup", _born_ns(), imported, pid=os.getpid())
    atexit.register(
        lambda: note("ended", time.time_ns(), time.time_ns())
    )  # the interpreter still takes a while
    # a store of this attempt alone: after a kill the launcher's may name ports of the attempt before
    store = f"file://{folder}/store-{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)

    class Slow:
        """Takes long to save and to load."""

        def __reduce__(self) -> Any:
            time.sleep(SAVE_S)
            return _slow, ()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.work_s = nn.Linear(8, 1), WORK_S + SLOWER_S * rank

        def forward(self, x: Any) -> Any:
            time.sleep(self.work_s)
            return self.inner(x)

    class Samples(torch.utils.data.Dataset[Any]):
        def __init__(self, number: int) -> None:
            self.number = number

        def __len__(self) -> int:
            return self.number

        def __getitem__(self, index: int) -> Any:
            time.sleep(FETCH_S)
            return torch.full((8,), index / STEPS)

    model = Model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    time.sleep(PREPARE_S)
    start, path = 0, folder / f"checkpoint-{rank}.pt"
    newest = folder / "checkpoint-0.pt"
    if newest.exists():
        since = time.time_ns()
        loaded = torch.load(newest, weights_only=False)
        note("restore", since, time.time_ns())
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        start = loaded["step"]
        if declares:
            traceml_ray.count(steps_done=start)
    batches = iter(torch.utils.data.DataLoader(Samples(STEPS - start), batch_size=1))
    for step in range(start, STEPS):
        if rank in SAVED_BEFORE.get(step, ()) and step > start:
            since = time.time_ns()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**state, "slow": Slow()}, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
            note("save", since, time.time_ns(), step=step)
        if step == EVALUATED_BEFORE:
            since = time.time_ns()
            model.work_s = EVALUATE_S / 10
            with torch.no_grad():
                for x in torch.utils.data.DataLoader(Samples(10), batch_size=1):
                    model(x)
            model.work_s = WORK_S + SLOWER_S * rank
            note("evaluation", since, time.time_ns())
        fetched = time.time_ns()
        x = next(batches)
        have = time.time_ns()
        if step == HANGS_IN and rank == 1 and attempt == 1:
            time.sleep(HANG_S)
        loss = parallel(x).square().mean()
        arrived = time.time_ns()
        loss.backward()
        synced = time.time_ns()
        optimizer.step()
        optimizer.zero_grad()
        note("step", fetched, synced, step=step, have=have, arrived=arrived)
        if attempt < len(KILLED_IN) and KILLED_IN[attempt] == (step, rank):
            time.sleep(CUT_S)  # the step that is cut off; what came before is reported meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


def _born_ns() -> int:
    """Return when this process was started. `psutil` knows it to a second only."""
    since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now_ns, boot_ns = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return now_ns - (boot_ns - since_boot * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))


def _slow() -> str:
    time.sleep(RESTORE_S)
    return "slow"


class PlannedRun:
    """The launch of the planned run, and when its ranks ended."""

    def __init__(self, folder: Path, declares: bool = True) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        foreign = ("RAY_", "TRACEML_")
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
            "OMP_NUM_THREADS": "1",
            "TRACEML_NICE": "0",
            "TRACEML_INTERVAL": "0.25",
            "TRACEML_THRESHOLD_HANG_TIMEOUT_S": "4",
            "PLANTED_DECLARES": str(int(declares)),
        }
        flags = ("--nproc-per-node", str(WORLD), "--max-restarts", str(len(KILLED_IN)))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "traceml_ray.launch", *flags),
                *("--out", str(folder), "--session", "s", __file__, str(folder)),
            ],
            env=environ,
            stdout=(folder / "stdout").open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.ended: dict[int, int] = {}
        """When each rank's process had ended, by its id."""
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        import psutil

        pids: set[int] = set()
        due = 0.0
        while self.process.poll() is None:
            if time.monotonic() > due:
                pids, due = {life["pid"] for life in self.lives().values()}, time.monotonic() + 0.5
            for pid in pids - self.ended.keys():
                try:
                    over = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
                except psutil.NoSuchProcess:
                    over = True
                if over:
                    self.ended[pid] = time.time_ns()
            time.sleep(0.01)

    def lives(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the first line of each rank process, by attempt and rank."""
        lives = {}
        for path in self.folder.glob("?-?.jsonl"):
            first, *_ = path.read_text().splitlines() or [""]
            if first:
                lives[int(path.name[0]), int(path.name[2])] = json.loads(first)
        return lives

    def wait(self, limit_s: float = 240) -> dict[str, Any]:
        """Wait for the end. Return what was planted, see `planted`."""
        code = self.process.wait(limit_s)
        self._thread.join()
        assert code == 0, (self.folder / "stdout").read_text()[-4000:]
        truth = planted(self.folder, self.lives(), self.ended)
        (self.folder / "planted.json").write_text(json.dumps(truth, indent=1))
        return truth


def planted(
    folder: Path, lives: dict[tuple[int, int], dict[str, Any]], ended: dict[int, int]
) -> dict[str, Any]:
    """
    Return where the time of the ranks went by what they wrote down, in s of all ranks together: for the
    run, and for each attempt.
    """
    attempts = sorted({attempt for attempt, _ in lives})
    begins = [min(life["since"] for (k, _), life in lives.items() if k == attempt) for attempt in attempts]
    ends = [
        max(_ended(folder, k, rank, ended[life["pid"]]) for (k, rank), life in lives.items() if k == attempt)
        for attempt in attempts
    ]
    done, repeated = [], []
    for attempt, begin, end, until in zip(attempts, begins, ends, [*begins[1:], None], strict=True):
        notes = {rank: _notes(folder, attempt, rank) for rank in range(WORLD)}
        later = [step for other in attempts if other > attempt for step in _steps(folder, other)]
        again = min(later, default=STEPS)
        repeated.append(sum(step >= again for step in _steps(folder, attempt)))
        sums = _of_attempt(notes, begin, again)
        for rank, some in notes.items():
            over = _ended(folder, attempt, rank, ended[lives[attempt, rank]["pid"]])
            trained = max(note["to"] for note in some if note["what"] == "step")
            killed = attempt < len(KILLED_IN)
            sums["other"] += over - trained if killed else 0  # a step that was cut off
            sums["idle"] += end - (over if killed else trained)
        sums["recovery"] = WORLD * ((until or end) - end)
        sums["all"] = WORLD * ((until or end) - begin)
        done.append({name: ns / 1e9 for name, ns in sums.items()})
    names = {name for sums in done for name in sums}
    whole = {name: sum(sums.get(name, 0.0) for sums in done) for name in sorted(names)}
    return {"run": whole, "attempts": done, "repeated": repeated}


def _notes(folder: Path, attempt: int, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{attempt}-{rank}.jsonl").read_text().splitlines()]


def _ended(folder: Path, attempt: int, rank: int, process_ns: int) -> int:
    """Return when a rank's script had ended; if it was killed, when its process had."""
    ends = [note["since"] for note in _notes(folder, attempt, rank) if note["what"] == "ended"]
    return ends[0] if ends else process_ns


def _steps(folder: Path, attempt: int) -> set[int]:
    notes = [note for rank in range(WORLD) for note in _notes(folder, attempt, rank)]
    return {note["step"] for note in notes if note["what"] == "step"}


def _of_attempt(notes: dict[int, list[dict[str, Any]]], begin: int, again: int) -> dict[str, int]:
    """Return the ns of the ranks by category. Steps from `again` on count as wasted."""
    names = ("productive", "data", "waiting", "checkpoint_save", "checkpoint_restore", "evaluation", "hang")
    sums = dict.fromkeys((*names, "startup", "preparation", "wasted", "other", "idle"), 0)
    steps = {rank: [note for note in some if note["what"] == "step"] for rank, some in notes.items()}
    # the rank that comes last waits for nobody: its backward takes as long as the exchange itself
    shortest: dict[int, int] = {}
    for note in (note for some in steps.values() for note in some):
        took = note["to"] - note["arrived"]
        shortest[note["step"]] = min(took, shortest.get(note["step"], took))
    for rank, some in notes.items():
        for what, category in (
            ("save", "checkpoint_save"),
            ("restore", "checkpoint_restore"),
            ("evaluation", "evaluation"),
        ):
            sums[category] += sum(note["to"] - note["since"] for note in some if note["what"] == what)
        startup = next(note for note in some if note["what"] == "startup")
        sums["startup"] += startup["to"] - begin
        if not steps[rank]:
            continue
        first, *rows = steps[rank]
        inside = [note for note in some if note["what"] == "restore"]
        sums["preparation"] += (
            first["to"] - startup["to"] - sum(note["to"] - note["since"] for note in inside)
        )
        before = first["to"]
        for note in rows:
            outside = sum(
                other["to"] - other["since"]
                for other in some
                if other["what"] in ("save", "evaluation") and before <= other["since"] < note["to"]
            )
            length = note["to"] - before - outside
            waited = note["to"] - note["arrived"] - shortest[note["step"]]
            for what, category in (("save", "checkpoint_save"), ("evaluation", "evaluation")):
                meanwhile = min(waited, _alone(notes, rank, what, before, note["to"]))
                sums[category] += meanwhile
                waited, length = waited - meanwhile, length - meanwhile
            data = note["have"] - note["since"]
            if length > HANG_S * 1e9:
                sums["hang"] += length
            elif note["step"] >= again:
                sums["wasted"] += length
            else:
                sums["data"] += data
                sums["waiting"] += waited
                sums["productive"] += length - data - waited
            before = note["to"]
    return sums


def _alone(notes: dict[int, list[dict[str, Any]]], rank: int, what: str, since: int, to: int) -> int:
    """Return the ns from `since` to `to` in which the other rank saved or evaluated, and this one did not."""
    mine, others = (
        [note for other, some in notes.items() if (other == rank) == of_this for note in some]
        for of_this in (True, False)
    )
    alone = 0
    for other in (note for note in others if note["what"] == what):
        begin, end = max(since, other["since"]), min(to, other["to"])
        both = sum(
            max(0, min(end, note["to"]) - max(begin, note["since"]))
            for note in mine
            if note["what"] in ("save", "evaluation")
        )
        alone += max(0, end - begin - both)
    return alone


if __name__ == "__main__":
    where = Path(sys.argv[1]).absolute()
    if "RANK" in os.environ:
        rank_main(where, os.environ["PLANTED_DECLARES"] == "1")
    else:
        print(json.dumps(PlannedRun(where).wait(), indent=1))
