"""Families of jobs with varying work: from a name and a seed to the rows of a run and the truth about it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from simulated_device import windows
from simulated_jobs import random_job, single_faults, total_ns
from varying_work import (
    SEVERAL_STAGES,
    Cause,
    Late,
    Played,
    Stalls,
    Work,
    any_one,
    costing,
    documents,
    experts,
    heavy_tailed,
    in_turn,
    late,
    lognormal,
    on_all,
    play,
    uniform,
)

from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC, PREPARE, STAGES

Rng = np.random.Generator
Job = tuple[Work, Sequence[Cause]]
COMPUTED = (FORWARD, BACKWARD)
QUIET = Work()
UNEVEN = Work(sizes=uniform(0.4, 1.6))


class Family(NamedTuple):
    """A family of jobs. `run` plays the run of a seed. Families of one `group` are counted together."""

    group: str
    run: Callable[[int], Played]


FAMILIES: dict[str, Family] = {}


def run_of(name: str, seed: int) -> Played:
    """Return the run of a family for a seed. It is always the same one."""
    return FAMILIES[name].run(seed)


def _add(group: str, name: str, make: Callable[[Rng], Job]) -> None:
    """Add a family whose jobs are drawn with a random generator."""

    def run(seed: int) -> Played:
        work, causes = make(_generator(name, seed))
        return play(work, causes, seed)

    FAMILIES[name] = Family(group, run)


def _generator(name: str, seed: int) -> Rng:
    return np.random.default_rng((zlib.crc32(name.encode()), seed))


def _healthy(group: str, name: str, work: Work) -> None:
    FAMILIES[name] = Family(group, lambda seed: play(work, (), seed))


def _late(group: str, name: str, work: Work, stages: int | tuple[int, ...], **how: float) -> None:
    """Add a family in which a random rank is late by `ms` ms, or by as much as `costs` a share of the run."""
    share = how.pop("costs", 0.0)

    def run(seed: int) -> Played:
        cause = late(int(_generator(name, seed).integers(work.ranks)), stages, **how)
        return play(work, (costing(share, work, cause, seed) if share else cause,), seed)

    FAMILIES[name] = Family(group, run)


def _two(rng: Rng, ranks: int) -> tuple[int, int]:
    one, other = rng.choice(ranks, 2, replace=False).tolist()
    return one, other


# -- nobody is late ----------------------------------------------------------------------------------

for _ranks in (2, 8, 32):
    _healthy("healthy, quiet", f"quiet, {_ranks} ranks", Work(_ranks))
_healthy("healthy, quiet", "quiet, 512 ranks", Work(512, 150))
_healthy("healthy, quiet", "noise of 8 %, 16 ranks", Work(16, noise=0.08))
_healthy("healthy, quiet", "all ranks alike, lengths drawn anew", Work(sizes=on_all(uniform(0.3, 1.7))))
_healthy(
    "healthy, quiet",
    "all ranks alike, lengths stay for 5 steps",
    Work(sizes=on_all(lognormal(0.4, stay=5)), stay=5),
)
_healthy("healthy, quiet", "garbage collection, 0.3 % of the steps", Work(stalls=Stalls(0.003, 60, 150)))

# Forward takes 5 to 60 ms.
_WIDE = (2.0, 1.0, 0.5, 1.0, 10.0)
for _ranks in (2, 4, 8):
    _healthy(
        "imbalance, drawn anew", f"forward 5-60 ms, {_ranks} ranks",
        Work(_ranks, base_ms=_WIDE, exchange_ms=3.0, sizes=uniform(5, 60), varies=(FORWARD,)),
    )  # fmt: skip
for _pct in (40, 50, 60, 70):
    _healthy(
        "imbalance, drawn anew", f"lengths ±{_pct} %, 16 ranks",
        Work(16, sizes=uniform(1 - _pct / 100, 1 + _pct / 100)),
    )  # fmt: skip
_healthy("imbalance, drawn anew", "lengths lognormal, 8 ranks", Work(sizes=lognormal(0.5)))
_healthy("imbalance, drawn anew", "lengths heavy-tailed, 4 ranks", Work(4, sizes=heavy_tailed(2.2)))
_healthy("imbalance, drawn anew", "lengths heavy-tailed, 32 ranks", Work(32, sizes=heavy_tailed(2.2)))
_healthy("imbalance, drawn anew", "one document in ten four times as long", Work(sizes=documents(0.1, 4)))
_healthy(
    "imbalance, drawn anew", "loading lognormal, 8 ranks",
    Work(base_ms=(6.0, 40.0, 2.0, 30.0, 60.0), sizes=lognormal(0.8), varies=(DATA,)),
)  # fmt: skip
_healthy("imbalance, drawn anew", "garbage collection, 3 % of the steps", Work(stalls=Stalls(0.03, 80, 300)))
_healthy("imbalance, drawn anew", "512 ranks, lengths ±40 %", Work(512, 150, sizes=uniform(0.6, 1.4)))

_healthy("imbalance, in turn", "a fifth micro-batch in turn, 16 ranks", Work(16, sizes=in_turn(0.25)))
_healthy("imbalance, in turn", "a fifth micro-batch in turn, 4 ranks", Work(4, sizes=in_turn(0.25)))
_healthy("imbalance, in turn", "some rank has two more micro-batches", Work(8, sizes=any_one(0.5)))

for _stay, _ranks in ((5, 2), (5, 8), (20, 2), (20, 16), (50, 4), (50, 8)):
    _healthy(
        "imbalance, lengths that stay", f"lengths stay for {_stay} steps, {_ranks} ranks",
        Work(_ranks, 1000, sizes=uniform(0.4, 1.6, stay=_stay), stay=_stay),
    )  # fmt: skip
_healthy(
    "imbalance, lengths that stay", "lognormal lengths stay for 20 steps, 8 ranks",
    Work(8, 1000, sizes=lognormal(0.5, stay=20), stay=20),
)  # fmt: skip
for _ranks in (8, 32):
    _healthy(
        "imbalance, lengths that stay", f"expert load, {_ranks} ranks",
        Work(_ranks, 1000, sizes=experts(0.4, 0.9), stay=19),
    )  # fmt: skip

# -- one rank is late, in quiet work -----------------------------------------------------------------

for _share in (9, 15, 30):
    for _stage in (POST_SYNC, DATA, PREPARE, FORWARD, BACKWARD):
        _ranks = (2, 4, 8, 16, 32)[_stage]
        _late(
            f"constant, {_share} %", f"{STAGES[_stage]} {_share} %, {_ranks} ranks", Work(_ranks, 300),
            _stage, costs=_share / 100,
        )  # fmt: skip
_late("now and then", "one step in 8 stalls, 12 %", QUIET, FORWARD, costs=0.12, every=8)
_late("now and then", "data late in half of the steps", UNEVEN, DATA, costs=0.13, often=0.55)
_late("now and then", "data late in half of the steps, quiet work", Work(steps=800), DATA, ms=60.0, often=0.5)
_late("now and then", "lateness itself is lognormal", QUIET, BACKWARD, costs=0.15, spread=0.8)
_late("now and then", "lateness grows over the run", Work(steps=800), FORWARD, costs=0.15, grows=500)

_ALIKE = (6.0, 4.0, 2.0, 58.0, 62.0)
"""Forward and backward take about equally long: 10 % of either is below 5 % of the step."""
for _ranks, _steps in ((512, 150), (64, 250)):
    _late(
        "forward and backward", f"{_ranks} ranks, 10 % slower in both", Work(_ranks, _steps, base_ms=_ALIKE),
        COMPUTED, times=1.1,
    )  # fmt: skip
_late("forward and backward", "8 ranks, 4 % in each of three stages", QUIET, (DATA, *COMPUTED), costs=0.11)
_late("forward and backward", "16 ranks, 25 % slower in both", Work(16), COMPUTED, times=1.25)


def _both_stages(rng: Rng) -> Job:
    rank = int(rng.integers(8))
    ms = QUIET.costing(0.2) / 2
    cause = Cause((Late((rank,), (DATA,), ms), Late((rank,), (POST_SYNC,), ms)), SEVERAL_STAGES)
    return QUIET, (cause,)


_add("two causes", "data and post_sync of one rank, 20 %", _both_stages)

# -- several ranks -----------------------------------------------------------------------------------

for _slow, _ranks in ((9, 16), (4, 8), (12, 16), (2, 16), (17, 32)):

    def _two_kinds(rng: Rng, slow: int = _slow, ranks: int = _ranks) -> Job:
        slower = rng.choice(ranks, slow, replace=False).tolist()
        return Work(ranks), (late(slower, COMPUTED, times=1.4),)

    _add("two kinds of ranks", f"{_slow} of {_ranks} ranks 40 % slower", _two_kinds)

_PAIR = frozenset({"co_critical", "straggler"})


def _same_size(rng: Rng) -> Job:
    return QUIET, (Cause((Late(_two(rng, 8), (FORWARD,), QUIET.costing(0.15)),), _PAIR),)


def _other_stages(rng: Rng) -> Job:
    one, other = _two(rng, 8)
    ms = QUIET.costing(0.15)
    return QUIET, (Cause((Late((one,), (DATA,), ms), Late((other,), (BACKWARD,), ms)), _PAIR),)


def _alternate(rng: Rng) -> Job:
    one, other = _two(rng, 8)
    ms = QUIET.costing(0.2)
    lates = Late((one,), (DATA,), ms, every=2), Late((other,), (DATA,), ms, every=2, phase=1)
    return QUIET, (Cause(lates, _PAIR),)


_add("two causes", "two ranks late alike, 15 %", _same_size)
_add("two causes", "two ranks in other stages, 15 %", _other_stages)
_add("two causes", "two ranks late alternately, 20 %", _alternate)

# -- a small one beside a large one ------------------------------------------------------------------


def _saves(every: int, ms: float, small_ms: float, work: Work = QUIET) -> Callable[[Rng], Job]:
    def make(rng: Rng) -> Job:
        save = late(0, POST_SYNC, ms=ms, every=every)
        other = int(rng.integers(1, work.ranks))
        return work, (save, late(other, FORWARD, ms=small_ms)) if small_ms else (save,)

    return make


_SHORT = Work(8, 600, base_ms=(3.0, 2.0, 1.0, 16.0, 32.0), exchange_ms=4.0)
_add(
    "checkpoint", "rank 0 saves 0.6 s every 10 steps, another is late by 7 ms", _saves(10, 600.0, 7.5, _SHORT)
)
_add("checkpoint", "rank 0 saves 0.6 s every 10 steps", _saves(10, 600.0, 0.0, _SHORT))
_add("checkpoint", "rank 0 saves 1 s every 50 steps", _saves(50, 1000.0, 0.0, Work(steps=600)))
_add("checkpoint", "rank 0 saves 0.1 s every 10 steps, another is late by 20 %", _saves(10, 100.0, 34.0))

# -- hidden behind the exchange ----------------------------------------------------------------------

_LONG_EXCHANGE = Work(8, 400, exchange_ms=220.0, buckets=25)
_late("hidden", "backward late by 40 ms under a long exchange", _LONG_EXCHANGE, BACKWARD, ms=40.0)
_late("hidden", "the same, by another size each step", _LONG_EXCHANGE, BACKWARD, ms=40.0, spread=0.6)
_late(
    "hidden",
    "backward late by 15 ms, exchange a little longer",
    Work(exchange_ms=95.0, buckets=25),
    BACKWARD,
    ms=15.0,
)
_late("hidden", "forward late by 40 ms before a long exchange", _LONG_EXCHANGE, FORWARD, ms=40.0)

# -- late for a part of the run ----------------------------------------------------------------------

for _last in (10, 20):
    _late(
        "a part of the run", f"late in the last {_last} of 1,000 steps", Work(4, 1000), DATA,
        ms=60.0, first=1000 - _last,
    )  # fmt: skip
_late("a part of the run", "late in the first 300 of 1,000 steps", Work(8, 1000), FORWARD, ms=60.0, end=300)
_late("a part of the run", "late in the first 100 of 1,000 steps", Work(8, 1000), DATA, ms=25.0, end=100)
_late("a part of the run", "late from the middle on", Work(8, 600), BACKWARD, costs=0.12, first=300)
_late(
    "a part of the run", "varying work, late from the middle on", Work(8, 1000, sizes=uniform(0.4, 1.6)),
    DATA, costs=0.12, first=400,
)  # fmt: skip

# -- a fault beside varying work ---------------------------------------------------------------------

for _share in (9, 15, 30):
    _late(
        f"beside varying work, {_share} %", f"lengths ±60 %, 8 ranks, data {_share} %",
        Work(8, 600, sizes=uniform(0.4, 1.6)), DATA, costs=_share / 100,
    )  # fmt: skip
    _late(
        f"beside varying work, {_share} %", f"lengths ±50 %, 2 ranks, forward {_share} %",
        Work(2, 600, sizes=uniform(0.5, 1.5)), FORWARD, costs=_share / 100,
    )  # fmt: skip
    _late(
        f"beside varying work, {_share} %",
        f"lognormal lengths stay for 5 steps, 8 ranks, backward {_share} %",
        Work(8, 1000, sizes=lognormal(0.3, stay=5), stay=5), BACKWARD, costs=_share / 100,
    )  # fmt: skip
    _late(
        f"beside varying work, {_share} %", f"heavy-tailed lengths, 16 ranks, post_sync {_share} %",
        Work(16, 600, sizes=heavy_tailed(2.5)), POST_SYNC, costs=_share / 100,
    )  # fmt: skip
    _late(
        f"beside varying work, {_share} %", f"garbage collection, 8 ranks, forward {_share} %",
        Work(8, 600, stalls=Stalls(0.01, 80, 300)), FORWARD, costs=_share / 100,
    )  # fmt: skip
_late(
    "beside varying work, 30 %", "lengths stay for 20 steps, 8 ranks, data 30 %",
    Work(8, 1000, sizes=uniform(0.6, 1.4, stay=20), stay=20), DATA, costs=0.3,
)  # fmt: skip
_late("beside varying work, 30 %", "expert load, 8 ranks, prepare 30 %",
      Work(8, 1000, sizes=experts(0.3, 0.8), stay=9), PREPARE, costs=0.3)  # fmt: skip
_late("beside varying work, 15 %", "a micro-batch in turn, 4 ranks, backward 15 %",
      Work(4, 600, sizes=in_turn(0.25)), BACKWARD, costs=0.15)  # fmt: skip
_late("beside varying work, 15 %", "lengths ±50 %, 32 ranks, a rank 30 % slower",
      Work(32, 600, sizes=uniform(0.5, 1.5)), COMPUTED, times=1.3)  # fmt: skip

# -- small ones beside varying work: they need no name, but no other rank may have one ---------------

_late("beside varying work, small", "lengths ±60 %, 8 ranks, data late by 12 ms", UNEVEN, DATA, ms=12.0)
_late("beside varying work, small", "heavy-tailed lengths, 16 ranks, post_sync late by 25 ms",
      Work(16, 600, sizes=heavy_tailed(2.5)), POST_SYNC, ms=25.0)  # fmt: skip
_late("beside varying work, small", "lengths stay for 20 steps, 4 ranks, data late by 10 ms",
      Work(4, 1000, sizes=uniform(0.4, 1.6, stay=20), stay=20), DATA, ms=10.0)  # fmt: skip

# -- on a device whose host sets the pace ------------------------------------------------------------


def _host_bound(name: str) -> None:
    """Add a family of simulated host-bound jobs with a fault of 15 or 30 % on a host, or on a device."""

    def run(seed: int) -> Played:
        rng = _generator(name, seed)
        job, ratio = random_job(rng)
        while ratio < _HOST_SETS_THE_PACE or job.ranks > 16:
            job, ratio = random_job(rng)
        faults = [fault for fault in single_faults(job, int(rng.integers(job.ranks))) if fault.where == name]
        fault = faults[int(rng.integers(len(faults)))]
        [slow], [calm] = windows(job, [fault, None], 1, steps=_DEVICE_STEPS, seed=seed)
        return Played(
            window=slow,
            causes=(late(fault.rank, fault.stages, ms=fault.ms),),
            costs=(1 - total_ns(calm) / total_ns(slow),),
            imbalance=None,
            sure=(True,),
        )

    FAMILIES[f"host-bound, a {name} is slower"] = Family("host-bound device rows", run)


_HOST_SETS_THE_PACE = 1.0
_DEVICE_STEPS = 120
for _where in ("host", "device"):
    _host_bound(_where)
