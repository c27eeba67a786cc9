"""What is known of each signal as findings: order, keys, and what may explain which."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.analysis.labels import LABELS, Label
from traceml_ray.analysis.uneven_work import ExpertLoad, Reason, loads
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.reports.headlines import beside, line_of, named
from traceml_ray.signals.check.judge import CheckResult, Slow
from traceml_ray.signals.collectives.judge import CollectiveKind, CollectiveTimes, GroupTimes
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.finding import MOST, Finding, key_of, listed, of_verdict
from traceml_ray.signals.goodput.answer import Goodput
from traceml_ray.signals.goodput.view import GoodputView
from traceml_ray.signals.layers.judge import LayerFinding, Layers
from traceml_ray.signals.memory import shapes
from traceml_ray.signals.memory.shapes import Attribution, CollectiveOnset, FirstCause, Memory
from traceml_ray.signals.sharding.judge import Imbalance, ModelShards, ShardingInfo
from traceml_ray.signals.views import VIEWS, confirmed, findings_of


def verdict(label: Label = "straggler", **given: Any) -> Verdict:
    about = {"ranks": (5,), "rank": 5, "nodes": ("node-1",), "stage": "forward", "stages": ("forward",)}
    usual = {"why": "It is late.", "next": "Look.", "cost_pct": 12.0, "cost_s": 3.0, "from_step": 40}
    return Verdict(label=label, **{**about, **usual, **given})  # type: ignore[arg-type]


def grows(rank: int, kind: Any = "creep", severity: Any = "warning", **given: Any) -> shapes.MemoryFinding:
    about = {"node": f"node-{rank // 4}", "device": rank % 4, "confidence": "high", "from_ns": 7, "to_ns": 9}
    more = {
        "evidence": {"from_step": 3, "forecast_s": None},
        "next": ["Look.", "Then mend."],
        "why": "It grows.",
    }
    return shapes.MemoryFinding(kind=kind, rank=rank, severity=severity, **{**about, **more, **given})


def tokens(**counts: list[int]) -> list[ExpertLoad]:
    """The loads of routers by the tokens of their experts."""
    return loads(
        [[RouterTokens(number, *count_of_expert) for number, count_of_expert in enumerate(counts.items())]]
    )


SLOW = Layers(
    first_step=8,
    last_step=90,
    findings=[
        LayerFinding(5, "node-1", "head", "Linear", "forward", 2.0, 4.0, 2.0, "layer head takes longer"),
        LayerFinding(2, "node-0", None, "", "backward", 2.0, 4.0, 2.0, "all layers take longer"),
    ],
)
UNEVEN = Imbalance(
    ranks=[0],
    bytes=9,
    median_bytes=3.0,
    ratio=3.0,
    why="Rank 0 has more.",
    next="Pad.",
)
_MODEL = ModelShards(
    ranks=[0, 1], groups=1, full_bytes=2, shards=2, replicas=1, mesh_shape=[2], mesh_dims=[], dtypes={},
    resharded={}, offloaded=False, uneven=[], uneven_count=0, imbalance=None,
)  # fmt: skip
SHARDS = ShardingInfo(models=[_MODEL, msgspec.structs.replace(_MODEL, imbalance=UNEVEN)], per_rank={})

_GROUP = GroupTimes(
    group="3", ranks=[6, 7], nodes=1, matched=40, ms=9.0, low_ms=8.0, high_ms=9.5, wait_ms=0.1,
    algorithm_gb_per_s=1.0, bus_gb_per_s=1.0,
)  # fmt: skip
SLOW_GROUP = CollectiveTimes(
    kinds=[
        CollectiveKind(
            op="all_reduce", source="host", description="", group_size=2, nodes=1, groups=4, calls=40,
            calls_per_step=1.0, bytes_per_call=1e7, host_ms=2.0, ms=1.0, wait_ms=0.1, algorithm_gb_per_s=10.0,
            bus_gb_per_s=10.0, why="", slow=["3"], slowest=[_GROUP],
        )
    ]
)  # fmt: skip


SLOW_NODE = CheckResult(
    slow=[
        Slow(
            what="device", nodes=["node-1"], part="GPU 3", rank=5, device=3, probe="gpu_matmul", lower=0.14,
            value=6e14, usual=7e14, unit="FLOP/s", peers=7, why="It multiplies slower.", next="Replace it.",
        )
    ]
)  # fmt: skip


def test_slow_device_explains_the_finding_of_its_rank() -> None:
    straggler, slow = findings_of(verdict(), None, {"check": SLOW_NODE})
    assert slow.explains == straggler.key and slow.key == "slow_device:node-1:GPU 3"
    _, other = findings_of(verdict(ranks=(2,), rank=2), None, {"check": SLOW_NODE})
    assert other.explains is None


@pytest.mark.parametrize(
    "name", ["goodput", "layers", "collectives", "check", "sharding", "experts", "output"]
)
def test_block_of_a_view_is_read_as_its_answer_with_or_without_what_json_does_to_it(name: str) -> None:
    view, answers = VIEWS[name], {"layers": SLOW, "sharding": SHARDS, "collectives": SLOW_GROUP}
    answer = {**answers, "check": SLOW_NODE, "goodput": RESTARTED, "experts": tokens(moe=[9, 1])}.get(
        name, []
    )
    block = view.block(answer)
    for read in (block, msgspec.json.decode(msgspec.json.encode(block))):
        assert view.of_block(read) == answer
    if name in ("goodput", "collectives", "check", "layers"):
        assert view.of_block(None) == type(answer)()


DAY = 86_400 * 1_000_000_000
RESTARTED = Goodput(
    rank_s=8 * 86_400.0, from_ns=1, to_ns=1 + DAY, ranks=8, goodput_pct=60.0,
    seconds={"productive": 0.6 * 8 * 86_400, "waiting": 0.2 * 8 * 86_400, "wasted": 0.15 * 8 * 86_400},
)  # fmt: skip


def test_what_costs_a_tenth_of_a_run_is_a_finding_and_waiting_is_the_verdicts_subject() -> None:
    (one,) = GoodputView().findings(RESTARTED, [], None)
    assert (one.label, one.severity, one.what) == ("badput", "info", "steps that were repeated")
    assert (one.cost, one.about, one.cost_s) == (pytest.approx(0.15), "run", pytest.approx(0.15 * 86_400))
    short = msgspec.structs.replace(RESTARTED, to_ns=300 * 1_000_000_000)
    little = msgspec.structs.replace(RESTARTED, seconds={"productive": 1.0, "waiting": 0.9 * 8 * 86_400})
    assert [*GoodputView().findings(short, [], None), *GoodputView().findings(little, [], None)] == []


def test_slow_node_confirms_a_straggler_there_and_is_not_said_again_beside_it() -> None:
    node = msgspec.structs.replace(SLOW_NODE.slow[0], what="node", part="CPU", rank=None, device=None)
    answers = {"check": CheckResult(slow=[node])}
    straggler, slow = findings = findings_of(confirmed(verdict(), answers), None, answers)
    assert (slow.label, slow.explains, slow.why) == ("slow_node", straggler.key, node.why)
    assert straggler.why == f"It is late. Confirmed by a check: {node.why}"
    assert straggler.next == node.next and straggler.evidence["confirmed"] is True
    assert beside(findings, straggler.key) == []
    unsaid = findings_of(verdict(), None, answers)  # as of a session that an older version has stored
    assert beside(unsaid, straggler.key) == [slow]


def test_verdict_is_first_then_what_costs_most_then_what_is_most_severe() -> None:
    one = verdict(
        also=(Verdict(label="imbalance", cost_pct=4.0, stages=("data",), why="Uneven.", next="Even."),)
    )
    memory = Memory(findings=[grows(2), grows(3, severity="critical"), grows(1, "transient_spike", "info")])
    experts = tokens(moe=[9, 1, 1, 1], even=[1, 1])
    answers = {"memory": memory, "layers": SLOW, "sharding": SHARDS, "experts": experts}
    answers |= {"collectives": SLOW_GROUP, "check": SLOW_NODE}
    findings = findings_of(one, None, answers)
    assert [finding.label for finding in findings] == [
        "straggler", "imbalance", "memory_creep", "memory_creep", "slow_layer", "slow_layer",
        "uneven_shards", "uneven_experts", "slow_collective", "slow_device", "memory_transient_spike",
    ]  # fmt: skip
    assert [finding.ranks for finding in findings[2:5]] == [(3,), (2,), (5,)]
    costly = msgspec.structs.replace(findings[-1], cost=0.5)
    assert listed(findings[:2], [*findings[2:], costly])[2] == costly


def test_finding_of_the_verdict_has_its_figures() -> None:
    named_so_far: Any = {"stages": ("forward",), "ranks": (5,), "nodes": ("node-1",), "pattern": "lasting"}
    lasted: Any = {"seconds": 9.0, "cost_s": 3.0, "rank_hours": 0.0, "cost_pct": 12.0, "cost_range_pct": None}
    episode = TimedEpisode(
        **{**named_so_far, **lasted}, label="straggler", stage="forward", rank=5, node="node-1", why="",
        next="", confidence=None, from_step=40, to_step=90, goes_on=True,
        started_at="2026-03-01T03:31:10.250+00:00",
    )  # fmt: skip
    one = verdict(about="run", z=5.0, confidence="high", to_step=90)
    (finding,) = of_verdict(one, [episode])
    assert (finding.cost, finding.cost_s, finding.about, finding.why) == (0.12, 3.0, "run", "It is late.")
    assert (finding.from_step, finding.to_step, finding.from_ns, finding.to_ns) == (
        40,
        90,
        1772335870250000000,
        None,
    )
    assert finding.evidence["z"] == 5.0 and "exit_reason" not in finding.evidence
    assert finding.headline == named(one) == "straggler: rank 5 (node-1) in forward"
    assert line_of(finding) == "straggler: rank 5 (node-1) in forward, 12 % of the run, 3 s"


@pytest.mark.parametrize("label", LABELS)
def test_verdict_is_a_finding_where_it_names_something(label: Label) -> None:
    one = verdict(label, span="save")
    findings = of_verdict(one)
    assert [finding.severity for finding in findings] == (
        [LABELS[label].severity] if LABELS[label].kind in ("finding", "failure", "watching") else []
    )
    assert all(finding.headline == named(one) for finding in findings)


def test_key_stays_while_the_same_is_found_and_no_two_are_alike() -> None:
    early, late = (
        of_verdict(verdict(cost_pct=cost, to_step=step))[0] for cost, step in ((3.0, 60), (9.0, 90))
    )
    assert early.key == late.key == "straggler:5:forward"
    swapped = (
        of_verdict(verdict(stages=stages))[0].key for stages in (("data", "forward"), ("forward", "data"))
    )
    assert len({*swapped}) == 1
    assert key_of("straggler", range(4096), "data") == "straggler:0,1,2,3,4,5,6,7,+4088:data"
    memory = Memory(findings=[grows(2, "step_change"), grows(2, "step_change", from_ns=8)])
    keys = [finding.key for finding in findings_of(None, None, {"memory": memory})]
    assert keys == ["memory_step_change:2:device2", "memory_step_change:2:device2#2"]


def test_many_findings_are_bounded() -> None:
    memory = Memory(findings=[grows(rank) for rank in range(4 * MOST)])
    findings = findings_of(verdict(), None, {"memory": memory})
    assert len(findings) == MOST and findings[0].signal == "steps"


def test_layer_explains_a_rank_that_is_late_where_it_is_slow() -> None:
    late, slow, other = findings_of(verdict(), None, {"layers": SLOW})
    assert (slow.explains, other.explains) == (late.key, None)
    assert (slow.what, other.what, slow.why) == ("head", "all layers", "Layer head takes longer.")
    elsewhere = findings_of(verdict(stages=("data",)), None, {"layers": SLOW})
    assert [finding.explains for finding in elsewhere] == [None] * 3


def test_anomaly_of_a_node_may_explain_the_verdict() -> None:
    hot = Anomaly(kind="gpu_temperature", node="node-1", device=2, value=94.0, text="GPU 2 at 94 °C")
    late, node = findings_of(verdict(machine=(hot,)), None, {})
    assert (node.label, node.nodes, node.device, node.explains) == ("node_anomaly", ("node-1",), 2, late.key)
    assert node.headline == "node anomaly: gpu temperature on node-1" and node.severity == "info"


def test_growth_may_explain_a_death_for_lack_of_memory() -> None:
    memory = Memory(findings=[grows(5), grows(2), grows(5, "transient_spike")])
    oom, same_rank, other, spike = findings_of(verdict("oom", cost_pct=None), None, {"memory": memory})
    assert (same_rank.explains, other.explains, spike.explains) == (oom.key, None, None)
    assert [finding.explains for finding in findings_of(verdict(), None, {"memory": memory})] == [None] * 4


def test_relations_of_memory_are_findings_that_explain_others() -> None:
    about = {"delta_bytes": 5, "counter": "allocated_bytes", "why": "It was first."}
    memory = Memory(
        findings=[grows(5), grows(2), grows(5, "persistent_drift")],
        first_cause=FirstCause(
            rank=5, node="node-1", device=1, at_ns=7, lead_ns=3, lead_bound_ns=1, confidence="high",
            coverage=1.0, next=["Look."], **about,
        ),
        collective_onset=CollectiveOnset(at_ns=7, ranks=[2, 5], **about),
        collectives=[
            Attribution(
                kind="collective_likely", rank=5, device=1, finding="persistent_drift", from_ns=7,
                op="all_reduce", group="world", bytes=4, evidence={"calls": 9},
                why="It stands with all_reduce.",
            )
        ],
    )  # fmt: skip
    by_label = {finding.label: finding for finding in findings_of(None, None, {"memory": memory})}
    assert by_label["memory_collective_likely"].explains == by_label["memory_persistent_drift"].key
    assert by_label["memory_collective_likely"].evidence == {"calls": 9, "bytes": 4, "group": "world"}
    assert by_label["memory_first_cause"].explains == "memory_creep:2:device2", "it began before that"
    assert by_label["memory_collective_onset"].explains == "memory_creep:5:device1"
    assert by_label["memory_creep"].next == "Look. Then mend." and by_label["memory_creep"].from_step == 3


def test_uneven_experts_may_explain_an_imbalance() -> None:
    findings = findings_of(verdict(), None, {"experts": tokens(moe=[7, 1], even=[5, 5])})
    assert [finding.what for finding in findings] == [None, "moe"] and findings[1].explains is None
    why = verdict("imbalance", ranks=(), rank=None, reason=Reason(what="experts"))
    imbalance, uneven = findings_of(why, None, {"experts": tokens(moe=[7, 1])})
    assert uneven.explains == imbalance.key


def test_what_is_only_information_stands_beside_the_verdict_where_it_explains_something() -> None:
    def one(key: str, severity: Any, explains: str | None = None, signal: Any = "memory") -> Finding:
        return Finding(key=key, signal=signal, label=key, severity=severity, explains=explains)

    steps, leak = one("late", "warning", signal="steps"), one("leak", "critical")
    rest = [
        one("spike", "info"),
        one("first", "info", "leak"),
        one("slow", "warning"),
        one("hot", "info", "late"),
    ]
    findings = [steps, leak, *rest]
    assert [finding.key for finding in beside(findings, "late")] == ["leak", "first", "slow", "hot"]
    assert [finding.key for finding in beside(findings, "leak")] == ["first", "slow", "hot"], (
        "the verdict is read, too"
    )
    assert [finding.key for finding in beside(findings, "late", all_of=True)] == [
        "leak",
        "spike",
        "first",
        "slow",
        "hot",
    ]
    assert beside([], None) == []
