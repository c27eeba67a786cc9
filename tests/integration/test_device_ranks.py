"""Real autograd, real gloo DDP, real patches and agent; only the device is played."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_device import CALLS
from integration.device_ranks import TRIED
from integration.two_ranks import results_of
from unit.sample_windows import judge

from traceml_ray.analysis.window import Window
from traceml_ray.stages import DATA, FLAG_DEVICE_CLOCK, FLAG_EXCLUDED, FLAG_INSEPARABLE, FORWARD, SYNC_WAIT

pytestmark = pytest.mark.long

MS = 1_000_000
FIRST = 3
"""The first row that is whole on the device's clock, which is read from the third step on."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("device_ranks.py", tmp_path_factory.mktemp("ranks"))


def rows(case: dict[str, Any]) -> list[list[float]]:
    """The rows on the device's clock, in ms."""
    return [[ns / MS for ns in row["row"]] for row in case["rows"] if row["flags"] & FLAG_DEVICE_CLOCK]


@pytest.mark.parametrize(
    ("slow", "late", "other"),
    [
        ("", [4, 0, 0, 10, 20, 4], [4, 0, 0, 10, 20, 4]),
        ("forward", [4, 0, 0, 22, 20, 4], [4, 0, 0, 10, 20, 16]),
        ("backward", [4, 0, 0, 10, 32, 4], [4, 0, 0, 10, 20, 16]),
    ],
)
def test_planted_fault_comes_out_in_its_stage(
    ranks: list[dict[str, Any]], slow: str, late: list[float], other: list[float]
) -> None:
    for rank, expected in zip(ranks, (other, late), strict=True):
        device_rows = rows(rank[f"slow {slow}"])
        assert len(device_rows) == 24 - FIRST
        for row in device_rows[2:]:
            assert row == pytest.approx(expected, abs=0.02)


def test_slow_loader_is_the_time_the_device_waits_for_it(ranks: list[dict[str, Any]]) -> None:
    mine, peer = rows(ranks[1]["slow data"])[-1], rows(ranks[0]["slow data"])[-1]
    assert mine[DATA] > 12 and peer[DATA] < 0.1
    assert peer[SYNC_WAIT] - mine[SYNC_WAIT] > 12 and sum(peer) == pytest.approx(sum(mine), abs=0.1)


def test_every_row_has_its_host_row_and_key(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, case in rank.items():
            if name == "bare":
                continue
            assert [row["key"] >> 8 for row in case["rows"]] == list(range(24)), name
            for row in case["rows"]:
                on_device = bool(row["flags"] & FLAG_DEVICE_CLOCK)
                assert on_device != bool(row["flags"] & FLAG_INSEPARABLE)
                assert on_device or row["row"] == row["host"]
            assert case["rows"][0]["flags"] & FLAG_EXCLUDED
            assert case["produced"] == 24 and not case["dropped"], name


def test_training_is_the_same_whatever_happens_to_the_clock(ranks: list[dict[str, Any]]) -> None:
    usual = {"", "data", "forward", "backward"}
    for rank in ranks:
        for name, case in rank.items():
            assert case["results"] == rank["bare"]["results"], name
            if name.startswith("error") and case["calls"].get(name.split()[1], 0) >= int(name.split()[2]):
                assert "failed" in case["missing"]["device clock"], name
            elif name.removeprefix("slow ") in usual or " in " in name:
                assert "device clock" not in case["missing"]


def test_error_at_each_call_of_a_device_is_tried(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name in CALLS:
            for nth in (1, 7) if name != "make" else (1,):
                case = rank[f"error {name} {nth}"]
                assert f"{name} failed" in case["missing"]["device clock"], (name, nth)
                assert case["calls"][name] == nth


@pytest.mark.parametrize("trouble", ["delay", "capture", "fork"])
def test_trouble_in_each_call_of_a_device_is_tried(ranks: list[dict[str, Any]], trouble: str) -> None:
    """What becomes of it: see the two tests above, and those of rows."""
    for rank in ranks:
        for name in CALLS:
            case = rank[f"{trouble} in {name}"]
            assert case["calls"][name] >= TRIED[name != "make"], name
            if trouble == "capture":
                assert 1 <= case["errors"]["device rows without an event"] <= 4, name
            else:
                assert len(rows(case)) == 24 - FIRST and not case["errors"], name


def test_row_in_which_a_mark_is_captured_keeps_its_host_part(ranks: list[dict[str, Any]]) -> None:
    for nth in range(6):
        case = ranks[0][f"capture {nth}"]
        lost = case["errors"]["device rows without an event"]
        assert "replayed has no row" in case["missing"]["graphs"]
        assert 2 <= lost <= 8 and len(rows(case)) == 24 - FIRST - lost
        for row in rows(case)[2:]:
            assert row[FORWARD:] == pytest.approx([10, 20, 4], abs=0.02)


def test_full_queue_and_beats_that_are_late_are_noticed(ranks: list[dict[str, Any]]) -> None:
    leads = [row["leads"] for row in ranks[0]["delayed"]["rows"] if row["flags"] & FLAG_DEVICE_CLOCK]
    assert any(lead[1] for lead in leads if lead[1] < 64)


@pytest.mark.parametrize("slow", ["data", "forward", "backward"])
def test_planted_fault_is_judged_from_what_the_agents_send(ranks: list[dict[str, Any]], slow: str) -> None:
    columns = [
        [row for row in rank[f"slow {slow}"]["rows"] if row["flags"] & FLAG_DEVICE_CLOCK][2:]
        for rank in ranks
    ]

    def column(name: str, kind: type[np.generic]) -> np.ndarray:
        return np.array([[row[name] for row in rows] for rows in columns], kind).swapaxes(0, 1)

    verdict = judge(
        Window(
            keys=column("key", np.int64)[:, 0],
            ranks=np.arange(2, dtype=np.int64),
            nodes=("a", "b"),
            d=column("row", np.int64),
            flags=column("flags", np.uint8),
            expected=2,
            groups=((0, 2), (0, 2)),
            strategies=frozenset({"ddp"}),
            host=column("host", np.int64),
            leads=column("leads", np.uint8),
        )
    )
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", slow, (1,)), verdict.why
