"""What is not the level of a run: loading where no steps are known, and the end of the process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from memory_series import GIB, MIB, at, flat, on_device, on_host

from traceml_ray.signals.memory.judge import judge
from traceml_ray.signals.memory.shapes import Float, Series

N = 120


def loaded(n: int = N, seconds: int = 10, seed: int = 0, *, grows_at: int | None = None) -> Float:
    """1 GiB, loaded over so many seconds, with noise; from `grows_at` on 20 MiB a second more."""
    noise = np.random.default_rng(seed).normal(0, MIB, n)
    level = GIB * np.minimum(1, (np.arange(n) + 1) / seconds) + noise
    return level if grows_at is None else level + 20 * MIB * np.maximum(0, np.arange(n) - grows_at)


def without_steps(rank: int, allocated: Float, **fields: float) -> Series:
    return on_device(rank, allocated, first_step_s=None, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_growth_begins_after_loading_and_not_with_the_end_of_it(seed: int) -> None:
    others = [without_steps(rank, loaded(seed=seed + rank)) for rank in range(3)]
    memory = judge([*others, without_steps(3, loaded(seed=seed, grows_at=60))], expected=4)
    cause = memory.first_cause
    assert cause is not None and (cause.rank, cause.confidence) == (3, "high")
    assert at(cause.at_ns) == pytest.approx(60, abs=4)


def test_rank_that_joins_late_and_loads_for_half_of_its_time_is_not_named() -> None:
    ranks = [without_steps(rank, loaded(200, seed=rank)) for rank in range(2)]
    joined = without_steps(2, loaded(N, 60), start_s=80)
    memory = judge([*ranks, joined], expected=3)
    assert (memory.first_cause, memory.collective_onset, memory.findings) == (None, None, [])


def test_rank_that_grows_from_its_first_sample_on_is_found() -> None:
    ranks = [without_steps(rank, loaded(seed=rank)) for rank in range(2)]
    memory = judge([*ranks, without_steps(2, loaded(grows_at=0))], expected=3)
    assert memory.first_cause is not None and memory.first_cause.rank == 2
    assert "creep" in {finding.kind for finding in memory.findings if finding.rank == 2}


LEAKED = [329, 329, 389, 470, 560, 640, 720, 800, 890]
"""MB, each half second: of a rank that kept 10 MB of each step."""


@pytest.mark.parametrize("end", [[], [490, 330], [890, 120, 80]])
def test_memory_that_a_process_lets_go_of_at_its_end_was_a_leak_all_the_same(end: list[int]) -> None:
    leaked = 1e6 * np.array(LEAKED + end)
    quiet = flat(len(leaked), 0, 0.3 * GIB)
    ranks = [on_host(rank, x, every_s=0.5, step_s=0.06) for rank, x in enumerate((quiet, leaked))]
    last = int(ranks[0].step[len(LEAKED) - 1]) + 5  # the script's last step, which does not end
    memory = judge([replace(series, step=np.minimum(series.step, last)) for series in ranks], expected=2)
    assert memory.first_cause is not None and memory.first_cause.rank == 1
    assert "creep" in {finding.kind for finding in memory.findings if finding.rank == 1}
