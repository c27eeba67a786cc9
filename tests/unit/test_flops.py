"""Model FLOPs of one step, counted in a real loop: as by hand, once, and without a trace."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from captured_rank import Rank
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from traceml_ray.signals.throughput import agent
from traceml_ray.signals.throughput.agent import SKIPPED, FlopCount, ModelFlops
from traceml_ray.stages import FLAG_EXCLUDED, SEGMENT_BITS

BY_HAND = 2 * (2 * 2 * 4 * 4)
"""Of the rank's step: (2, 4) × (4, 4) forward, and the same for the gradient of the weights."""


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    if "torch._dynamo.utils" in sys.modules:  # what other tests of this process have compiled
        monkeypatch.setattr(sys.modules["torch._dynamo.utils"], "counters", defaultdict(Counter))
    made = Rank()
    yield made
    made.captures.abandon()
    made.patches.remove()
    assert made.recorder.step_hook is None and _get_current_dispatch_mode() is None


@pytest.fixture
def count(rank: Rank) -> FlopCount:
    made = FlopCount(rank.recorder, rank.patches.errors)
    made.arm()
    return made


def trained(steps: int, counted: bool) -> torch.Tensor:
    torch.manual_seed(0)
    rank = Rank()
    if counted:
        FlopCount(rank.recorder, rank.patches.errors).arm()
    rank.train(steps)
    rank.patches.remove()
    return rank.model.weight.detach().clone()


def test_flops_of_one_step_are_counted_as_by_hand_and_once(rank: Rank, count: FlopCount) -> None:
    rank.train(SKIPPED)
    assert count.measured is None and _get_current_dispatch_mode() is not None
    rank.train(1)
    assert count.measured == ModelFlops(BY_HAND, SKIPPED, "float32")
    assert _get_current_dispatch_mode() is None and rank.recorder.step_hook is None
    rank.train(3)
    assert (count.measured.flops, count.why, dict(rank.patches.errors)) == (BY_HAND, "", {})


@pytest.mark.usefixtures("count")
def test_rows_that_counting_slows_are_marked(rank: Rank) -> None:
    """A row ends with its backward, the mode after the optimizer's step: that is in the next row."""
    rank.train(8)
    assert rank.recorder.replay(60.0)
    _, keys, flags, _ = rank.recorder.steps.rows.ring.drain(100)
    steps = np.frombuffer(keys, "<i8") >> SEGMENT_BITS
    marked = np.frombuffer(flags, np.uint8) & FLAG_EXCLUDED != 0
    assert steps[marked].tolist() == [0, SKIPPED, SKIPPED + 1] and len(steps) >= 7


def test_counting_changes_no_bit() -> None:
    assert torch.equal(trained(6, True), trained(6, False))


def test_attention_on_the_cpu_counts_as_on_a_device(rank: Rank, count: FlopCount) -> None:
    rank.train(SKIPPED)
    query = torch.randn(1, 2, 8, 4, requires_grad=True)
    scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    rank.train(1)
    one = 2 * (2 * 8 * 8 * 4)  # a product of each of two heads
    assert count.measured is not None and count.measured.flops == BY_HAND + 2 * one + 5 * one


def test_compiled_model_has_no_count_but_a_reason(
    rank: Rank, count: FlopCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = SimpleNamespace(counters={"frames": {"ok": 1}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", compiled)  # type: ignore[arg-type]
    rank.train(4)
    assert count.measured is None and count.why.startswith("torch.compile")


def test_operation_that_torch_cannot_count_leaves_no_count(rank: Rank, count: FlopCount) -> None:
    library = torch.library.Library("ours", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    rank.train(SKIPPED)
    torch.ops.ours.twice(torch.ones(2))
    rank.train(1)
    assert count.measured is None and count.why == "the FLOPs of ours.twice are not known"


def test_mode_of_the_script_across_steps_is_left_alone(rank: Rank, count: FlopCount) -> None:
    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    rank.train(SKIPPED)
    with Mine() as mine:
        rank.train(2)
        assert _get_current_dispatch_mode() is mine
    rank.train(1)  # now it can be turned off
    assert _get_current_dispatch_mode() is None
    assert count.measured is None and "dispatch mode of its own" in count.why


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_mode_is_off_after_detach_in_the_middle(rank: Rank, count: FlopCount, where: str) -> None:
    def detach() -> None:
        count.abandon()
        rank.patches.remove()

    rank.train(SKIPPED)
    if where == "here":
        detach()
    else:
        _elsewhere(detach)
    rank.train(1)
    assert _get_current_dispatch_mode() is None and count.measured is None


def test_mode_is_off_after_detach_while_it_is_made(
    rank: Rank, count: FlopCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = agent._counter

    def meanwhile() -> object:
        _elsewhere(count.abandon)
        return make()

    monkeypatch.setattr(agent, "_counter", meanwhile)
    rank.train(SKIPPED + 1)
    assert _get_current_dispatch_mode() is None and count.measured is None


def _elsewhere(call: Callable[[], object]) -> None:
    other = threading.Thread(target=call)
    other.start()
    other.join()


def test_profile_and_count_of_the_same_steps_are_both_made(rank: Rank, count: FlopCount) -> None:
    rank.ask(first_step=SKIPPED)
    rank.train(SKIPPED + 3)
    assert rank.status.state == "sending"
    assert count.measured is not None and count.measured.flops == BY_HAND


def test_count_that_goes_wrong_ends_itself(
    rank: Rank, count: FlopCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceml_ray.signals.throughput.agent._counter", lambda: 1 / 0)
    rank.train(4)
    assert count.measured is None and "ZeroDivisionError" in count.why
    assert [*rank.patches.errors] == ["flops: ZeroDivisionError"]
