"""
What a profile costs: time of the steps that it records, of the steps in which its trace is written, and of
the steps after it.

    python benchmarks/captures.py [--rounds 100] [--markdown]

One process trains (steps of 20 to 30 ms), with the complete agent and a relay. Each round has some steps, a
capture of three steps, the steps until the trace is ready for the relay, and some steps again. Every other
round has no capture, which shows how much rounds differ without one. Nothing else should run meanwhile. Linux
only.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
from figures import Figure, machine, publish_figures, table
from overhead import (  # type: ignore[import-not-found]
    RANK,
    Training,
    check,
    gpt_training,
    medians,
    middle,
    relay_process,
    settle_down,
)

from traceml_ray.agent.channel import SocketChannel
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.settings import Settings
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import ProfileCommand

AROUND = 12
"""Number of steps before a capture, and also after it."""
STEPS = 3
AHEAD = 3
MOST_STEPS = 2000


class Round(NamedTuple):
    """The times of one round, in ms. A round without a capture has no times of a capture."""

    before: float
    after: float
    recorded: float | None = None
    """Median of the recorded steps."""
    turning: float | None = None
    """Time to turn the profiler on and off."""
    sending: list[float] | None = None
    """Times of the steps until the trace was ready for the relay."""
    exported: float | None = None


class Rank:
    """A rank whose agent polls in a separate thread when it is told to."""

    def __init__(self, path: str, training: Training) -> None:
        self.training = training
        self.agent = RankAgent(Settings(session="bench"), SocketChannel(path))
        self.agent.instrumentation.install()
        self.agent.instrumentation.roots.add(training.model)
        self._due: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._turns, daemon=True).start()

    def _turns(self) -> None:
        while True:
            self._due.get()()

    def turn(self, first: Callable[[], object] = lambda: None) -> None:
        """Let the agent call `first` and then poll once."""
        self._due.put(first)
        self._due.put(self.agent.tick)

    def settle(self) -> None:
        """Wait until the agent is idle, and then train without garbage collection."""
        done = threading.Event()
        self.turn(done.set)
        done.wait(30)
        settle_down(self.training)

    def steps_ms(self, steps: int) -> list[float]:
        """Train, and return the time of each step, in ms."""
        return [1e3 * self.training.seconds(1) for _ in range(steps)]

    def ask(self, number: int) -> None:
        """Send the agent a command for a capture that begins a few steps ahead."""
        self.agent.recorder.replay(0.1)
        first = self.agent.recorder.steps.rows.step + AHEAD
        wanted = ProfileCommand(id=f"p{number}", number=1, first_step=first, steps=STEPS, limit_s=30.0)
        self.agent.captures.handle_command(wire.Command("profile", msgspec.structs.asdict(wanted)))

    def captured(self, number: int) -> tuple[wire.Capture, list[float]]:
        """
        Train until a capture is over. Return its status, and the time of each step after the
        recorded ones.
        """
        self.turn(partial(self.ask, number))
        sending = []
        for _ in range(MOST_STEPS):
            (took,) = self.steps_ms(1)
            status = self.agent.captures.status
            if status is not None and status.id == f"p{number}" and len(status.steps) == STEPS:
                sending.append(took)
            if status is not None and status.state == "sending":
                return status, sending[1:]
            if status is not None and status.reason:
                raise RuntimeError(status.reason)
            if self._due.empty():
                self.turn()
        raise RuntimeError(f"no trace after {MOST_STEPS} steps")

    def round(self, number: int, capture: bool) -> Round:
        """Run some steps, a capture if wanted, and some more steps."""
        self.settle()
        before = statistics.median(self.steps_ms(AROUND))
        if not capture:
            self.steps_ms(AROUND)
            self.settle()
            return Round(before, statistics.median(self.steps_ms(AROUND)))
        status, sending = self.captured(number)
        self.settle()
        after = statistics.median(self.steps_ms(AROUND))
        recorded = statistics.median((end - began) / 1e6 for _, began, end, _ in status.steps)
        turning = ((status.start_ns or 0) + (status.stop_ns or 0)) / 1e6
        return Round(before, after, recorded, turning, sending, (status.export_ns or 0) / 1e6)


def figures(rounds: list[Round]) -> list[Figure]:
    """Return the rows of the table."""

    def added(one: list[Round]) -> str:
        estimate = middle(medians([100 * (one_round.after / one_round.before - 1) for one_round in one]))
        return f"{estimate.value:+.2f} % ({estimate.low:+.2f} … {estimate.high:+.2f})"

    with_one = [one_round for one_round in rounds if one_round.recorded is not None]
    without = [one_round for one_round in rounds if one_round.recorded is None]
    more = [100 * ((one_round.recorded or 0) / one_round.before - 1) for one_round in with_one]
    sent = [step / one_round.before for one_round in with_one for step in one_round.sending or []]
    lost = [sum(step - one_round.before for step in one_round.sending or []) for one_round in with_one]
    return [
        Figure("capture", "step", f"{statistics.median(one_round.before for one_round in rounds):.1f} ms"),
        Figure("capture", "added to a step that is recorded", f"{statistics.median(more):+.0f} %"),
        Figure(
            "capture",
            "turning the profiler on and off, once",
            f"{statistics.median(one_round.turning or 0 for one_round in with_one):.0f} ms",
        ),
        Figure(
            "capture",
            "writing the trace, on the agent's thread",
            f"{statistics.median(one_round.exported or 0 for one_round in with_one):.0f} ms",
        ),
        Figure(
            "capture",
            "steps while it is written",
            f"{len(sent) / len(with_one):.0f}, {100 * (statistics.median(sent) - 1):+.0f} % each (median)",
        ),
        Figure("capture", "that is, in all", f"{statistics.median(lost):+.0f} ms"),
        Figure("capture", f"added to a step after it, {len(with_one)} pairs", added(with_one), "≈ 0"),
        Figure("capture", f"the same without a capture, {len(without)} pairs", added(without)),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="number of rounds (default: 100)")
    parser.add_argument("--markdown", action="store_true", help="print the section for RESULTS.md")
    args = parser.parse_args()
    import os

    import torch

    os.environ.update(RANK)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    where, began = machine(), time.monotonic()
    with relay_process() as path:
        rank = Rank(path, gpt_training())
        rank.settle()
        rounds = [rank.round(number, number % 2 == 0) for number in range(args.rounds)]
        check(rank.agent.instrumentation)
        rank.agent.channel.close()
    measured = figures(rounds)
    print(where, table(measured, args.markdown), sep="\n\n")
    shown = [one for one in measured if one.what.startswith(("added", "turning", "that is"))]
    publish_figures("captures", shown)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
