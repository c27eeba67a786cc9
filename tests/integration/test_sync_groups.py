"""
Several groups of ranks on real gloo, and couplings beyond one exchange a step.

Run by `torch.distributed.run` with a folder as argument, this file trains every case of CASES on four ranks
and leaves what the agent of each would say in `<folder>/<case>.<rank>.json`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from integration import loops, parallel_cases, shard_cases
from torch import nn
from unit.sample_windows import align, judge

from traceml_ray.analysis.roles import role_of
from traceml_ray.analysis.window import RankRows
from traceml_ray.launchers.cluster import free_port
from traceml_ray.signals.sharding.records import Sharding
from traceml_ray.stages import FLAG_INSEPARABLE, FLAG_NO_PEERS, POST_SYNC, SEGMENT_BITS, STAGES, SYNC_WAIT

STEPS = 56
"""Enough for one peer to show what is chance: 50 steps after those that allocate and connect."""
WORLD = 4
ROOT = Path(__file__).parents[2]


def train(job: loops.Job, model: nn.Module, reduce: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader(STEPS):
        loss = model(batch).mean()
        loss.backward()
        if reduce and job.slow == "metrics":
            job.pause()
        if reduce:
            dist.all_reduce(loss.detach())
        job.finish(optimizer)


def pairs(job: loops.Job) -> dist.ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[job.rank // 2]


def two_groups(job: loops.Job) -> None:
    train(job, job.model(process_group=pairs(job)))


def each_alone(job: loops.Job) -> None:
    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    train(job, job.model(process_group=groups[job.rank]))


def without_ddp(job: loops.Job) -> None:
    train(job, job.bare())


def metrics(job: loops.Job) -> None:
    train(job, job.model(), reduce=True)


def sharded(job: loops.Job, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    net = loops.Net(job.slow, pause=job.pause)
    fully_shard(net.first, mesh=mesh)
    fully_shard(module=net, mesh=mesh)
    train(job, net)


def fsdp2(job: loops.Job) -> None:
    """Two groups of two ranks."""
    sharded(job, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "shard"))["shard"])


def hybrid(job: loops.Job) -> None:
    """One group of two dimensions."""
    sharded(job, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


class ReducesInStep(torch.optim.SGD):
    """Gradients are reduced as they come, and waited for where the optimizer steps."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), lr=0.01)
        self.handles: list[dist.Work] = []
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(self.begin)

    def begin(self, parameter: torch.Tensor) -> None:
        handle = dist.all_reduce(parameter.grad, async_op=True)
        assert handle is not None
        self.handles.append(handle)

    def step(self, closure: Any = None) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        super().step(closure)


def in_step(job: loops.Job) -> None:
    net = job.bare()
    optimizer = ReducesInStep(net)
    for batch in job.loader(STEPS):
        net(batch).mean().backward()
        job.finish(optimizer)


def by_hand(job: loops.Job, group: dist.ProcessGroup | None = None, gather: bool = False) -> None:
    net = job.bare()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in job.loader(STEPS):
        loss = net(batch).mean()
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, group=group)
        job.finish(optimizer)
        if gather:  # each rank has updated its part of the parameters
            for parameter in net.parameters():
                dist.broadcast(parameter.detach(), 0)
        dist.all_reduce(loss.detach()) if group is None else None


def at_once(job: loops.Job) -> None:
    net = job.bare()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in job.loader(STEPS):
        net(batch).mean().backward()
        handles = [dist.all_reduce(parameter.grad, async_op=True) for parameter in net.parameters()]
        for handle in handles:
            assert handle is not None
            handle.wait()
        job.finish(optimizer)


def in_backward(job: loops.Job) -> None:
    net = job.bare()
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
    train(job, net)


def of_pairs(job: loops.Job) -> None:
    by_hand(job, pairs(job))


def dispatched(job: loops.Job) -> None:
    """Rank 0 fetches and tells the others what is coming, then hands it out: as Accelerate does it."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(job.loader(STEPS)) if job.rank == 0 else None
    for _ in range(STEPS):
        batch = next(batches) if batches is not None else None
        result = [None if batch is None else batch.shape]
        dist.broadcast_object_list(result, 0)
        batch = torch.empty(result[0] or ()) if batch is None else batch
        dist.broadcast(batch, 0)
        model(batch).mean().backward()
        job.finish(optimizer)


def logging(job: loops.Job) -> None:
    net = job.bare()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in job.loader(STEPS):
        loss = net(batch).mean()
        loss.backward()
        job.finish(optimizer)
        dist.all_reduce(loss.detach())


class Chunked(loops.Net):
    """The head is used outside, as for a loss in chunks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).relu()


def in_chunks(job: loops.Job, model: nn.Module, head: nn.Module, sync: Callable[[bool], object]) -> None:
    """The loss goes backward in three chunks to what the model returned, and from there once."""
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    for number, batch in enumerate(job.loader(STEPS)):
        hidden = model(batch)
        cut = hidden.detach().requires_grad_()
        for chunk in range(3):
            sync(chunk == 2)
            head(cut).mean().backward()
        hidden.backward(cut.grad)
        job.finish(optimizer)
        if number == 2:
            job.recorder.replay()  # as the agent's thread does


def chunks_ddp(job: loops.Job) -> None:
    """The head is no part of DDP's module."""
    net = nn.Linear(loops.WIDTH, loops.WIDTH)
    in_chunks(job, nn.parallel.DistributedDataParallel(net), nn.Linear(loops.WIDTH, 1), lambda _: None)


def chunks_fsdp2(job: loops.Job) -> None:
    """The head's gradients are exchanged with the last chunk."""
    from torch.distributed.fsdp import fully_shard

    net, head = Chunked(), nn.Linear(loops.WIDTH, 1)
    del net.second
    fully_shard(head)
    fully_shard(net)
    in_chunks(job, net, head, head.set_requires_gradient_sync)


HAS_FSDP2 = hasattr(torch.distributed.fsdp, "fully_shard")
CASES: dict[str, tuple[Callable[[loops.Job], None], int, str]] = {
    "two_groups": (two_groups, 3, "forward"),
    "each_alone": (each_alone, 1, "forward"),
    "without_ddp": (without_ddp, 1, "forward"),
    "metrics": (metrics, 1, "metrics"),
    "fsdp2_forward": (fsdp2, 1, "forward"),
    "fsdp2_backward": (fsdp2, 2, "backward"),
    "hybrid": (hybrid, 3, "data"),
    "by_hand_data": (by_hand, 2, "data"),
    "by_hand_optimizer": (functools.partial(by_hand, gather=True), 0, "optimizer"),
    "at_once_backward": (at_once, 1, "backward"),
    "in_backward_forward": (in_backward, 2, "forward"),
    "in_step_backward": (in_step, 2, "backward"),
    "by_hand_healthy": (by_hand, 0, ""),
    "dispatched": (dispatched, 0, "data"),
    "of_pairs": (of_pairs, 1, "forward"),
    "logging": (logging, 1, "forward"),
    "chunks_ddp": (chunks_ddp, 1, "data"),
    "chunks_fsdp2": (chunks_fsdp2, 1, "data"),
    "pipeline_forward": (parallel_cases.pipeline, 1, "forward"),
    "pipeline_backward": (parallel_cases.pipeline, 2, "backward"),
    "pipeline_healthy": (parallel_cases.pipeline, 0, ""),
    "pipeline_alone": (parallel_cases.pipeline_alone, 1, "forward"),
    "tensor_forward": (parallel_cases.tensor, 1, "forward"),
    "tensor_alone": (parallel_cases.tensor_alone, 1, "forward"),
}
"""What is trained, and which rank is slow in what."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, (case, slow_rank, slow) in CASES.items():
        if case in (fsdp2, hybrid, chunks_fsdp2) and not HAS_FSDP2:
            continue
        dist.barrier()
        job = loops.Job(slow if rank == slow_rank else "", rank, WORLD)
        job.instrumentation.install()
        try:
            case(job)
        finally:
            job.instrumentation.remove()
        instrumentation = job.instrumentation
        result = {
            "rows": job.rows(),
            "errors": instrumentation.errors,
            "missing": instrumentation.missing,
            "group": instrumentation.group,
        }
        placement = msgspec.structs.asdict(instrumentation.placement) if instrumentation.placement else {}
        result["role"] = role_of(placement)
        (folder / f"{name}.{rank}.json").write_text(
            json.dumps({**result, "strategy": instrumentation.strategy})
        )
    for name, shard_case in shard_cases.CASES.items() if HAS_FSDP2 else ():
        job = loops.Job("", rank, WORLD)
        job.instrumentation.install()
        try:
            result = shard_cases.train(job, shard_case)
        finally:
            job.instrumentation.remove()
        instrumentation = job.instrumentation
        result |= {
            "errors": instrumentation.errors,
            "missing": instrumentation.missing,
            "strategy": instrumentation.strategy,
        }
        (folder / f"shards_{name}.{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)),
            *("--master-port", str(free_port()), __file__, str(folder)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def ranks_of(folder: Path, name: str) -> list[RankRows]:
    ranks = []
    for rank in range(WORLD):
        result = json.loads((folder / f"{name}.{rank}.json").read_text())
        assert result["errors"] == result["missing"] == {}
        rows = result["rows"][5:]  # the first ones allocate and connect
        keys = np.array([row["step"] << SEGMENT_BITS | row["segment"] for row in rows], dtype=np.int64)
        flags = np.array([row["flags"] for row in rows], dtype=np.uint8)
        values = np.array([row["row"] for row in rows], dtype=np.int64).reshape(len(rows), len(STAGES))
        group = None if result["group"] is None else tuple(result["group"])
        ranks.append(
            RankRows(rank, "node-0", keys, flags, values, group, result["strategy"], role=result["role"])
        )
    return ranks


PAIRS = [(0, 2), (0, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("name", "groups", "strategy", "stage"),
    [
        ("two_groups", PAIRS, "ddp", "forward"),
        ("metrics", [(0, 4)] * 4, "ddp", "post_sync"),
        ("fsdp2_forward", PAIRS, "fsdp2", "forward"),
        ("fsdp2_backward", PAIRS, "fsdp2", "backward"),
        ("hybrid", [(0, 4)] * 4, "fsdp2+hsdp", "data"),
    ],
)
def test_late_rank_is_named_in_its_group(
    cases: Path, name: str, groups: list[tuple[int, int]], strategy: str, stage: str
) -> None:
    if strategy.startswith("fsdp2") and not HAS_FSDP2:
        pytest.skip("this torch has no fully_shard")
    ranks = ranks_of(cases, name)
    assert [rank.group for rank in ranks] == groups and {rank.strategy for rank in ranks} == {strategy}
    assert not any((rank.flags & FLAG_INSEPARABLE).any() for rank in ranks)
    verdict = judge(align(ranks, WORLD))
    late = CASES[name][1]
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", stage, (late,)), verdict.why
    size = groups[late][1]
    assert verdict.rank_hours_per_hour == pytest.approx(size * (verdict.cost_pct or 0) / 100)
    members = f"In the group of ranks {late // 2 * 2} and {late // 2 * 2 + 1}: "
    assert verdict.why.startswith(members) == (size == 2)


INFERRED_CASES = [
    name for name in CASES if name.startswith(("by_hand_", "at_once_", "in_backward_", "in_step_"))
]


@pytest.mark.parametrize("name", [name for name in INFERRED_CASES if "healthy" not in name])
def test_unmarked_exchange_is_inferred_from_where_ranks_wait(cases: Path, name: str) -> None:
    ranks = ranks_of(cases, name)
    verdict = judge(align(ranks, WORLD))
    _, late, stage = CASES[name]
    stage = "post_sync" if stage == "optimizer" else stage
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", stage, (late,)), verdict.why
    assert {rank.strategy for rank in ranks} == {"all_reduce (inferred)"}
    # What a fix saves is the last sentence of all.
    reason = verdict.why.removesuffix(verdict.saving).rstrip()
    assert reason.endswith("ranks exchange gradients in `all_reduce`, before the optimizer.")
    assert "wait for it in `sync_wait`" in verdict.why


def test_rank_that_fetches_for_all_is_named_by_its_own_marks(cases: Path) -> None:
    verdict = judge(align(ranks_of(cases, "dispatched"), WORLD))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", "data", (0,)), verdict.why
    assert "No data wait" not in verdict.why


def test_ranks_that_reduce_by_hand_and_are_even_are_healthy(cases: Path) -> None:
    verdict = judge(align(ranks_of(cases, "by_hand_healthy"), WORLD))
    assert verdict.label == "healthy", verdict.why
    assert verdict.why.endswith("ranks exchange gradients in `all_reduce`, before the optimizer.")


def test_reduction_that_ranks_do_not_leave_together_is_not_judged(cases: Path) -> None:
    verdict = judge(align(ranks_of(cases, "of_pairs"), WORLD))
    assert (verdict.label, verdict.rank) == ("accounting_only", None)
    assert verdict.why.startswith("These ranks wait for each other in `all_reduce`, but they do not leave it")


def test_reduction_after_the_optimizer_is_no_exchange_of_gradients(cases: Path) -> None:
    ranks = ranks_of(cases, "logging")
    verdict = judge(align(ranks, WORLD))
    assert {rank.strategy for rank in ranks} == {"single"}
    assert (verdict.label, verdict.rank) == ("accounting_only", None)
    assert verdict.why.startswith("These ranks wait for each other in collectives, ")


@pytest.mark.parametrize(
    ("name", "role", "replicas"),
    [
        ("pipeline_forward", "pp=0", "0 and 1"),
        ("pipeline_backward", "pp=1", "2 and 3"),
        ("tensor_forward", "tp=1", "1 and 3"),
    ],
)
def test_late_rank_is_named_among_those_that_do_the_same_work(
    cases: Path, name: str, role: str, replicas: str
) -> None:
    ranks = ranks_of(cases, name)
    _, late, stage = CASES[name]
    assert ranks[late].role == role and not any((rank.flags & FLAG_INSEPARABLE).any() for rank in ranks)
    verdict = judge(align(ranks, WORLD))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", stage, (late,)), verdict.why
    assert verdict.why.startswith(f"In role {role} (ranks {replicas}): "), verdict.why
    assert len(verdict.roles) == 2 and all(0 < (one.bubble or 0) < 0.9 for one in verdict.roles)


def test_ranks_of_a_pipeline_that_are_even_are_healthy(cases: Path) -> None:
    verdict = judge(align(ranks_of(cases, "pipeline_healthy"), WORLD))
    assert verdict.label == "healthy", verdict.why


@pytest.mark.parametrize(("name", "role"), [("pipeline_alone", "pp=1"), ("tensor_alone", "tp=1")])
def test_ranks_without_a_replica_are_not_judged_but_their_bubble_is_known(
    cases: Path, name: str, role: str
) -> None:
    ranks = ranks_of(cases, name)
    assert ranks[1].role == role
    verdict = judge(align(ranks, WORLD))
    assert (verdict.label, verdict.rank) == ("accounting_only", None)
    assert "no other rank does the same work" in verdict.why and "of their time" in verdict.why
    assert [one.size for one in verdict.roles] == [1] * 4


@pytest.mark.parametrize(("name", "exchanges"), [("chunks_ddp", 1), ("chunks_fsdp2", 2)])
def test_backward_without_an_exchange_is_no_segment(cases: Path, name: str, exchanges: int) -> None:
    if name == "chunks_fsdp2" and not HAS_FSDP2:
        pytest.skip("this torch has no fully_shard")
    ranks = ranks_of(cases, name)
    for rank in ranks:
        keys = rank.keys[rank.keys >> SEGMENT_BITS > 4]
        segments = set(np.unique(keys >> SEGMENT_BITS, return_counts=True)[1])
        assert segments == {exchanges} and not (rank.flags & FLAG_NO_PEERS).any()
    verdict = judge(align(ranks, WORLD))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", "data", (1,)), verdict.why


@pytest.mark.parametrize("name", ["each_alone", "without_ddp"])
def test_independent_ranks_are_not_judged_against_each_other(cases: Path, name: str) -> None:
    verdict = judge(align(ranks_of(cases, name), WORLD))
    assert (verdict.label, verdict.rank, verdict.suspects) == ("accounting_only", None, ())
    assert "do not exchange gradients" in verdict.why


@pytest.mark.parametrize("strategy", ["tp", "pp", "ddp+tp"])
def test_waits_of_tensor_parallel_layers_and_pipeline_stages_are_seen_on_the_cpu(strategy: str) -> None:
    import torch.distributed._functional_collectives as functional

    job, wait = loops.Job(), functional.wait_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job.instrumentation.install()
        assert functional.wait_tensor is not wait
        net = job.bare()
        if "pp" in strategy:
            from torch.distributed.pipelining import PipelineStage

            PipelineStage(net, 0, 1, torch.device("cpu"), input_args=(torch.ones(4, loops.WIDTH),))
            for operation in (dist.isend, dist.irecv):  # P2POp looks whether they are torch's own
                dist.P2POp(operation, torch.ones(1), 0)
        else:
            from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

            plan, mesh = {"first": ColwiseParallel()}, dist.init_device_mesh("cpu", (1,))
            parallelize_module(module=net, device_mesh=mesh, parallelize_plan=plan)
        if "ddp" in strategy:
            nn.parallel.DistributedDataParallel(loops.Net())
        exchange = job.recorder.exchange
        assert job.instrumentation.strategy == strategy and exchange.roles and not exchange.inseparable
        exchange.clock(True)  # on a device streams wait, not the training thread
        assert exchange.inseparable and not exchange.roles
        train(job, loops.Net())
    finally:
        job.instrumentation.remove()
        dist.destroy_process_group()
    assert not job.instrumentation.errors and not job.instrumentation.missing
    assert functional.wait_tensor is wait
    flags = {int(row["flags"]) & FLAG_INSEPARABLE for row in job.rows()}  # type: ignore[call-overload]
    assert flags == {FLAG_INSEPARABLE}


def test_collective_work_before_the_wait_is_time_of_the_rank_itself() -> None:
    job = loops.Job()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job.instrumentation.install()
        net = job.bare()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for batch in job.loader():
            net(batch).mean().backward()
            dist.broadcast_object_list([loops.Slow()])
            job.finish(optimizer)
    finally:
        job.instrumentation.remove()
        dist.destroy_process_group()
    rows = np.array([row["row"] for row in job.rows()[1:]])
    post_sync, sync_wait = np.median(rows[:, POST_SYNC]), np.median(rows[:, SYNC_WAIT])
    assert post_sync > 0.9e9 * loops.SLOW_S > sync_wait


if __name__ == "__main__":
    main(Path(sys.argv[1]))


@pytest.mark.skipif(not HAS_FSDP2, reason="this torch has no fully_shard")
@pytest.mark.parametrize("name", shard_cases.CASES)
def test_shards_and_what_moves_are_as_computed_by_hand(cases: Path, name: str) -> None:
    case = shard_cases.CASES[name]
    inner, outer = case.padded(shard_cases.INNER), case.padded(shard_cases.OUTER)
    for rank in range(WORLD):
        result = json.loads((folder := cases / f"shards_{name}.{rank}.json").read_text())
        assert result["errors"] == result["missing"] == {} and result["freed"], folder
        assert result["strategy"] == ("fsdp2+hsdp" if name == "hsdp" else "fsdp2")
        sharding = msgspec.convert(result["sharding"], Sharding)
        held = case.held(rank)
        assert (sharding.shard_bytes, sharding.gradient_bytes, sharding.optimizer_bytes) == (held, held, held)
        assert sharding.full_bytes == 4 * (10 * loops.WIDTH + 10 + 3 * 10 + 3)
        assert sharding.offloaded_bytes == held * case.offloaded
        assert (sharding.groups, sharding.shards, sharding.position) == (2, case.shards, case.position(rank))
        assert (sharding.replicas, sharding.resharded) == (WORLD // case.shards, case.resharded)
        reduced = {"stored": "float32", "reduced": "float32"}
        assert sharding.dtypes == {**reduced, "computed": "bfloat16" if name == "mixed" else "float32"}
        assert sharding.mesh_shape == ([2, 2] if name == "hsdp" else [4])
        assert sharding.uneven_count == (2 if case.shards == 2 else 4)
        moved = case.inner_gathers * inner + case.outer_gathers * outer
        gathers, steps = case.inner_gathers + case.outer_gathers, shard_cases.COUNTED
        assert (sharding.steps, sharding.gathers) == (steps, steps * gathers)
        assert sharding.gathered_bytes == steps * case.gathered_as * moved
        assert (sharding.reductions, sharding.reduced_bytes) == (2 * steps, steps * 4 * (inner + outer))
        assert sharding.all_reduced_bytes == (
            sharding.reduced_bytes // case.shards if sharding.replicas > 1 else 0
        )
        assert sharding.unsharded_peak_bytes == case.gathered_as * (inner + outer)
        assert (
            0 < sharding.unsharded_ns < sharding.step_ns
            and 0 < sharding.unsharded_mean_bytes < sharding.unsharded_peak_bytes
        )
        assert sharding.after_forward_bytes == sharding.forward_peak_bytes == 2 * shard_cases.STEPS
        assert sharding.gather_wait_ns and sharding.reduce_wait_ns and sharding.wait_steps == steps
