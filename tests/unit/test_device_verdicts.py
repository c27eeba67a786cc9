"""The worked cases of rows on a device's clock, and what verdicts over simulated jobs come to."""

from dataclasses import replace

import numpy as np
import pytest
import simulated_device
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import Fault, Job, marks_of, rows_of, windows
from simulated_jobs import (
    COUPLED_DEVICE_BOUND_JOBS,
    COUPLED_HOST_BOUND_JOBS,
    DEVICE_BOUND_JOBS,
    HOST_BOUND,
    HOST_BOUND_JOBS,
    LARGE_DEVICE_BOUND_JOBS,
    LARGE_HOST_BOUND_JOBS,
    OTHER_DEVICE_BOUND_JOBS,
    OTHER_HOST_BOUND_JOBS,
    SummedSteps,
    play,
    several_faults,
    single_faults,
    waiting,
)
from snapshot import Snapshot
from unit.sample_windows import judge

from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC, SYNC_WAIT

PLAIN = Job(slots=75, events_too=False)
"""Host 1/0/3/4/1 ms, device 10/20/4, an exchange of 4; a little more than four steps fit into the queue."""
HOST_PACED = Job(host=(5, 2, 0, 12, 20), device=(2, 0, 0, 6, 12))
BALANCED = [4, 0, 0, 10, 20, 4]
CASES = {
    "C1": (PLAIN, None, BALANCED, BALANCED),
    "C2": (PLAIN, Fault(1, "host", (DATA,), 20), BALANCED, BALANCED),
    "C3": (PLAIN, Fault(1, "host", (DATA,), 45), [4, 15.4, 0, 10.6, 20, 4], [4, 0, 0, 10, 20, 20]),
    "C4": (
        waiting(PLAIN, "end"), Fault(1, "host", (DATA,), 20), [4, 21, 0, 10.6, 20, 4],
        [4, 1, 0, 10.6, 20, 24],
    ),
    "C5": (PLAIN, Fault(1, "device", (BACKWARD,), 12), [4, 0, 0, 10, 32, 4], [4, 0, 0, 10, 20, 16]),
    "C6": (
        waiting(PLAIN, "end"), Fault(1, "host", (FORWARD,), 12), [4, 1, 0, 17, 20, 4],
        [4, 1, 0, 10.6, 20, 10.4],
    ),
    "C7": (
        replace(PLAIN, ranks=4), Fault(1, "device", (POST_SYNC, FORWARD, BACKWARD), times=1.3),
        [5.2, 0, 0, 13, 26, 4], [4, 0, 0, 10, 20, 14.2],
    ),
    "C8": (
        waiting(PLAIN, "loss"), Fault(1, "device", (POST_SYNC,), 9), [13, 0, 0, 10, 20.4, 4],
        [4, 0, 0, 10, 20.4, 13],
    ),
    "C9": (HOST_PACED, Fault(1, "host", (FORWARD,), 10), [2, 0, 0, 23, 20, 4], [2, 0, 0, 6, 12, 29]),
    "C10": (HOST_PACED, Fault(1, "device", (FORWARD,), 10), [2, 0, 0, 18.2, 14.8, 4], [2, 0, 0, 13, 20, 4]),
}  # fmt: skip
VERDICTS = {
    "C1": ("healthy", None, None),
    "C2": ("healthy", None, None),
    "C3": ("straggler", "data", 28.5),
    "C4": ("straggler", "data", 33.6),
    "C5": ("straggler", "backward", 24.0),
    "C6": ("straggler", "forward", 13.9),
    "C7": ("straggler", "backward", 12.4),
    "C8": ("straggler", "post_sync", 19.0),
    "C9": ("straggler", "forward", 18.4),  # 1 of 10 ms is behind the queue of the other, full in forward
    "C10": ("accounting_only", None, None),
}
HOST_MARKS = {
    "C1": [-160, -159, -158, -146, -126, -126],
    "C2": [-160, -139, -139, -136, -126, -126],
    "C3": [-26.6, 19.4, 19.4, 22.4, 26.4, 26.4],
    "C4": [4, 25, 25, 28, 32, 32],
    "C6": [4, 5, 5, 20, 24, 24],
    "C9": [-0.2, 1.8, 1.8, 23.8, 43.8, 43.8],
    "C10": [-0.2, 1.8, 1.8, 13.8, 33.8, 33.8],
}


@pytest.mark.parametrize("case", CASES)
def test_simulated_rows_are_those_of_the_worked_case(case):
    job, fault, late, other = CASES[case]
    [[window]] = windows(job, [fault])
    assert window.d[-1, 1].tolist() == [round(ms * 1_000_000) for ms in late]
    assert window.d[-1, 0].tolist() == [round(ms * 1_000_000) for ms in other]


@pytest.mark.parametrize("case", HOST_MARKS)
def test_simulated_host_makes_its_marks_as_in_the_worked_case(case):
    job, fault, *_ = CASES[case]
    marks = marks_of(job, [fault])
    since_exit = marks.host[-1, :, 0, 1] - marks.device[-2, -1, 0, 1]
    assert since_exit.tolist() == pytest.approx(HOST_MARKS[case], abs=1e-6)


@pytest.mark.parametrize("case", VERDICTS)
def test_worked_case_has_its_verdict(case, snapshot: Snapshot):
    job, fault, *_ = CASES[case]
    [[window]] = windows(job, [fault])
    verdict = judge(window)
    label, stage, gain = VERDICTS[case]
    assert (verdict.label, verdict.stage, verdict.ranks) == (label, stage, (1,) if stage else ())
    assert verdict.gain_pct is None if gain is None else verdict.gain_pct == pytest.approx(gain, abs=0.05)
    snapshot("verdict", f"{verdict.why}\n{verdict.next}")


def test_fault_in_the_stage_in_which_the_queues_of_the_others_are_full_names_no_rank():
    [[window]] = windows(replace(HOST_PACED, slots=75, events_too=False), [CASES["C9"][1]])
    assert np.median(window.host[:, 0, FORWARD]) == 22e6  # like that of the late rank, though its own is 12
    verdict = judge(window)
    assert (verdict.label, verdict.rank) == ("accounting_only", None)


def test_fault_on_the_hosts_clock_alone_blames_nobody_or_the_wrong_rank():
    [[window]] = windows(*CASES["C5"][:1], [CASES["C5"][1]])
    verdict = judge(replace(window, d=window.host, host=None, leads=None))
    assert (verdict.rank, verdict.stage) != (1, "backward")


def test_device_bound_jobs_without_a_fault_are_healthy():
    totals = SummedSteps()
    for number, job in enumerate((DEVICE_BOUND_JOBS | OTHER_DEVICE_BOUND_JOBS).values()):
        for ranks, seeds in ((2, 24), (8, 14), (32, 6)):
            for device, host, tails in ((0.02, 0.05, 0), (0.10, 0.10, 0), (0.10, 0.20, 0.002)):
                noisy = replace(job, ranks=ranks, device_noise=device, host_noise=host, tails=tails)
                play(totals, noisy, [None], seeds, number)
    assert totals.windows >= 1000
    # Where noise is largest, unequal times cost a little more than a tenth: that is no rank's.
    assert totals.labels["healthy"] + totals.labels["imbalance"] == totals.windows
    assert totals.labels["imbalance"] <= 0.02 * totals.windows


def test_host_bound_jobs_without_a_fault_name_no_rank():
    totals = SummedSteps()
    for number, job in enumerate((HOST_BOUND_JOBS | OTHER_HOST_BOUND_JOBS).values()):
        for ranks, seeds in ((2, 28), (8, 16)):
            for device, host in ((0.02, 0.05), (0.10, 0.10)):
                noisy = replace(job, ranks=ranks, device_noise=device, host_noise=host)
                play(totals, noisy, [None], seeds, number)
    assert totals.windows >= 600
    named = totals.windows - totals.labels["healthy"] - totals.labels["accounting_only"]
    assert named <= 0.01 * totals.windows, totals.notes


def test_device_bound_jobs_with_a_fault_have_their_rank_and_stage():
    totals = SummedSteps()
    for number, job in enumerate((DEVICE_BOUND_JOBS | OTHER_DEVICE_BOUND_JOBS).values()):
        for ranks in (2, 8):
            here = replace(job, ranks=ranks)
            play(totals, here, [*single_faults(here, ranks - 1), *several_faults(ranks - 1)], 1, number)
    assert totals.costs >= 150
    assert (totals.rank, totals.stage, totals.wrong, totals.free_named) == (totals.costs, totals.costs, 0, 0)


def test_host_bound_jobs_with_a_fault_have_their_rank_or_no_verdict():
    totals = SummedSteps()
    for number, job in enumerate((HOST_BOUND_JOBS | OTHER_HOST_BOUND_JOBS).values()):
        for ranks in (2, 8):
            here = replace(job, ranks=ranks)
            play(totals, here, single_faults(here, ranks - 1), 1, number)
    assert totals.costs >= 125
    assert totals.wrong == 0, totals.notes
    assert totals.rank >= 0.75 * totals.costs
    assert totals.rank + totals.abstains >= 0.99 * totals.costs, totals.notes


def test_rows_of_devices_without_their_leads_name_no_rank():
    job, fault, *_ = CASES["C5"]
    [[window]] = windows(job, [fault])
    verdict = judge(replace(window, leads=None))
    assert (verdict.label, verdict.rank) == ("accounting_only", None)
    unknown = np.full_like(window.leads, 255)
    assert judge(replace(window, leads=unknown)).label == "accounting_only"


def test_window_of_devices_keeps_its_hosts_when_cut():
    [[window]] = windows(replace(PLAIN, ranks=4), [None])
    part = window.last(20)
    assert part.host.shape == part.d.shape == (20, 4, 6)
    assert part.leads.shape == (20, 4, 3)
    of_two = replace(window, groups=((0, 2), (0, 2), (2, 2), (2, 2))).by_group()[1]
    assert (of_two.host == window.host[:, 2:]).all()
    assert (of_two.leads == window.leads[:, 2:]).all()


@pytest.mark.parametrize(
    "jobs", [COUPLED_DEVICE_BOUND_JOBS, COUPLED_HOST_BOUND_JOBS], ids=["device-bound", "host-bound"]
)
def test_jobs_with_several_exchanges_a_step_have_their_rank_and_are_healthy_without_a_fault(jobs):
    faulty, healthy = SummedSteps(), SummedSteps()
    for number, job in enumerate(jobs.values()):
        here = replace(job, ranks=4)
        play(faulty, here, single_faults(here, 3), 1, number)
        play(healthy, here, [None], 6, number)
    bound = jobs is COUPLED_HOST_BOUND_JOBS
    assert healthy.labels["healthy"] + bound * healthy.labels["accounting_only"] == healthy.windows
    assert faulty.wrong == faulty.healthy == 0
    least = (0.85 if bound else 1) * faulty.costs
    assert faulty.rank == faulty.stage >= least > 0


def test_large_step_of_which_the_launch_queue_holds_little_is_judged_as_any_other():
    totals = SummedSteps()
    for number, job in enumerate(LARGE_DEVICE_BOUND_JOBS.values()):
        here = replace(job, ranks=4)
        play(totals, here, [*single_faults(here, 3, (0.2,)), *several_faults(3)], 1, number)
    slow = Fault(3, "device", (FORWARD,), 7)
    for [window] in windows(replace(LARGE_DEVICE_BOUND_JOBS["large step"], ranks=4), [None, slow]):
        assert not judge(window).host_bound
    assert (totals.rank, totals.wrong, totals.free_named) == (totals.costs, 0, 0)
    for number, job in enumerate(LARGE_HOST_BOUND_JOBS.values()):
        here = replace(job, ranks=4)
        play(totals, here, single_faults(here, 3, (0.2,)), 1, number)
        assert judge(windows(here)[0][0]).label == "healthy"
    assert totals.rank + totals.abstains == totals.costs >= 45
    assert totals.wrong == 0


def test_rank_whose_host_has_lost_its_lead_in_one_stall_is_not_named():
    job = Job(
        host=(2.646, 1.364, 0.03, 14.52, 9.382), device=(1.917, 0, 0.324, 2.604, 16.901),
        kernels=(4, 0, 1, 7, 10), exchange_ms=1.178, ranks=8, slots=44, events_too=False, contention=0.116,
        device_noise=0.0382, host_noise=0.0521, tails=0.002, spread=0.0019, launch_ms=0.0054,
    )  # fmt: skip
    [healthy], totals = windows(job, seeds=6, seed=90_143), SummedSteps()
    play(totals, job, [Fault(7, "device", (stage,), 4.191) for stage in (FORWARD, POST_SYNC)], 1, 90_043)
    assert {judge(window).label for window in healthy} == {"healthy"}
    assert totals.wrong == 0


@pytest.mark.parametrize(("where", "stage"), [("device", BACKWARD), ("host", FORWARD)])
def test_fault_of_a_sharded_job_whose_hosts_wait_for_their_devices_is_named(where, stage):
    job = Job(
        host=(6.556, 1.572, 1.704, 10.798, 7.947), device=(3.948, 0, 0.779, 12.67, 29.432),
        kernels=(4, 0, 1, 15, 8), exchange_ms=14.8525, buckets=4, slots=35,
        waits=frozenset({"loss", "scaler"}), contention=0.0099, device_noise=0.0959, host_noise=0.0698,
        tails=0.002, spread=0.0038, launch_ms=0.0055, layers=5,
    )  # fmt: skip
    totals = SummedSteps()
    play(totals, job, [Fault(0, where, (stage,), ms) for ms in (9.25, 18.5)], 1, 90_090)
    assert totals.rank == totals.stage == totals.costs == 2


def test_rank_is_not_found_healthy_where_the_queues_of_its_peers_are_full_in_its_stage():
    job = replace(HOST_BOUND, kernels=(20, 0, 1, 80, 160), slots=20, ranks=4)
    [[window]] = windows(job, [Fault(3, "host", (POST_SYNC,), 12)])
    assert judge(window).label == "accounting_only"


def test_device_that_is_a_large_kernel_behind_its_host_is_not_slow():
    job = Job(
        host=(1.577, 1.431, 0.016, 9.801, 7.999), device=(0.952, 0, 0.012, 4.662, 11.031),
        kernels=(1, 0, 1, 3, 16), exchange_ms=6.17, buckets=4, ranks=16, slots=27, events_too=False,
        contention=0.14, device_noise=0.046, host_noise=0.107, spread=0.0013, memory=0.5, launch_ms=0.005,
    )  # fmt: skip
    totals = SummedSteps()
    play(totals, job, [None], 6, 1)
    assert totals.labels == {"healthy": 6}


SHARDED = Job(
    host=(11.137, 10.424, 0.481, 42.526, 30.946), device=(6.646, 0, 0.594, 20.412, 46.493),
    kernels=(4, 0, 1, 3, 18), exchange_ms=2.795, buckets=2, ranks=6, slots=173, contention=0.2,
    device_noise=0.0715, host_noise=0.139, spread=0.0031, launch_ms=0.0064, layers=3, sampled=2,
)  # fmt: skip
HELD_AT_THE_END = Job(
    host=(40.672, 7.06, 1.866, 47.797, 62.393), device=(4.834, 0, 0.303, 55.444, 41.097),
    kernels=(9, 0, 2, 18, 38), exchange_ms=37.716, buckets=3, ranks=8, slots=207, events_too=False,
    waits=frozenset({"end"}), micro=3, contention=0.1068, device_noise=0.0599, host_noise=0.0303,
    spread=0.0073, memory=0.6, launch_ms=0.0075,
)  # fmt: skip


def test_host_that_is_last_by_chance_names_no_rank_though_its_lead_is_a_large_kernel():
    totals = SummedSteps()
    play(totals, SHARDED, [None], 8, 2)
    assert totals.labels == {"healthy": 8}, totals.notes


def test_host_that_is_last_by_chance_names_no_rank_where_a_stage_is_one_kernel():
    job = Job(
        host=(10.607, 0.245, 0.086, 21.167, 28.577), device=(8.683, 0, 0.359, 16.029, 23.087),
        kernels=(1, 0, 1, 4, 11), exchange_ms=3.797, buckets=4, ranks=3, slots=612, micro=2, contention=0.134,
        device_noise=0.037, host_noise=0.127, spread=0.01, launch_ms=0.004, syncs=2,
    )  # fmt: skip
    totals = SummedSteps()
    play(totals, job, [None], 6, 310_138)
    assert totals.labels == {"healthy": 6}, totals.notes


def test_lateness_that_wanders_names_no_rank_where_hosts_wait_for_their_devices():
    totals = SummedSteps()
    play(totals, HELD_AT_THE_END, [None], 8, 210_127)
    assert totals.labels["healthy"] + totals.labels["accounting_only"] == 8, totals.notes


def test_stage_that_begins_with_a_lead_and_ends_without_names_no_rank_of_a_healthy_job():
    job = Job(
        host=(8.095, 2.135, 15.252, 21.961, 17.931), device=(4.918, 0, 0.441, 15.854, 26.066),
        kernels=(9, 0, 2, 18, 21), exchange_ms=6.32, buckets=8, ranks=16, slots=328,
        waits=frozenset({"loss"}), micro=3, contention=0.13, device_noise=0.004, host_noise=0.015,
        spread=0.0034, memory=0.6, launch_ms=0.005,
    )  # fmt: skip
    totals = SummedSteps()
    play(totals, job, [None], 6, 1)
    assert totals.labels["healthy"] + totals.labels["accounting_only"] == 6


@pytest.mark.parametrize("stage", [FORWARD, POST_SYNC])
def test_fault_of_which_kernels_of_waiting_ranks_hide_a_part_is_named(stage):
    job = Job(
        host=(2.396, 0.55, 0.286, 5.103, 6.677), device=(4.874, 0, 0.252, 15.318, 14.636),
        kernels=(4, 0, 1, 14, 21), exchange_ms=2.32, buckets=4, ranks=8, slots=30, events_too=False,
        waits=frozenset({"scaler"}), contention=0.23, device_noise=0.052, host_noise=0.147, spread=0.0056,
        memory=0.5, launch_ms=0.005,
    )  # fmt: skip
    totals = SummedSteps()
    play(totals, job, [Fault(0, "device", (stage,), 5.61)], 1, 1)
    assert (totals.costs, totals.rank, totals.stage) == (1, 1, 1)


def test_abstention_from_rows_on_a_devices_clock_is_one():
    [[window]] = windows(replace(PLAIN, ranks=2), [None])
    d = window.d.copy()
    d[::2, 0, FORWARD] += 50_000_000
    d[1::2, 1, FORWARD] += 50_000_000
    d[:, 0, BACKWARD] += 6_000_000
    d[:, 1, SYNC_WAIT] += 6_000_000
    verdict = judge(replace(window, d=d))
    assert (verdict.label, verdict.rank) == ("accounting_only", None)


JOBS = st.builds(
    Job,
    exchange_ms=st.floats(0, 20),
    buckets=st.integers(1, 4),
    ranks=st.integers(1, 4),
    slots=st.integers(1, 100),
    events_too=st.booleans(),
    waits=st.frozensets(st.sampled_from(["loss", "end", "scaler", "copy"])),
    device_noise=st.sampled_from([0.0, 0.1]),
    host_noise=st.sampled_from([0.0, 0.1]),
    tails=st.sampled_from([0.0, 0.05]),
)
SHAPES = st.sampled_from([(1, 1, 0), (3, 1, 0), (4, 2, 0), (2, 2, 0), (1, 1, 3), (2, 2, 2)])


@settings(max_examples=25, deadline=None)
@given(JOBS, SHAPES, st.integers(0, 99))
def test_simulated_times_partition_rows_and_no_collective_ends_before_its_last_rank_begins_it(
    job, shape, seed
):
    micro, syncs, layers = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_device, "WARM", 3)
        marks = marks_of(replace(job, micro=micro, syncs=syncs, layers=layers), seeds=2, steps=3, seed=seed)
    d, host, _ = rows_of(marks)
    for rows, times in ((d, marks.device), (host, marks.host)):
        assert rows.min() >= 0
        exits = np.rint(times[:, -1] * 1e6).astype(np.int64).transpose(1, 0, 2)
        assert (rows.sum(axis=3) == np.diff(exits, axis=1)).all()
    last = marks.device[:, -2].max(axis=2)  # when the last rank has all of its gradients
    assert (marks.device[:, -1] >= last[:, :, None] - 1e-9).all()
    waits = [index for index, stage in enumerate(marks.stages[:-1]) if stage == SYNC_WAIT]
    for index in waits[:layers]:  # nor are a layer's parameters there before the last host has asked for them
        assert (marks.device[:, index] >= marks.host[:, index - 1].max(axis=2)[:, :, None] - 1e-9).all()
