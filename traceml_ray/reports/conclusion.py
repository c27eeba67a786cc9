"""What a person reads first of a run: the most severe of all that was found, of steps, memory or layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from traceml_ray import text
from traceml_ray.analysis.labels import Label
from traceml_ray.analysis.layer_times import LayerFinding, Layers
from traceml_ray.analysis.memory.shapes import Finding, Memory
from traceml_ray.reports.headlines import named
from traceml_ray.reports.layer_report import sentence
from traceml_ray.reports.severity import tone_of

Tone = Literal["critical", "warning", "notice", "unsure", "good"]
_WORST: tuple[Tone, ...] = ("critical", "warning", "notice", "unsure", "good")
"""The most severe first."""
_NEXT_LAYER = "Look at what this rank does in that layer: its input, its device."


class Conclusion(msgspec.Struct, frozen=True):
    """The most severe finding of a run; of equally severe ones, the verdict on its steps before others."""

    subject: Literal["steps", "memory", "layers"]
    tone: Tone
    label: str
    """Its kind in words: the label of the verdict, or "memory creep"."""
    headline: str
    """The kind, and who: "straggler: rank 5 (node-1) in data", "memory creep: rank 2 (node-0)"."""
    why: str
    next: str
    rank: int | None


def conclude(verdict: Mapping[str, Any], memory: Memory | None, layers: Layers | None) -> Conclusion:
    """Return what to read first, of the verdict on the steps, and what was found of memory and layers."""
    found = [_of_steps(verdict)]
    found += _of_memory(memory.findings if memory else ())
    found += _of_layers(layers.findings if layers else ())
    return min(found, key=lambda one: _WORST.index(one.tone))  # the first of equally severe ones


def _of_steps(verdict: Mapping[str, Any]) -> Conclusion:
    label: Label = verdict["label"]
    tone: Any = tone_of(verdict)[0]
    about = named(verdict), verdict["why"], verdict["next"] or "", verdict["rank"]
    return Conclusion("steps", tone, text.words(label), *about)


def _of_memory(findings: Iterable[Finding]) -> list[Conclusion]:
    """Return the findings, the most severe first; what is only for information is none."""
    found = []
    for one in findings:
        if one.severity != "info":
            label = f"memory {text.words(one.kind)}"
            headline = f"{label}: rank {one.rank} ({one.node})"
            following = one.next[0] if one.next else ""
            found.append(Conclusion("memory", one.severity, label, headline, one.why, following, one.rank))
    return found


def _of_layers(findings: Iterable[LayerFinding]) -> list[Conclusion]:
    found = []
    for one in findings:
        node = f" ({one.node})" if one.node else ""
        headline = f"slow layer: {one.layer or 'all layers'} on rank {one.rank}{node}"
        about = headline, sentence(one.why), _NEXT_LAYER, one.rank
        found.append(Conclusion("layers", "warning", "slow layer", *about))
    return found
