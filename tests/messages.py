"""One message of every kind, with every optional field set."""

from __future__ import annotations

import struct

import msgspec

from traceml_ray.agent.batch_size import packed
from traceml_ray.identity import RankIdentity
from traceml_ray.signals.check.records import Checked, MachineState, Measure
from traceml_ray.signals.collectives.records import (
    CallReport,
    CallSample,
    CallTimes,
    CollectivesReport,
    GroupReport,
)
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.goodput.records import Life, LifeInterval, OpenInterval
from traceml_ray.signals.kinds import encoded
from traceml_ray.signals.layers.records import LayerSum, LayerWindow
from traceml_ray.signals.logged.records import LoggedValues
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.records import GpuSample, NodeSample
from traceml_ray.signals.output.records import Output
from traceml_ray.signals.sharding.records import Sharding, UnevenShard
from traceml_ray.signals.throughput.records import StepWork
from traceml_ray.stages import FORWARD, LEAD_BYTES, N_STAGES, POST_SYNC, ROW_BYTES, SEGMENT_BITS, SYNC_WAIT
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import TracePart, TraceReply

IDENTITY = RankIdentity(3, 1, 1, 4, 2, 2, "host-b", None, "job", 0, 4242, "torchrun")
COMMANDS = [wire.Command("dump", {"reason": "asked", "seconds": 1.5, "rank": 3, "other": None})]
NODE = wire.NodeIdentity("ab" * 28, "host-b", "10.0.0.2")
MEMORY = MemorySample(1_800_000_000_000_000_000, 7, 0, *range(1, 15))
EVENT = wire.Event("exception", 1_800_000_000_000_000_000, 7, FORWARD, "boom", {"code": 1, "why": None})


LAYER = LayerSum("a.b", "Linear", "", 40, 0, 1, 2, 3.5, 4, 5, None)
RECORDS = [
    MEMORY,
    MemorySample(1, None, None, rss_bytes=1 << 33),
    StepWork(70_000, 70_001, 2, 2, 64, None, flops=1e12, dtype="bfloat16", device="NVIDIA H200"),
    *packed([(70_000, 32, 4096), (70_001, 32, -1)]),
    Output(1, 1_800_000_000_000_000_000, ["one", "two"], "7%", 3),
    LayerWindow(
        3,
        1,
        8,
        90,
        40,
        2,
        "device",
        True,
        False,
        5,
        7,
        [LayerSum("a.b", "Linear", "", 40, 0, 1, 2, 3.5, 4, 5, None)],
    ),
    CollectivesReport(
        1,
        "h1",
        "recorder",
        [GroupReport("0", "default_pg", [(0, 4, 1)], 9, 8)],
        [
            CallReport(
                0, 9, False, "all_reduce", [[8, 4]], ["Float"], [[8, 4]], ["Float"], False, 5, "f (t.py:6)"
            )
        ],
        True,
    ),
    CallTimes(
        3,
        "host",
        "all_reduce",
        "world",
        "",
        2,
        25,
        100,
        90,
        25 << 22,
        1 << 32,
        70_000,
        70_099,
        2,
        [CallSample(70_000, 0, 1 << 20, 1 << 22), CallSample(70_002, 3, 1 << 21, 1 << 22)],
    ),
    LoggedValues("loss", 70_000, 70_001, 2, 0.25, 0.25, 1, 70_001, 70_001, float("inf")),
    RouterTokens(63, "router", [1, 2, 1 << 62]),
    Sharding(1, 2, 3, 0, 4, 2, 1, 1, [2], [], {"stored": "float32"}, {"yes": 1}, [UnevenShard("w", 3, 1, 4)]),
    LifeInterval(
        3, "checkpoint_save", 1_800_000_000_000_000_000, 1_800_000_001_000_000_000, 900_000_000, 2, 70_000
    ),
    Life(
        1_800_000_002_000_000_000,
        1_800_000_000_000_000_000,
        1_799_999_999_000_000_000,
        step=70_001,
        open=[OpenInterval(4, "evaluation", 500_000_000, None, 500_000_000)],
    ),
    Checked(
        1_800_000_000_000_000_000,
        "node-0",
        "939b16cb-b4ee-479f-a81c-9998bc41a1d5",
        None,
        MachineState(
            "Xeon",
            8,
            4.5,
            1 << 30,
            12,
            0.01,
            2500.0,
            3500.0,
            "performance",
            [GpuSample(0, "H200", 98.0, 1, 2)],
        ),
        [Measure("gpu_matmul", "GPU 0", "FLOP/s", [7e14, 6.9e14], "H200", [0.0, 0.1], 0, "float16")],
        ["A disk could not be read."],
        20.5,
        1,
        "restart",
    ),
]
"""At least one record of every kind that a rank sends."""


def rank_batch(n: int = 2, **changes: object) -> wire.RankBatch:
    """Return a batch of `n` rows without optional fields."""
    step = 70_000
    keys = struct.pack(f"<{n}q", *((step + i) << SEGMENT_BITS for i in range(n)))
    rows = struct.pack(f"<{n * N_STAGES}q", *([33_333_333] * (n * N_STAGES)))
    batch = wire.RankBatch(
        v=codec.VERSION,
        process_id="0123456789abcdef",
        seq=7_000,
        sent_ns=1_800_000_000_000_000_000,
        produced=step + n,
        dropped=0,
        first_row=step,
        keys=keys,
        flags=bytes(n),
        rows=rows,
    )
    return msgspec.structs.replace(batch, **changes)


def full_rank_batch() -> wire.RankBatch:
    return rank_batch(
        identity=IDENTITY,
        open=wire.OpenStage(70_002, SYNC_WAIT, 12_000_000),
        process=wire.ProcessSample(1, 99.5, 1 << 33, 41, None, 0),
        spans=[wire.SpanSum("optimizer", POST_SYNC, 10, 900, 100, 1, 10)],
        events=[EVENT],
        errors={"sampler": 2},
        missing={"nvml": "no driver"},
        overhead=wire.Overhead(1, 2, 3, 4),
        strategy="ddp",
        final=True,
        host_rows=bytes(ROW_BYTES * 2),
        leads=bytes(LEAD_BYTES * 2),
        records=encoded(RECORDS),
        memory_from={"allocated_bytes": "torch"},
    )


def relay_batch() -> wire.RelayBatch:
    sample = NodeSample(1, 50.0, 8, 0.5, 1, 2, 3, 4, 5, None, [GpuSample(0, "H200", 98.0, 1, 2)])
    return wire.RelayBatch(
        codec.VERSION,
        NODE,
        "fedcba9876543210",
        1,
        2,
        [codec.encode(rank_batch())],
        {"s": 1},
        ["t"],
        [EVENT],
        answer=(5, 9),
        records=encoded([sample]),
        of_ranks={"s": encoded([Output(2, 1, ["one"], by_relay=True)])},
    )


FAILURE = wire.RankFailure(1, 1, 77, -9, 5, "killed")
MESSAGES = [
    full_rank_batch(),
    wire.RankReply(codec.VERSION, "0123456789abcdef", 7, 7, COMMANDS),
    relay_batch(),
    wire.RelayReply(codec.VERSION, 9, COMMANDS, sent_ns=5),
    TracePart(codec.VERSION, "0123456789abcdef", "20261123T080006", 1, 100, 5, b"part"),
    TraceReply(codec.VERSION, 9, 0.5),
    wire.Finish(codec.VERSION, -15, [FAILURE], stop=False),
    wire.Finished(codec.VERSION, "failed", "disk full"),
    wire.RunEnd(codec.VERSION, "job", {"name": "fit", "world_size": 2}, [EVENT], "finished"),
]
