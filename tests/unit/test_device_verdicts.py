"""The worked cases of rows on a device's clock, and what verdicts over simulated jobs come to."""

from dataclasses import replace

import numpy as np
import pytest
from simulated_device import Fault, Job, marks_of, windows
from simulated_jobs import (
    DEVICE_BOUND_JOBS,
    HOST_BOUND_JOBS,
    OTHER_DEVICE_BOUND_JOBS,
    OTHER_HOST_BOUND_JOBS,
    Tally,
    play,
    several_faults,
    single_faults,
    waiting,
)
from snapshot import Snapshot
from unit.sample_windows import judge

from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC

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
    tally = Tally()
    for number, job in enumerate((DEVICE_BOUND_JOBS | OTHER_DEVICE_BOUND_JOBS).values()):
        for ranks, seeds in ((2, 18), (8, 10), (32, 5)):
            for device, host in ((0.02, 0.05), (0.05, 0.10), (0.10, 0.10), (0.10, 0.20)):
                noisy = replace(job, ranks=ranks, device_noise=device, host_noise=host, tails=0.002)
                play(tally, noisy, [None], seeds, number)
    assert tally.windows >= 1000
    assert tally.labels == {"healthy": tally.windows}


def test_host_bound_jobs_without_a_fault_name_no_rank():
    tally = Tally()
    for number, job in enumerate((HOST_BOUND_JOBS | OTHER_HOST_BOUND_JOBS).values()):
        for ranks, seeds in ((2, 20), (8, 10)):
            for device, host in ((0.02, 0.05), (0.05, 0.10), (0.10, 0.10)):
                noisy = replace(job, ranks=ranks, device_noise=device, host_noise=host)
                play(tally, noisy, [None], seeds, number)
    assert tally.windows >= 600
    named = tally.windows - tally.labels["healthy"] - tally.labels["accounting_only"]
    assert named <= 0.01 * tally.windows, tally.notes


def test_device_bound_jobs_with_a_fault_have_their_rank_and_stage():
    tally = Tally()
    for number, job in enumerate((DEVICE_BOUND_JOBS | OTHER_DEVICE_BOUND_JOBS).values()):
        for ranks in (2, 8):
            here = replace(job, ranks=ranks)
            play(tally, here, [*single_faults(here, ranks - 1), *several_faults(ranks - 1)], 1, number)
    assert tally.costs >= 150
    assert (tally.rank, tally.stage, tally.wrong, tally.free_named) == (tally.costs, tally.costs, 0, 0)


def test_host_bound_jobs_with_a_fault_have_their_rank_or_no_verdict():
    tally = Tally()
    for number, job in enumerate((HOST_BOUND_JOBS | OTHER_HOST_BOUND_JOBS).values()):
        for ranks in (2, 8):
            here = replace(job, ranks=ranks)
            play(tally, here, single_faults(here, ranks - 1), 2, number)
    assert tally.costs >= 250
    assert tally.wrong == 0, tally.notes
    assert tally.rank >= 0.75 * tally.costs
    assert tally.rank + tally.abstains >= 0.99 * tally.costs, tally.notes


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
