"""Turns what is known of each signal into findings: pure functions, one for each signal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from traceml_ray.analysis import experts
from traceml_ray.analysis.experts import ExpertLoad
from traceml_ray.analysis.labels import LABELS, Label
from traceml_ray.analysis.reasons import UNEVEN_EXPERTS
from traceml_ray.signals.finding import MOST, Finding, key_of, known, listed
from traceml_ray.signals.layers.judge import LayerFinding, Layers
from traceml_ray.signals.memory import shapes
from traceml_ray.signals.memory.shapes import Attribution, Memory

_SHOWN = ("finding", "failure", "watching")
"""Kinds of labels that are findings: the others say that nothing was found, or why that is not known."""
_OF_VERDICT = (
    *("pattern", "chronic", "excess_pct", "gain_pct", "z", "rank_hours_per_hour", "host_bound", "coverage"),
    *("exit_reason", "open_stage", "lasted_s"),
)
_GROWTH = ("creep", "persistent_drift")
_NEXT_LAYER = "Look at what this rank does in that layer: its input, its device."
_NEXT_EXPERTS = "Even out the load of the experts: an auxiliary loss, a capacity factor, another placement."
_ALL_LAYERS = "all layers"


def findings_of(
    verdict: Mapping[str, Any] | None,
    *,
    memory: Memory | None = None,
    layers: Layers | None = None,
    sharding: Mapping[str, Any] | None = None,
    loads: Sequence[ExpertLoad] = (),
) -> list[Finding]:
    """
    Return all findings of a run, in order, with what may explain which.

    Args:
        verdict: on its steps (`results.VerdictInfo`), with `episodes` where they are known.
        memory: of its ranks.
        layers: that were measured.
        sharding: how its models are divided (`summary_shape.ShardingInfo`).
        loads: of the experts of its routers.
    """
    steps = of_verdict(verdict) if verdict else []
    others = [
        *(of_machine(verdict.get("machine") or (), steps) if verdict else ()),
        *(of_memory(memory, steps) if memory else ()),
        *(of_layers(layers, steps) if layers else ()),
        *(of_sharding(sharding) if sharding else ()),
        *of_experts(loads, steps, verdict),
    ]
    return listed(steps, others)


def of_verdict(verdict: Mapping[str, Any]) -> list[Finding]:
    """Return what the verdict names, then what it names `also`; nothing where it names nothing."""
    shown = [one for one in (verdict, *(verdict.get("also") or ())) if LABELS[_label(one)].kind in _SHOWN]
    return [_named(one, verdict.get("episodes") or ()) for one in shown]


def _named(one: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> Finding:
    label, stages = _label(one), one["stages"] or ([one["stage"]] if one["stage"] else [])
    episode: Mapping[str, Any] = next(
        (
            episode
            for episode in episodes
            if episode["label"] == label and episode["from_step"] == one.get("from_step")
        ),
        {},
    )
    cost_pct, began_ns = one.get("cost_pct"), one.get("began_ns")
    return Finding(
        key=key_of(label, one["ranks"], "+".join(sorted(stages))),
        signal="steps",
        label=label,
        severity=LABELS[label].severity,
        ranks=tuple(one["ranks"]),
        nodes=nodes_named(one),
        stages=tuple(stages),
        what=one.get("span"),
        from_step=one.get("from_step"),
        to_step=one.get("to_step"),
        from_ns=began_ns if began_ns is not None else _ns(episode.get("started_at")),
        to_ns=_ns(episode.get("ended_at")),
        cost=None if cost_pct is None else cost_pct / 100,
        about=one.get("about") or "now",
        cost_s=one.get("cost_s"),
        confidence=one.get("confidence"),
        why=one["why"],
        next=one.get("next") or "",
        evidence=known({name: one.get(name) for name in _OF_VERDICT}),
    )


def _label(one: Mapping[str, Any]) -> Label:
    label: Label = one["label"]
    return label


def nodes_named(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the nodes of a verdict's ranks; an episode knows that of one rank only."""
    alone = [one["node"]] if one["node"] and len(one["ranks"]) == 1 else []
    return tuple(one.get("nodes") or alone)


def _ns(moment: str | None) -> int | None:
    """Return a moment as answers have it (ISO 8601, to the ms) in ns since the epoch."""
    return None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1e3) * 1_000_000


def of_machine(anomalies: Iterable[Mapping[str, Any]], steps: Sequence[Finding]) -> list[Finding]:
    """Return what was anomalous on the nodes of the first of `steps` at its time: it may explain that."""
    explained = steps[0].key if steps else None
    return [
        Finding(
            key=key_of("node_anomaly", (), one["node"], one["kind"], one["device"]),
            signal="nodes",
            label="node_anomaly",
            severity="info",
            nodes=(one["node"],),
            device=one["device"],
            what=one["kind"],
            why=one["text"],
            evidence=known({name: one.get(name) for name in ("value", "usual")}),
            explains=explained,
        )
        for one in anomalies
    ]


def of_memory(memory: Memory, steps: Sequence[Finding] = ()) -> list[Finding]:
    """
    Return the findings about memory, and as findings of their own what may explain them: communication, and
    that the memory of one rank grew before that of the others, or that of several at once.

    What had grown on a rank that died of lack of memory may explain its death. Of many findings only the
    first are made, as many as are listed: they are in order.
    """
    most_severe = memory.findings[:MOST]
    dead = {rank: one.key for one in steps if one.label == "oom" for rank in one.ranks}
    findings = [_of_memory(one, dead.get(one.rank)) for one in most_severe]
    made = [(one, finding.key) for one, finding in zip(most_severe, findings, strict=True)]
    keys = {(one.rank, one.device, one.kind): key for one, key in made}
    grows = [(one, key) for one, key in made if one.kind in _GROWTH]
    relations = [
        _of_attribution(one, keys.get((one.rank, one.device, one.finding)))
        for one in memory.collectives[:MOST]
    ]
    if (first := memory.first_cause) is not None:
        others = [key for one, key in grows if one.rank != first.rank]
        relations.append(
            Finding(
                key=key_of("memory_first_cause", [first.rank], _device(first.device)),
                signal="memory",
                label="memory_first_cause",
                severity="info",
                ranks=(first.rank,),
                nodes=(first.node,) if first.node else (),
                device=first.device,
                from_ns=first.at_ns,
                confidence=first.confidence,
                why=first.why,
                next=" ".join(first.next),
                evidence=known({name: getattr(first, name) for name in _OF_FIRST}),
                explains=next(iter([*others, *(key for _, key in grows)]), None),
            )
        )
    if (onset := memory.collective_onset) is not None:
        relations.append(
            Finding(
                key=key_of("memory_collective_onset", onset.ranks),
                signal="memory",
                label="memory_collective_onset",
                severity="info",
                ranks=tuple(onset.ranks),
                from_ns=onset.at_ns,
                why=onset.why,
                evidence=known(
                    {name: getattr(onset, name) for name in ("delta_bytes", "counter", "bound_ns")}
                ),
                explains=next((key for one, key in grows if one.rank in onset.ranks), None),
            )
        )
    return [*findings, *relations]


_OF_FIRST = ("delta_bytes", "counter", "lead_ns", "lead_bound_ns", "coverage")


def _of_memory(one: shapes.MemoryFinding, explained: str | None) -> Finding:
    step = one.evidence.get("from_step")
    return Finding(
        key=key_of(f"memory_{one.kind}", [one.rank], _device(one.device)),
        signal="memory",
        label=f"memory_{one.kind}",
        severity=one.severity,
        ranks=(one.rank,),
        nodes=(one.node,) if one.node else (),
        device=one.device,
        from_step=step if isinstance(step, int) else None,
        from_ns=one.from_ns,
        to_ns=one.to_ns,
        confidence=one.confidence,
        why=one.why,
        next=" ".join(one.next),
        evidence=known(one.evidence),
        explains=explained if one.kind in _GROWTH else None,
    )


def _of_attribution(one: Attribution, explained: str | None) -> Finding:
    return Finding(
        key=key_of(f"memory_{one.kind}", [one.rank], _device(one.device), one.op, one.group),
        signal="memory",
        label=f"memory_{one.kind}",
        severity="info",
        ranks=(one.rank,),
        device=one.device,
        what=one.op,
        from_ns=one.from_ns,
        why=one.why,
        evidence=known({**one.evidence, "bytes": one.bytes, "group": one.group}),
        explains=explained,
    )


def _device(device: int | None) -> str:
    return "host" if device is None else f"device{device}"


def of_layers(layers: Layers, steps: Sequence[Finding] = ()) -> list[Finding]:
    """Return the layers that take longer on one rank: each may explain why that rank is late there."""
    return [_of_layer(one, layers, steps) for one in layers.findings]


def _of_layer(one: LayerFinding, layers: Layers, steps: Sequence[Finding]) -> Finding:
    late = (
        step_finding.key
        for step_finding in steps
        if one.rank in step_finding.ranks and any(s in one.phase for s in step_finding.stages)
    )
    return Finding(
        key=key_of("slow_layer", [one.rank], one.layer or _ALL_LAYERS, one.phase),
        signal="layers",
        label="slow_layer",
        severity="warning",
        ranks=(one.rank,),
        nodes=(one.node,) if one.node else (),
        what=one.layer or _ALL_LAYERS,
        from_step=layers.first_step,
        to_step=layers.last_step,
        why=f"{one.why[:1].upper()}{one.why[1:]}.",
        next=_NEXT_LAYER,
        evidence=known(
            {name: getattr(one, name) for name in ("kind", "phase", "excess_ms", "own_ms", "peers_ms")}
        ),
        explains=next(late, None),
    )


def of_sharding(sharding: Mapping[str, Any]) -> list[Finding]:
    """Return the models of which some ranks hold more, or less, than the others."""
    uneven = [model["imbalance"] for model in sharding["models"] if model["imbalance"]]
    return [
        Finding(
            key=key_of("uneven_shards", one["ranks"]),
            signal="sharding",
            label="uneven_shards",
            severity="notice",
            ranks=tuple(one["ranks"]),
            why=one["why"],
            next=one["next"],
            evidence=known({name: one[name] for name in ("bytes", "median_bytes", "ratio")}),
        )
        for one in uneven
    ]


def of_experts(
    loads: Iterable[ExpertLoad], steps: Sequence[Finding] = (), verdict: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Return the routers that give one expert far more tokens than the mean; may explain an imbalance."""
    why = ((verdict or {}).get("reason") or {}).get("what")
    explained = steps[0].key if steps and why == "experts" else None
    return [
        Finding(
            key=key_of("uneven_experts", (), one.router),
            signal="experts",
            label="uneven_experts",
            severity="notice",
            what=one.router,
            why=f"{experts.sentence(one)}.",
            next=_NEXT_EXPERTS,
            evidence=msgspec.to_builtins(one),
            explains=explained,
        )
        for one in loads
        if one.times_mean >= UNEVEN_EXPERTS
    ]
