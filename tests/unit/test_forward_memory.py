"""What FSDP2's root has allocated at the end of its forward, read from a played allocator."""

from __future__ import annotations

from typing import Any

from fake_memory import FakeAllocator

from traceml_ray.agent.patch.fsdp import _ALL_UNTIL, _PERIOD, ForwardMemory


def made(allocator: FakeAllocator) -> tuple[ForwardMemory, list[str]]:
    failed: list[str] = []
    memory = ForwardMemory(
        lambda place, _: failed.append(place), lambda _: allocator.stats()["allocated_bytes"]["all"]
    )
    return memory, failed


def forward(memory: ForwardMemory, allocator: FakeAllocator, kept: int, more: int = 0) -> None:
    memory.begin(None)
    allocator.allocate(kept + more)
    allocator.free(more)
    memory.end(None)


def test_peak_is_that_of_a_forward_and_unknown_below_one_of_a_backward() -> None:
    allocator = FakeAllocator()
    memory, _ = made(allocator)
    forward(memory, allocator, 70, 30)
    assert (memory.after, memory.peak) == (70, 100)
    allocator.allocate(500)  # the backward
    allocator.free(550)
    forward(memory, allocator, 10, 50)
    assert (memory.after, memory.peak) == (30, 100)

    allocator = FakeAllocator()
    memory, _ = made(allocator)
    allocator.allocate(900)  # the whole model, before it was divided
    allocator.free(900)
    forward(memory, allocator, 10)
    assert (memory.after, memory.peak) == (10, None)


def test_few_forwards_are_read_and_an_error_stays_inside() -> None:
    allocator, reads = FakeAllocator(), 0

    def stat(_: Any) -> dict[str, int]:
        nonlocal reads
        reads += 1
        counts: dict[str, int] = allocator.stats()["allocated_bytes"]["all"]
        return counts

    memory, failed = made(allocator)
    memory._stat = stat
    for _ in range(2 * _PERIOD):
        forward(memory, allocator, 1)
    assert reads == 2 * (_ALL_UNTIL + 2)

    def broken(_: Any) -> Any:
        raise RuntimeError("no device")

    again, failed = made(allocator)
    again._stat = broken
    forward(again, allocator, 1)
    assert failed == ["fsdp: memory"] and again.after is None


def test_memory_of_a_host_is_no_substitute() -> None:
    import torch

    from traceml_ray.agent.patch.fsdp import stat_of

    assert stat_of(torch.device("cpu")) is None
