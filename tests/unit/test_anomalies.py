"""Anomalies of a node: every kind of them, none in noise, and as evidence with the verdict end to end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sessions import SECOND, Clock, Rank, Relay, aggregation, ask
from snapshot import Snapshot

from traceml_ray.analysis.anomalies import Anomaly, Machine, Samples, anomalies
from traceml_ray.analysis.step_stats import of_rows, span
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.text import WIDTH
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.reports.machines import Machines
from traceml_ray.signals.nodes.quantities import GPU_LIMITED, NODE_LIMITED
from traceml_ray.signals.nodes.records import GpuProcess, GpuSample, NodeSample
from traceml_ray.signals.nodes.sampler import xid_events
from traceml_ray.stages import N_STAGES, SEGMENT_BITS
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

GIB = 1 << 30
NODE, GPU = ([quantity.name for quantity in table] for table in (NODE_LIMITED, GPU_LIMITED))
ALL = (0, 1 << 62)
Process = GpuProcess


def gpu(index: int = 0, **fields: Any) -> GpuSample:
    """A device at work."""
    normal: dict[str, Any] = {
        "name": "H200", "util_pct": 98.0, "mem_used_bytes": GIB, "mem_total_bytes": 140 * GIB,
        "power_w": 500.0, "power_limit_w": 700.0, "sm_mhz": 1950.0, "sm_max_mhz": 1980.0, "throttle": [],
    }  # fmt: skip
    return GpuSample(index=index, **{**normal, **fields})


def sample(second: float, gpus: list[GpuSample] | None = None, **fields: Any) -> NodeSample:
    """A node at work; counters are given as rates per second."""
    normal: dict[str, Any] = {
        "cpu_pct": 40.0, "cpu_count": 8, "load1": 4.0, "mem_used_bytes": 50 * GIB,
        "mem_total_bytes": 100 * GIB, "disk_read_bytes": 1e6, "disk_write_bytes": 1e6, "net_rx_bytes": 1e6,
        "net_tx_bytes": 1e6, "swap_in_bytes": 0, "psi_cpu": 0.05, "psi_memory": 0.0, "psi_io": 0.02,
        "cpu_throttled_ns": 0,
    }  # fmt: skip
    values = {**normal, **fields}
    for name in ("disk_read_bytes", "disk_write_bytes", "net_rx_bytes", "net_tx_bytes", "swap_in_bytes"):
        values[name] = int(values[name] * second)
    values["cpu_throttled_ns"] = int(values["cpu_throttled_ns"] * second)
    return NodeSample(t_ns=int(second * SECOND), gpus=gpus, **values)


def machine(
    name: str,
    gpus: list[GpuSample] | None = None,
    *,
    named: tuple[int, ...] = (),
    before: dict[str, Any] | None = None,
    ranks: dict[int, int | None] | None = None,
    seconds: int = 20,
    **fields: Any,
) -> Machine:
    """A node that is the same in every second; `before`: what it was before."""
    during, earlier = Samples(), Samples()
    for second in range(1, seconds + 1):
        during.add(sample(second, gpus, **fields))
        earlier.add(sample(second, gpus if before is None else before.pop("gpus", gpus), **(before or {})))
    return Machine(name, during.between(*ALL), earlier.between(*ALL), ranks or {}, frozenset(named))


def kinds(shown_anomalies: tuple[Anomaly, ...]) -> list[tuple[str, str, int | None]]:
    return [(anomaly.kind, anomaly.node, anomaly.device) for anomaly in shown_anomalies]


NODE_ANOMALIES = [
    ({"mem_used_bytes": 98 * GIB}, "mem_used"),
    ({"swap_in_bytes": 30e6}, "swap_in_bps"),
    ({"psi_memory": 0.4}, "psi_memory"),
    ({"cpu_throttled_ns": 2e9}, "cpu_throttled"),
    ({"cpu_pct": 97.0}, "cpu_pct"),
    ({"psi_cpu": 0.6}, "psi_cpu"),
    ({"load1": 40.0}, "load"),
    ({"psi_io": 0.5}, "psi_io"),
    ({"disk_read_bytes": 800e6}, "disk_bps"),
    ({"net_rx_bytes": 900e6}, "net_bps"),
]
each_node_kind = pytest.mark.parametrize(
    ("fields", "kind"), NODE_ANOMALIES, ids=[kind for _, kind in NODE_ANOMALIES]
)


def test_node_anomaly_cases_cover_every_quantity() -> None:
    wanted = [quantity.name for quantity in NODE_LIMITED]
    reason = "for each limit of `quantities.NODE`, in order: a value above it here, one below it in `sample`"
    assert [kind for _, kind in NODE_ANOMALIES] == wanted, reason


@each_node_kind
def test_node_value_unlike_its_peers_is_an_anomaly(
    fields: dict[str, Any], kind: str, snapshot: Snapshot
) -> None:
    shown_anomalies = anomalies([machine("a", named=(0,), **fields), machine("b"), machine("c")])
    assert kinds(shown_anomalies) == [(kind, "a", None)]
    snapshot("evidence", shown_anomalies[0].text)
    assert (shown_anomalies[0].usual is None) == (kind == "mem_used")


@each_node_kind
def test_single_node_is_compared_with_itself_before(fields: dict[str, Any], kind: str) -> None:
    assert kinds(anomalies([machine("a", named=(0,), before={}, **fields)])) == [(kind, "a", None)]
    always = anomalies([machine("a", named=(0,), before=dict(fields), **fields)])
    assert kinds(always) == ([(kind, "a", None)] if kind == "mem_used" else [])


@each_node_kind
def test_value_equally_high_on_a_peer_is_no_anomaly(fields: dict[str, Any], kind: str) -> None:
    everywhere = [machine("a", named=(0,), before={}, **fields), machine("b", **fields), machine("c")]
    if kind != "mem_used":
        assert not anomalies(everywhere[:2])
        assert not anomalies(everywhere)  # one of two peers is enough: it is not this node's own


@pytest.mark.parametrize(
    "fields",
    [
        {"mem_used_bytes": 90 * GIB, "swap_in_bytes": 1e5, "psi_memory": 0.08},
        {"cpu_throttled_ns": 2e7, "cpu_pct": 85.0, "psi_cpu": 0.2, "load1": 10.0},
        {"psi_io": 0.15, "disk_read_bytes": 30e6, "net_tx_bytes": 40e6},
    ],
)
def test_value_a_little_above_the_peers_is_no_anomaly(fields: dict[str, Any]) -> None:
    warm = gpu(0, power_w=600.0, sm_mhz=1850.0)
    assert not anomalies([machine("a", [warm], named=(0,), **fields), machine("b", [gpu(0)])])


def test_value_near_its_limit_and_hardly_above_the_peers_is_no_anomaly() -> None:
    high = {"cpu_pct": 80.0, "psi_cpu": 0.3, "load1": 14.0, "psi_io": 0.3, "net_rx_bytes": 400e6}
    more = {"cpu_pct": 95.0, "psi_cpu": 0.45, "load1": 17.0, "psi_io": 0.4, "net_rx_bytes": 900e6}
    devices = [gpu(0, power_w=650.0, sm_mhz=1700.0)], [gpu(0, power_w=690.0, sm_mhz=1600.0)]
    assert not anomalies([machine("a", devices[1], named=(0,), **more), machine("b", devices[0], **high)])


def test_nodes_are_compared_with_themselves_before_when_all_are_slow(snapshot: Snapshot) -> None:
    rose = [machine(name, before={}, cpu_pct=97.0 + index) for index, name in enumerate("abc")]
    (anomaly,) = anomalies(rose, all_nodes=True)
    assert (anomaly.node, anomaly.kind) == ("c", "cpu_pct")
    snapshot("evidence", anomaly.text)
    assert not anomalies([machine("a", before={}), machine("b", before={})], all_nodes=True)


GPU_ANOMALIES: list[tuple[dict[str, Any], str]] = [
    ({"throttle": ["sw_thermal_slowdown"]}, "thermal"),
    ({"throttle": ["hw_slowdown"]}, "slowdown"),
    ({"throttle": ["sw_power_cap"]}, "power_cap"),
    ({"power_w": 699.0}, "power"),
    ({"sm_mhz": 1200.0}, "clock_lack"),
]
each_gpu_kind = pytest.mark.parametrize(
    ("fields", "kind"), GPU_ANOMALIES, ids=[kind for _, kind in GPU_ANOMALIES]
)


def test_device_anomaly_cases_cover_every_quantity() -> None:
    wanted = [quantity.name for quantity in GPU_LIMITED]
    reason = "for each limit of `quantities.GPU`, in order: a value above it here, one below it in `gpu`"
    assert [kind for _, kind in GPU_ANOMALIES] == wanted, reason


@each_gpu_kind
def test_device_value_unlike_its_peers_is_an_anomaly(
    fields: dict[str, Any], kind: str, snapshot: Snapshot
) -> None:
    shown_anomalies = anomalies(
        [machine("a", [gpu(0), gpu(1, **fields)], named=(0,)), machine("b", [gpu(0), gpu(1)])]
    )
    assert kinds(shown_anomalies) == [(kind, "a", 1)]
    snapshot("evidence", shown_anomalies[0].text)
    alike = [machine(name, [gpu(i, **fields) for i in range(2)], named=(0,) * (name == "a")) for name in "ab"]
    assert {anomaly.kind for anomaly in anomalies(alike)} <= {"thermal", "slowdown"}  # anomaly of themselves


def test_devices_of_the_named_rank_alone_are_examined_where_they_are_known(snapshot: Snapshot) -> None:
    def node(hot: int) -> list[GpuSample]:
        """Rank r (pid 70 + r) computes on device 1 - r: CUDA_VISIBLE_DEVICES turned them round."""
        reasons = [["hw_thermal_slowdown"] if index == hot else [] for index in (0, 1)]
        return [gpu(i, throttle=reasons[i], processes=[Process(71 - i, GIB, "python", [9])]) for i in (0, 1)]

    ranks: dict[int, int | None] = {70: 0, 71: 1}
    (anomaly,) = anomalies([machine("a", node(hot=0), named=(1,), ranks=ranks)])
    assert (anomaly.kind, anomaly.device) == ("thermal", 0)
    snapshot("evidence", anomaly.text)
    assert not anomalies([machine("a", node(hot=1), named=(1,), ranks=ranks)])


def test_clock_of_an_idle_device_is_no_anomaly() -> None:
    for idle in ({"throttle": ["gpu_idle"]}, {"util_pct": 1.0}):
        slow = gpu(0, sm_mhz=345.0, **idle)
        assert not anomalies([machine("a", [slow], named=(0,)), machine("b", [gpu(0)])])


def test_process_of_no_rank_on_the_device_is_an_anomaly(snapshot: Snapshot) -> None:
    process = Process(70, GIB, "python", [9, 1])
    worker = Process(75, GIB, "python", [70, 9, 1])
    foreign = Process(500, 12 * GIB, "serve", [499, 1])
    ranks: dict[int, int | None] = {70: 0, 71: None}  # 71: of another run of the session

    def node(name: str, *processes: Process, **other: Any) -> Machine:
        return machine(name, [gpu(0, processes=list(processes))], named=(0,), **{"ranks": ranks, **other})

    (anomaly,) = anomalies([node("a", process, worker, foreign)])
    snapshot("evidence", anomaly.text)
    assert (anomaly.kind, anomaly.device, anomaly.value) == ("foreign_process", 0, 12 * GIB)
    assert not anomalies([node("a", process, worker, Process(71, GIB))])
    assert not anomalies([node("a", foreign)]), "no rank is seen: pids may be of another namespace"
    monitors = machine("b", [gpu(0, processes=[Process(80, GIB), Process(81, 1, "serve")])], ranks={80: 2})
    assert not anomalies([node("a", process, foreign), monitors]), "it is on the other devices, too"


def test_process_of_no_rank_must_stay_to_be_an_anomaly() -> None:
    samples = Samples()
    for second in range(20):
        there = [Process(500, GIB, "serve")] if second < 8 else []
        samples.add(sample(second, [gpu(0, processes=[Process(70, GIB), *there])]))
    passing = Machine("a", samples.between(*ALL), None, {70: 0}, frozenset({0}))
    assert not anomalies([passing])


def test_unknown_value_is_no_anomaly() -> None:
    samples, empty = Samples(), Samples()
    for second in range(20):
        samples.add(NodeSample(second * SECOND, *[None] * 9, [GpuSample(0, *[None] * 4)]))
    empty.add(NodeSample(0, *[None] * 9))
    for held in (samples, empty):
        part = held.between(*ALL)
        assert not anomalies([Machine("a", part, part, {}, frozenset({0})), machine("b", [gpu(0)])])
    few = machine("a", named=(0,), seconds=7, cpu_pct=99.0)
    assert not anomalies([few, machine("b")])


def test_anomaly_is_in_most_of_the_samples() -> None:
    def busy(share: float) -> Machine:
        samples = Samples()
        for second in range(1, 21):
            samples.add(sample(second, cpu_pct=98.0 if second <= 20 * share else 40.0))
        return Machine("a", samples.between(*ALL), None, {}, frozenset({0}))

    assert not anomalies([busy(0.5), machine("b")])
    assert kinds(anomalies([busy(0.75), machine("b")])) == [("cpu_pct", "a", None)]


NOISES: dict[str, Callable[[np.random.Generator, float], float]] = {
    "none": lambda rng, level: level + 0 * rng.uniform(),
    "a fifth": lambda rng, level: level * rng.uniform(0.8, 1.2),
    "heavy": lambda rng, level: min(level * rng.lognormal(0, 0.5), 1.0),
    "any": lambda rng, level: rng.uniform(0, 1) + 0 * level,
    "on and off": lambda rng, level: float(rng.uniform(0, 1) < level),
}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    noise=st.sampled_from(sorted(NOISES)),
    level=st.floats(0, 0.9),
    nodes=st.integers(1, 5),
    all_nodes=st.booleans(),
)
def test_noise_is_no_anomaly(seed: int, noise: str, level: float, nodes: int, all_nodes: bool) -> None:
    """Every value of every node drawn alike, from calm to wild, now and before."""
    rng = np.random.default_rng(seed)

    def draw() -> float:
        return NOISES[noise](rng, level)

    def noisy() -> Any:
        samples = Samples()
        total = np.zeros(6)
        for second in range(30):
            total += [1e9 * draw() for _ in range(6)]
            names = ("disk_read_bytes", "disk_write_bytes", "net_rx_bytes", "net_tx_bytes", "swap_in_bytes")
            counters = dict(zip(names, total.astype(int).tolist(), strict=False))
            reasons = ["sw_power_cap"] if draw() > 0.5 else []
            devices = [
                gpu(i, power_w=700 * draw(), sm_mhz=1980 * (1 - draw()), throttle=reasons) for i in range(2)
            ]
            plain = sample(1, devices, cpu_pct=100 * draw(), load1=40 * draw(), psi_cpu=draw(), psi_io=draw())
            values = {name: getattr(plain, name) for name in plain.__struct_fields__}
            values.update(
                counters, t_ns=second * SECOND, psi_memory=draw(), mem_used_bytes=int(94 * draw() * GIB)
            )
            values["cpu_throttled_ns"] = int(total[5])
            samples.add(NodeSample(**values))
        return samples.between(*ALL)

    named = frozenset() if all_nodes else frozenset({0})
    drawn = [
        Machine(str(index), noisy(), noisy(), {}, named if index == 0 else frozenset())
        for index in range(nodes)
    ]
    assert anomalies(drawn, all_nodes=all_nodes) == ()


def test_samples_are_bounded_and_go_back_to_the_beginning() -> None:
    samples = Samples(size=64)
    for second in range(5000):
        samples.add(sample(second, [gpu(0, processes=[Process(second, None)])], cpu_pct=second / 50))
    every, recent = samples.between(*ALL), samples.between(4970 * SECOND, 1 << 62)
    assert 32 <= len(every.node) <= 64
    assert recent.node[:, NODE.index("cpu_pct")].tolist() == pytest.approx(
        [s / 50 for s in range(4970, 5000)]
    )
    assert recent.gpus.shape == (30, 1, len(GPU_LIMITED))
    assert every.node[0, NODE.index("cpu_pct")] == 0.0
    assert [devices[0][0].pid for devices in recent.processes] == list(range(4970, 5000))


def test_counter_that_is_reset_has_no_rate_there() -> None:
    samples = Samples()
    for second, swapped in enumerate((5_000_000, 6_000_000, 1_000, 2_001_000)):
        samples.add(NodeSample(second * SECOND, *[None] * 9, swap_in_bytes=swapped))
    rates = samples.between(*ALL).node[:, NODE.index("swap_in_bps")]
    assert rates.tolist() == pytest.approx([np.nan, 1e6, np.nan, 2e6], nan_ok=True)


@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=30), st.data())
def test_step_times_are_laid_out_back_from_the_newest_row(took: list[int], data: st.DataObject) -> None:
    keys = np.arange(len(took)) << SEGMENT_BITS
    rows = np.zeros((len(took), N_STAGES), np.int64)
    rows[:, 1] = took
    first = data.draw(st.integers(0, len(took) - 1))
    last = data.draw(st.integers(first, len(took) - 1))
    end = 10**18
    assert span(of_rows(keys, rows), end, first, last) == (
        end - sum(took[first:]),
        end - sum(took[last + 1 :]),
    )
    assert span(of_rows(keys, rows), end, len(took), None) is None


# -- from the relays to the report ---------------------------------------------------------------

LATE = [1, 6, 0, 63, 29, 1]
WAITING = [1, 2, 0, 33, 29, 35]
BALANCED = [1, 2, 0, 33, 29, 5]
BASE_S = 1_700_000_000


class Played:
    """Nodes of two ranks, each rank on a device of its own; ten steps a second."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.clock = Clock()
        self.folder = folder
        self.aggregator: AggregatorCore = aggregation(folder, self.clock, world_size=2 * nodes, nnodes=nodes)
        self.ranks = [Rank(i, 2 * nodes, per_node=2) for i in range(2 * nodes)]
        self.relays = [Relay(i) for i in range(nodes)]
        self.gone: int | None = None
        self.xid: dict[int, int] = {}
        """A critical error of the device of a rank, in the next second."""

    def start_up(self, seconds: int) -> None:
        """Nobody trains yet."""
        for _ in range(seconds):
            for relay in self.relays:
                self.aggregator.ingest(relay.message(node=[sample(self.clock() / SECOND, [gpu(0), gpu(1)])]))
            self.clock.tick()

    def play(self, seconds: int, late: int | None, hot: int | None, **busy: Any) -> None:
        """Rank `late` is late out of forward, the device of rank `hot` throttles, its node is `busy`."""
        for _ in range(seconds):
            for node, relay in enumerate(self.relays):
                gpus = []
                for rank in (2 * node, 2 * node + 1):
                    pid = self.ranks[rank].identity.pid
                    reasons = ["sw_thermal_slowdown"] if rank == hot else []
                    clock = 1100.0 if rank == hot else 1950.0
                    more = {"processes": [Process(pid, GIB, "python")], "xid": []}
                    if rank in self.xid:
                        more["xid"] = [self.xid.pop(rank)]
                    gpus.append(gpu(rank % 2, throttle=reasons, sm_mhz=clock, **more))
                fields = busy if hot is not None and hot // 2 == node else {}
                seen = sample(self.clock() / SECOND, gpus, **fields)
                batches = []
                for rank in (2 * node, 2 * node + 1):
                    ms = BALANCED if late is None else LATE if rank == late else WAITING
                    if rank != self.gone:
                        batches.append(self.ranks[rank].batch(10, ms))
                self.aggregator.ingest(relay.message(*batches, node=[seen], events=xid_events(seen)))
            self.clock.tick()
            self.aggregator.commit()
            self.aggregator.judge()


def test_straggler_on_a_throttling_device_has_evidence_and_its_peer_has_none(tmp_path: Path) -> None:
    run = Played(tmp_path)
    run.play(12, late=None, hot=None)
    assert ask(run.aggregator, "verdict")["machine"] is None  # it names no one
    run.play(4, late=3, hot=3, cpu_pct=98.0)
    fresh = ask(run.aggregator, "verdict")
    assert (fresh["rank"], fresh["machine"]) == (3, None)  # too few samples to know
    run.play(11, late=3, hot=3, cpu_pct=98.0)
    live = ask(run.aggregator, "verdict")
    run.play(15, late=0, hot=3)  # now another rank is late, and it still throttles
    other = ask(run.aggregator, "verdict")
    run.aggregator.finish(wire.Finish(codec.VERSION, 0))
    summary = json.loads((tmp_path / "summary.json").read_bytes())

    assert (live["label"], live["rank"]) == ("straggler", 3)
    expected = ["CPU 98 % busy (other nodes 40 %)", "GPU 1 (rank 3): throttles: too hot"]
    expected.append("GPU 1 (rank 3): SM clock 44 % below its highest (its peers 1.5 %)")
    assert [anomaly["text"] for anomaly in live["machine"]] == expected
    assert {anomaly["node"] for anomaly in live["machine"]} == {"host-1"}
    assert (other["rank"], other["machine"]) == (0, [])

    spans = {span["rank"]: span for span in summary["verdicts"] if span["label"] == "straggler"}
    assert [anomaly["text"] for anomaly in spans[3]["machine"]] == expected
    assert spans[0]["machine"] == []
    healthy = [span["machine"] for span in summary["verdicts"] if span["label"] == "healthy"]
    assert healthy == [None] * len(healthy)


def test_report_has_the_evidence_with_the_verdict(tmp_path: Path) -> None:
    run = Played(tmp_path)
    run.play(4, late=None, hot=None)
    run.play(26, late=3, hot=3)
    run.aggregator.finish(wire.Finish(codec.VERSION, 0))
    run.aggregator.close()
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert [anomaly["kind"] for anomaly in summary["verdict"]["machine"]] == ["thermal", "clock_lack"]
    text = (tmp_path / "report.txt").read_text()
    assert max(map(len, text.splitlines())) <= WIDTH
    position = text.index("at the same time on host-1: GPU 1 (rank 3): throttles: too hot; GPU 1")
    assert text.index("Why  ") < position < text.index("Next  ")


BUSY = {"cpu_pct": 98.0, "psi_io": 0.5, "disk_read_bytes": 800e6, "net_rx_bytes": 600e6, "load1": 40.0}


def test_usual_values_of_a_node_exclude_the_time_before_training(tmp_path: Path) -> None:
    run = Played(tmp_path, nodes=1)
    run.start_up(60)
    run.play(30, late=1, hot=1, **BUSY)  # late, and at work, from the first step on
    live = ask(run.aggregator, "verdict")
    run.aggregator.finish(wire.Finish(codec.VERSION, 0))
    stored = json.loads((tmp_path / "summary.json").read_bytes())["verdict"]
    for verdict in (live, stored):
        assert (verdict["label"], verdict["rank"]) == ("straggler", 1)
        assert [anomaly["kind"] for anomaly in verdict["machine"]] == ["thermal", "clock_lack"]


def test_single_node_without_earlier_training_has_no_evidence(tmp_path: Path) -> None:
    run = Played(tmp_path, nodes=1)
    run.start_up(60)
    run.play(30, late=1, hot=None)
    live = ask(run.aggregator, "verdict")
    run.aggregator.finish(wire.Finish(codec.VERSION, 0))
    stored = json.loads((tmp_path / "summary.json").read_bytes())["verdict"]
    for verdict in (live, stored):
        assert (verdict["rank"], verdict["machine"]) == (1, None)


def test_single_node_in_training_is_compared_with_its_earlier_training(tmp_path: Path) -> None:
    run = Played(tmp_path, nodes=1)
    run.start_up(60)
    run.play(60, late=None, hot=1)
    run.play(30, late=1, hot=1, **BUSY)
    live = ask(run.aggregator, "verdict")
    run.aggregator.finish(wire.Finish(codec.VERSION, 0))
    spans = json.loads((tmp_path / "summary.json").read_bytes())["verdicts"]
    (late,) = (span for span in spans if span["label"] == "straggler")
    for verdict in (live, late):
        texts = {anomaly["kind"]: anomaly["text"] for anomaly in verdict["machine"]}
        assert texts["net_bps"] == "network 601 MB/s (before 2 MB/s)"
        assert texts["cpu_pct"] == "CPU 98 % busy (before 40 %)"


def test_death_is_examined_from_a_minute_before_it_and_only_once(tmp_path: Path) -> None:
    run = Played(tmp_path)
    run.play(20, late=None, hot=3, mem_used_bytes=99 * GIB)
    run.aggregator.ingest(run.relays[1].message(lost=[run.ranks[3].process_id]))
    run.aggregator.judge()
    first = ask(run.aggregator, "verdict")
    run.gone = 3
    run.play(20, late=None, hot=None)
    later = ask(run.aggregator, "verdict")
    run.aggregator.finish(wire.Finish(codec.VERSION, 1))
    stored = json.loads((tmp_path / "summary.json").read_bytes())["verdict"]
    for verdict in (first, later, stored):
        assert (verdict["label"], verdict["rank"]) == ("rank_lost", 3)
        assert [anomaly["kind"] for anomaly in verdict["machine"]] == ["mem_used", "thermal", "clock_lack"]


def test_critical_error_is_evidence_even_of_a_short_time(tmp_path: Path) -> None:
    run = Played(tmp_path)
    run.play(12, late=None, hot=None)
    run.xid = {2: 94, 1: 31}  # of the device beside the late one; and on another node
    run.play(4, late=3, hot=None)
    live = ask(run.aggregator, "verdict")
    run.aggregator.finish(wire.Finish(codec.VERSION, 0))
    run.aggregator.close()
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    (late,) = (span for span in summary["verdicts"] if span["label"] == "straggler")
    for verdict in (live, late):
        (anomaly,) = verdict["machine"]
        assert (anomaly["kind"], anomaly["node"], anomaly["device"], anomaly["value"]) == (
            "xid",
            "host-1",
            0,
            94,
        )
        assert anomaly["text"] == "GPU 0 (rank 2): XID 94: contained memory error"
    report = (tmp_path / "report.txt").read_text()
    assert re.search(r"xid +host-1 +GPU 0: XID 94: contained memory error", report)
    assert re.search(r"xid +host-0 +GPU 1: XID 31: GPU memory page fault", report)


def test_critical_error_that_killed_a_process_is_in_the_next_sample(tmp_path: Path) -> None:
    run = Played(tmp_path)
    run.play(3, late=None, hot=None)
    run.gone, run.xid = 3, {3: 79}
    run.play(1, late=None, hot=None)
    run.aggregator.ingest(run.relays[1].message(lost=[run.ranks[3].process_id]))
    run.aggregator.finish(wire.Finish(codec.VERSION, 1))
    verdict = json.loads((tmp_path / "summary.json").read_bytes())["verdict"]
    assert [anomaly["text"] for anomaly in verdict["machine"]] == [
        "GPU 1 (rank 3): XID 79: the GPU has fallen off the bus"
    ]


def test_hang_evidence_covers_the_time_since_the_last_row() -> None:
    def seen(t_ns: int) -> RankProcess:
        return RankProcess(1, "s", last_seen_ns=t_ns)

    machines = Machines(lambda *_: {}, {0: seen(90), 1: seen(95)}, [], {})
    none = of_rows(np.empty(0, np.int64), np.empty((0, N_STAGES), np.int64))
    hang = Verdict(label="hang", rank=0, ranks=(0,), began_ns=60)
    assert machines.when(hang, none) == (60, 95)
    assert machines.when(replace(hang, lasted_s=2e-8), none) == (60, 80)
    assert machines.when(Verdict(label="healthy"), none) is None
    assert machines.when(Verdict(label="straggler", rank=7, ranks=(7,)), none) is None


def test_session_file_has_the_samples_as_columns_and_as_excerpts(tmp_path: Path) -> None:
    run = Played(tmp_path)
    run.play(30, late=3, hot=3, psi_io=0.25)
    run.aggregator.commit()
    run.aggregator.close()
    path = tmp_path / "session.sqlite"
    with SessionFile(path) as session:
        columns = session.node_columns()["node-1"]
        assert list(columns[None, "psi_io"]) == [0.25] * 30
        assert next(iter(columns[None, "disk_bps"])) == pytest.approx(2e6, rel=0.01)
        assert list(columns[1, "sm_mhz"]) == [1100.0] * 30
        begin = BASE_S * SECOND + 10 * SECOND
        part = session.machines(["node-1"], begin, begin + 4 * SECOND)["node-1"]
        assert part.node.shape == (5, len(NODE_LIMITED))
        assert part.gpus[:, 1, GPU.index("thermal")].tolist() == [1.0] * 5


def test_samples_of_a_long_time_are_thinned_and_critical_errors_kept(tmp_path: Path) -> None:
    aggregator, relay, clock = aggregation(tmp_path), Relay(), Clock()
    for second in range(1500):
        xid = [79] if second == 998 else []
        seen = sample(clock() / SECOND, [gpu(0, processes=[], xid=xid)])
        aggregator.ingest(relay.message(node=[seen], events=xid_events(seen)))
        clock.tick()
    aggregator.commit()
    aggregator.close()
    with SessionFile(tmp_path / "session.sqlite") as session:
        begin = BASE_S * SECOND
        part = session.machines(["node-0"], begin, begin + 1200 * SECOND)["node-0"]
        assert 90 <= len(part.node) <= 130
        assert np.nanmedian(part.node[:, NODE.index("disk_bps")]) == pytest.approx(2e6, rel=0.01)
        assert part.xids == [(0, 79)]  # whatever else is left out
        assert session.machines(["node-0", "gone"], 0, 9)["gone"].node.shape == (0, len(NODE_LIMITED))
