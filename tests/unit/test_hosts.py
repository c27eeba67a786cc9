"""What the hosts' part of a window of device rows says."""

from dataclasses import replace

import numpy as np
import pytest
from simulated_device import Fault, Job, windows
from simulated_jobs import DEVICE_BOUND_JOBS, HOST_BOUND, HOST_BOUND_JOBS

from traceml_ray.analysis.busy import idle_ns
from traceml_ray.analysis.evidence import gather
from traceml_ray.analysis.hosts import Hosts, following, held, merged_leads
from traceml_ray.analysis.hosts import hosts_of as hosts_of_segments
from traceml_ray.analysis.window import Window
from traceml_ray.stages import BACKWARD, DATA, FLAG_NO_DATA, FORWARD, POST_SYNC, PREPARE

MS = 1_000_000


def leads(rows: int, ranks: int, late: int = 0, full: int = 0, sure: int = 0) -> np.ndarray:
    return np.tile(np.array([late, full, sure], np.uint8), (rows, ranks, 1))


def hosts_of(host: np.ndarray | None, leads: np.ndarray | None) -> Hosts | None:
    return hosts_of_segments(host, leads, np.zeros(50, np.int64))


def hosts(rows: int = 50, ranks: int = 4) -> np.ndarray:
    return np.tile(np.array([5, 2, 1, 12, 20, 0]) * MS, (rows, ranks, 1))


def test_hosts_without_their_part_are_none():
    assert hosts_of(None, leads(50, 2)) is None
    assert hosts_of(hosts(), None) is None


def test_hosts_of_a_rank_with_unknown_leads_are_none_and_single_rows_count_for_nothing():
    some = leads(50, 4, sure=63)
    some[:10] = 255
    assert hosts_of(hosts(), some).late_share.max() == 0
    some[:25, 1] = 255
    assert hosts_of(hosts(), some) is None


def test_stage_is_certain_where_hosts_left_it_before_their_devices_began():
    bits = leads(50, 4)
    bits[:10, :2, 2] = 1 << BACKWARD
    assert hosts_of(hosts(), bits).certain.tolist() == [False] * 4 + [True, False]
    bits[:10, 1, 1] = 1 << BACKWARD  # the launch queue was full
    assert not hosts_of(hosts(), bits).certain.any()


def test_pace_is_that_of_hosts_whose_devices_wait_for_them():
    h, bits = hosts(), leads(50, 4, sure=63)
    h[:, 1:, BACKWARD] += 12 * MS  # their launch queues are full in backward, which no mark shows
    assert not hosts_of(h, bits).floor_ns.any()
    bits[:, 0] = (63, 0, 0)
    pace = hosts_of(h, bits)
    assert (pace.ref == h[0, 0]).all()
    assert (pace.floor_ns == 40 * MS).all()


def test_hosts_are_held_where_their_steps_are_their_devices():
    [free], [blocked] = windows(
        replace(HOST_BOUND_JOBS["host-bound"], ranks=4), [None, Fault(1, "host", (DATA,), 12)]
    )
    for window, stage in ((free, None), (blocked, POST_SYNC)):
        assert held(window.host, window.d, gather(window).hosts) == stage


def test_hosts_of_a_long_window_are_held_by_its_newest_rows():
    job, fault = replace(HOST_BOUND_JOBS["host-bound"], ranks=4), Fault(1, "host", (DATA,), 12)
    [free], [blocked] = windows(job, [None, fault], steps=200)
    host, d = (
        np.concatenate([getattr(blocked, name)[:100], getattr(free, name)[:100]]) for name in ("host", "d")
    )
    assert held(host[:100], d[:100], gather(blocked).hosts) == POST_SYNC
    assert held(host, d, gather(free).hosts) is None


def idle_share(window: Window) -> np.ndarray:
    idle, known = idle_ns(window).sum(axis=0).T
    return idle / known


def test_idle_share_of_a_device_bound_job_is_none():
    [[window]] = windows(replace(DEVICE_BOUND_JOBS["8 steps ahead"], ranks=4), [None])
    assert idle_share(window).max() < 0.01


def test_idle_time_is_not_known_where_the_lead_is_not():
    [[window]] = windows(replace(HOST_BOUND.holding(8), ranks=4), [None])
    leads = window.leads.copy()
    leads[:20] = 255
    times = idle_ns(replace(window, leads=leads))
    assert not times[:20].any()
    assert (times[20:] == idle_ns(window)[20:]).all()


def test_idle_share_is_largest_on_the_rank_whose_device_waits_for_its_host():
    [[window]] = windows(replace(HOST_BOUND.holding(8), ranks=4), [Fault(3, "host", (DATA,), 15)])
    share = idle_share(window)
    assert share.argmax() == 3
    assert share[3] == pytest.approx(1 - 25 / 55, abs=0.1)


def test_idle_share_of_c4_is_its_data_wait():
    [[window]] = windows(Job(waits=frozenset({"end"})), [Fault(1, "host", (DATA,), 20)])
    assert idle_share(window)[1] == pytest.approx(21 / 59.6, abs=0.01)


def test_merged_stages_are_late_if_one_is_and_sure_if_all_are():
    bits = leads(2, 1, late=1 << DATA, full=1 << PREPARE, sure=1 << POST_SYNC | 1 << DATA)
    merged = merged_leads(bits, [(np.array([True, False]), (POST_SYNC, DATA, PREPARE))])
    assert [int(bits) & 1 for bits in merged[0, 0]] == [1, 1, 0]
    assert (merged[1] == bits[1]).all()


def test_rows_with_a_missing_mark_keep_their_hosts_time():
    [[window]] = windows(replace(HOST_BOUND.holding(8), ranks=4), [None])
    flags = window.flags.copy()
    flags[:, 0] |= FLAG_NO_DATA
    evidence = gather(replace(window, flags=flags))
    rows = evidence.rows
    assert (rows.host.sum(axis=2) == window.host.sum(axis=2)).all()
    assert not rows.host[:, :, DATA].any()
    assert evidence.hosts is not None


def followed(lead: float, *, host_waits: bool = False, peers_wait: bool = False) -> tuple[bool, bool]:
    """Return what `following` makes of rank 0 of three, whose lead falls in `forward` from `lead` to 5 ms."""
    noise = np.random.default_rng(1)
    works = noise.normal(40, 2, (50, 3)) * MS
    falls = noise.normal(lead - 5, 3, (50, 3)) * MS
    host, d = np.zeros((2, 50, 3, 6), np.int64)
    host[:, :, FORWARD], d[:, :, FORWARD] = works, works - falls
    late = [0] if host_waits else []
    late += [1, 2] if peers_wait else []
    host[:, late, FORWARD], d[:, late, FORWARD] = (works + falls)[:, late], works[:, late]
    stage = np.zeros((3, 6), bool)
    stage[0, FORWARD] = True
    unsure = np.full((50, 3), 1 << FORWARD, np.uint8)
    result = following(host, d, unsure, np.zeros(6, bool), np.zeros((3, 6)), stage)
    return bool(result[0][0, FORWARD]), bool(result[1][0, FORWARD])


def test_device_that_has_its_hosts_time_in_its_own_waits_for_it_however_large_its_lead():
    assert followed(30) == (True, False)
    assert followed(30, host_waits=True) == (False, False)
    assert followed(30, peers_wait=True) == (False, True)
    assert followed(-10) == (False, False)  # it takes longer than its host does


@pytest.mark.parametrize(("excess_ms", "waits"), [(9, True), (11, False)])
def test_device_alone_without_a_lead_waits_for_its_host_in_as_much_of_its_excess_as_the_host_takes(
    excess_ms, waits
):
    host, d = np.full((2, 50, 3, 6), 10 * MS)
    d[:, 0, POST_SYNC] += excess_ms * MS
    unsure = np.zeros((50, 3), np.uint8)
    unsure[:, 0] = 1 << POST_SYNC
    suspects = np.zeros((3, 6), bool)
    suspects[0, POST_SYNC] = True
    excess = suspects * float(excess_ms * MS)
    follows, unknown = following(host, d, unsure, np.ones(6, bool), excess, suspects)
    assert follows[0, POST_SYNC] == waits
    assert not unknown.any()
