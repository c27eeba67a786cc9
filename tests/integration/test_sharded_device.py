"""FSDP's waits on a device are marked, in all steps or in those that the ranks choose alike."""

from __future__ import annotations

from typing import Any

import pytest
from integration.two_ranks import results_of

from traceml_ray.stages import FLAG_DEVICE_CLOCK, FLAG_INSEPARABLE

MS = 1_000_000


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("sharded_device.py", tmp_path_factory.mktemp("ranks"))


def on_device(rows: list[dict[str, Any]]) -> list[int]:
    """The steps of those on the device's clock."""
    return [row["key"] >> 8 for row in rows if row["flags"] & FLAG_DEVICE_CLOCK]


@pytest.mark.parametrize(("version", "copies_ms"), [("hybrid", 0), ("first hybrid", 4)])
def test_reduction_over_the_replicas_is_a_wait(
    ranks: list[dict[str, Any]], version: str, copies_ms: int
) -> None:
    """The last one ends after the backward's own kernels; the one before is hidden behind them."""
    for rank, case in enumerate(results[version] for results in ranks):
        assert on_device(case["rows"]) == list(range(3 + rank, len(case["losses"]))) and not case["errors"]
        for row in case["rows"][3 + rank :]:
            assert [ns / MS for ns in row["row"]] == pytest.approx([0, 0, 0, 13, 20, copies_ms + 6], abs=0.02)
            assert not row["flags"] & FLAG_INSEPARABLE


@pytest.mark.parametrize("version", ["first", "plain"])
def test_waits_are_taken_out_of_forward_and_backward(ranks: list[dict[str, Any]], version: str) -> None:
    """Of both versions of FSDP: two groups are gathered in forward, and again in backward."""
    for rank, case in enumerate(results[version] for results in ranks):
        rows = case["rows"]
        assert on_device(rows) == list(range(3 + rank, len(case["losses"]))) and not case["errors"]
        for row in rows[3 + rank :]:
            assert [ns / MS for ns in row["row"]] == pytest.approx([0, 0, 0, 13, 20, 4], abs=0.02)
            assert not row["flags"] & FLAG_INSEPARABLE
        assert all(row["flags"] & FLAG_INSEPARABLE for row in rows[: 3 + rank])


@pytest.mark.parametrize(
    ("version", "gather_ms", "reduce_ms"), [("plain", 4, 0), ("dear", 4, 0), ("hybrid", 0, 6)]
)
def test_waits_for_parameters_are_told_from_those_for_gradients(
    ranks: list[dict[str, Any]], version: str, gather_ms: int, reduce_ms: int
) -> None:
    for result in ranks:
        gathers, others, steps = result[version]["waited"]
        assert steps > 10 and gathers / MS / steps == pytest.approx(gather_ms, abs=0.1)
        assert others / MS / steps == pytest.approx(reduce_ms, abs=0.1)


def test_each_exchange_of_a_step_is_a_row_with_its_waits(ranks: list[dict[str, Any]]) -> None:
    rows = ranks[0]["accumulated"]["rows"]
    last = len(ranks[0]["accumulated"]["losses"]) - 1
    assert on_device(rows)[-4:] == [last - 1, last - 1, last, last]
    assert [row["row"][5] / MS for row in rows[-4:]] == [4.0] * 4


def test_ranks_mark_the_same_steps_where_all_would_cost_too_much(ranks: list[dict[str, Any]]) -> None:
    for rank, case in enumerate(result["dear"] for result in ranks):
        steps = on_device(case["rows"])
        assert steps[: 60 - rank] == list(range(3 + rank, 63))
        assert steps[-7:] == [72, 76, 80, 84, 88, 92, 96]
        sampled = [row for row in case["rows"] if row["key"] >> 8 == 96]
        assert sum(sampled[0]["row"]) / MS == pytest.approx(37, abs=0.1)
        assert all(row["flags"] & FLAG_INSEPARABLE for row in case["rows"][97:])


def test_losses_are_those_without_it(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, case in rank.items():
            assert case["losses"] == case["bare"], name
            assert "device clock" not in case["missing"]
