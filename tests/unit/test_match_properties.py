"""Random jobs of several groups: a planted mismatch is named, healthy work never is."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_collectives import OPS, Simulated, Step, program

from traceml_ray.signals.collectives.calls import ProcessGroup
from traceml_ray.signals.collectives.match import STATED, match

GROUPS = [
    ProcessGroup("0", "default_pg", tuple(range(6))),
    ProcessGroup("1", "mesh_dp", (0, 2, 4)),
    ProcessGroup("2", "mesh_dp", (1, 3, 5)),
    ProcessGroup("3", "mesh_tp", (0, 1)),
    ProcessGroup("4", "mesh_tp", (2, 3)),
    ProcessGroup("5", "mesh_tp", (4, 5)),
]
WORLD = 6


def _programs(choice: random.Random, length: int) -> list[list[Step]]:
    """Return the programs of a healthy job: each rank makes the calls of its groups, in one order."""
    whole = program(GROUPS, length, choice)
    members = {group.name: group.ranks or () for group in GROUPS}
    return [[step for step in whole if rank in members[step.group]] for rank in range(WORLD)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    length=st.integers(0, 40),
    ahead=st.sampled_from([1, 1, 3]),
    known=st.booleans(),
)
def test_healthy_work_is_never_named(seed: int, length: int, ahead: int, known: bool) -> None:
    """Ranks are looked at one after the other, while they go on; rings hold different parts."""
    choice = random.Random(seed)
    job = Simulated(GROUPS, _programs(choice, length), ahead)
    job.run(choice, choice.randint(0, length * 3))
    reports = []
    for rank in choice.sample(range(WORLD), WORLD):
        newest = choice.choice([None, None, choice.randint(0, 12)])
        reports.append(job.seen(rank, newest=newest, known=known))
        job.run(choice, choice.randint(0, 6))
    mismatch = match(reports)
    assert mismatch is None or mismatch.kind in {*STATED, "no_answer"}, mismatch
    mismatch = match(reports, hang=True)
    assert mismatch is None or not mismatch.proven, mismatch


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    kind=st.sampled_from(["operation", "size", "dtype"]),
    known=st.booleans(),
    data=st.data(),
)
def test_a_planted_difference_is_named(seed: int, kind: str, known: bool, data: st.DataObject) -> None:
    choice = random.Random(seed)
    programs = _programs(choice, 30)
    rank = choice.randrange(WORLD)
    large = [i for i, step in enumerate(programs[rank]) if step.group < "3"]
    if kind in ("size", "dtype"):  # a barrier has no data, and half as many elements move as many bytes
        large = [i for i in large if programs[rank][i].op in ("all_reduce", "reduce_scatter")]
    if not large:
        return
    index = data.draw(st.sampled_from(large))
    step = programs[rank][index]
    changed = {
        "operation": step._replace(op=choice.choice([op for op in OPS if op != step.op])),
        "size": step._replace(size=step.size + 1),
        "dtype": step._replace(dtype="Half" if step.dtype == "Float" else "Float"),
    }[kind]
    programs[rank] = [*programs[rank][:index], changed, *programs[rank][index + 1 :]]
    job = Simulated(GROUPS, programs)
    job.run(choice)
    mismatch = match([job.seen(one, known=known) for one in range(WORLD)])
    assert mismatch is not None
    assert (mismatch.kind, mismatch.ranks, mismatch.group) == (kind, (rank,), step.group)
    assert mismatch.proven
    assert mismatch.where == f"train (train.py:{step.line})"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), known=st.booleans(), data=st.data())
def test_a_rank_that_stops_is_named(seed: int, known: bool, data: st.DataObject) -> None:
    choice = random.Random(seed)
    programs = _programs(choice, 30)
    rank = choice.randrange(WORLD)
    large = [i for i, step in enumerate(programs[rank]) if step.group < "3"]
    if not large:
        return
    index = data.draw(st.sampled_from(large))
    programs[rank] = programs[rank][:index]
    job = Simulated(GROUPS, programs)
    job.run(choice)
    reports = [job.seen(one, known=known) for one in range(WORLD)]
    late = match(reports)
    mismatch = match(reports, hang=True)
    assert mismatch is not None
    if known:
        assert late is not None
        assert (late.kind, late.ranks, late.proven) == ("late", (rank,), False)
        assert (mismatch.kind, mismatch.ranks) == ("missing", (rank,))
    else:  # the rank may be the only one that is not known to be in a group
        assert (mismatch.kind, mismatch.ranks) in (("missing", (rank,)), ("no_answer", ()))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_a_rank_that_skips_a_call_is_named(seed: int, data: st.DataObject) -> None:
    """In one group of six, with calls from three lines: the others wait in the end, or call another one."""
    choice = random.Random(seed)
    loop = [Step("0", choice.choice(["all_reduce", "all_gather"]), 4, "Float", line) for line in (10, 11, 12)]
    steps = loop * 4
    rank, index = choice.randrange(WORLD), data.draw(st.integers(1, 9))
    programs = [steps if one != rank else [*steps[:index], *steps[index + 1 :]] for one in range(WORLD)]
    job = Simulated(GROUPS[:1], programs)
    job.run(choice)
    mismatch = match([job.seen(one) for one in range(WORLD)], hang=True)
    assert mismatch is not None
    assert mismatch.ranks == (rank,)
    if mismatch.kind == "behind":
        assert (
            f"skipped call {index + 1}: {steps[index].op} at train (train.py:{steps[index].line})"
            in mismatch.why
        )
    else:
        assert mismatch.kind == "operation"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), known=st.booleans())
def test_two_groups_in_another_order_are_a_proven_circle(seed: int, known: bool) -> None:
    choice = random.Random(seed)
    programs = _programs(choice, choice.randint(0, 12))
    rank = choice.randrange(WORLD)
    line = 70
    world = Step("0", "all_reduce", 4, "Float", line)
    pair = next(group for group in GROUPS[3:] if rank in (group.ranks or ()))
    partial = Step(pair.name, "all_gather", 4, "Float", line + 1)
    for one in range(WORLD):
        ends = [world, partial] if one in (pair.ranks or ()) else [world]
        programs[one] = [*programs[one], *(ends[::-1] if one == rank else ends)]
    job = Simulated(GROUPS, programs)
    job.run(choice)
    mismatch = match([job.seen(one, known=known) for one in range(WORLD)])
    assert mismatch is not None
    assert (mismatch.kind, mismatch.ranks, mismatch.proven) == ("order", (rank,), True)
    assert mismatch.where == f"train (train.py:{line + 1})"
