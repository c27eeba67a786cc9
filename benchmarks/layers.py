"""
What deep mode costs: the example's GPT with layers measured, compared with the same loop without.

    python benchmarks/layers.py [--quick] [--markdown]

Blocks of steps with and without deep mode alternate in random order. They are measured in CPU time, which
depends less on other processes; the median of the pairs counts. The cost that the sampler reports about
itself is printed next to it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import timeit
from typing import Any

from figures import Figure, machine, publish_figures, table
from overhead import gpt_training, medians, middle, settle_down

from traceml_ray.agent.device_use import DeviceUse
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch.layer_calls import LayerCalls
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.signals.layers.agent import LayerSampler

BLOCK = 32
"""Number of steps in a block. One step in 16 is measured, so two per block."""
BUDGET = "≤ 3 %"


class Rank:
    """The patches and the sampler of a rank, without an agent."""

    def __init__(self, model: Any) -> None:
        self.recorder = Recorder(StepRing(4 * BLOCK))
        self.patches = Instrumentation(self.recorder, Patcher(debug=True))
        self.patches.install()
        self.patches.roots.add(model)
        ring = self.recorder.steps.rows.ring
        self.sampler = LayerSampler(self.patches, DeviceUse("0", self.patches, ring), always=False)
        self._ring = ring

    def deep(self, on: bool) -> None:
        """Begin to measure layers, or restore everything."""
        self.sampler._always = on
        self.turn()

    def turn(self) -> list[Any]:
        """Do the periodic work of the agent's thread."""
        self.recorder.replay()
        self._ring.drain(4 * BLOCK)
        return self.sampler.collect()


def measure(quick: bool) -> list[Figure]:
    """Measure the time added to a step, and the cost that the sampler reports."""
    training = gpt_training()
    rank = Rank(training.model)
    training.run(4)
    rank.turn()
    ratios, bare, reported, every = [], [], [], []
    for _ in range(6 if quick else 150):
        taken = {}
        for on in random.sample((True, False), 2):
            rank.deep(on)
            settle_down(training)
            seconds = 0.0
            for _ in range(4):
                began = time.process_time()
                training.run(BLOCK // 4)
                seconds += time.process_time() - began
                rank.turn()
            taken[on] = seconds
            if on:
                every.append(rank.sampler.every)
                (window,) = rank.sampler.collect(final=True) or [None]
                if window is not None:
                    reported.append(100 * window.cost_ns / window.spent_ns)
        ratios.append(100 * (taken[True] / taken[False] - 1))
        bare.append(taken[False] / BLOCK)
    rank.deep(False)
    rank.patches.remove()
    share = middle(medians(ratios))
    return [
        Figure("layers", "step without deep mode", f"{statistics.median(bare) * 1e3:.1f} ms"),
        Figure("layers", "layers of the model", f"{len(rank.sampler._table.layers)}"),  # type: ignore[union-attr]
        Figure("layers", "one step measured in", f"{statistics.median(every):g}"),
        Figure("layers", f"added, median of {len(ratios)} pairs", f"{share.value:+.2f} %", BUDGET),
        Figure("layers", "its 95 % interval", f"{share.low:+.2f} … {share.high:+.2f} %"),
        Figure("layers", "what it says of its own cost", f"{statistics.median(reported):.2f} %", BUDGET),
    ]


def measure_idle(quick: bool) -> list[Figure]:
    """Measure the call of a module in a step in which layers are not measured."""
    import torch

    module, x = torch.nn.Identity(), torch.zeros(())
    number, pairs = 20_000, 5 if quick else 41
    spent: dict[bool, list[float]] = {True: [], False: []}
    for wrapped in [True, False] * pairs:
        patcher = Patcher(debug=True)
        if wrapped:
            LayerCalls(patcher.failed, int).install(patcher)
        timeit.timeit(lambda: module(x), number=1000)
        spent[wrapped].append(1e9 * timeit.timeit(lambda: module(x), number=number) / number)
        patcher.restore()
    added = statistics.median(one - two for one, two in zip(spent[True], spent[False], strict=True))
    return [
        Figure("layers", "a call of a module in a step that is not measured", f"{added:+.0f} ns", "≤ 300 ns")
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a short run of one minute, as a check of the benchmark"
    )
    parser.add_argument("--markdown", action="store_true", help="print the section for RESULTS.md")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    where = machine()
    print("measuring layers …", file=sys.stderr, flush=True)
    figures = [*measure(args.quick), *measure_idle(args.quick)]
    print(where, table(figures, args.markdown), sep="\n\n")
    publish_figures("layers", figures, budgeted=True)


if __name__ == "__main__":
    main()
