"""A finding: one shape for what is found of steps, memory, layers, shards, experts and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from traceml_ray import text
from traceml_ray.analysis.labels import Severity

Value = int | float | str | bool | None
MOST = 100
"""So many findings of a run are listed."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "notice", "info")
"""The most severe first."""
_NODES = 2
"""So many nodes are listed in a headline; others are counted."""
_KEY_RANKS = 8


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was found in a run. None means "not known"; an empty tuple, that none is named."""

    key: str
    """Names it among the findings of its run, and stays as it is while the same thing is found."""
    signal: str
    """What it is about: the name of its view (`signals.views`), `nodes`, or `steps`: of the verdict."""
    label: str
    """Its kind: a label of a verdict, `memory_creep`, `slow_layer`, …"""
    severity: Severity
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes of `ranks`, or the node that it is about, as they are shown."""
    device: int | None = None
    """As its process (`nodes`: its node) numbers it; None: no device, or the host's memory."""
    stages: tuple[str, ...] = ()
    """Stages of the step in which ranks are late, the worst first."""
    what: str | None = None
    """The layer, router, span, kind of collective or quantity of a node that it is about."""
    from_step: int | None = None
    to_step: int | None = None
    from_ns: int | None = None
    """When it began, ns since the epoch on the aggregator's clock."""
    to_ns: int | None = None
    """When it was seen last, on the same clock."""
    cost: float | None = None
    """Share (0..1) of the time that fixing it saves; of what time, says `about`."""
    about: Literal["now", "run"] = "now"
    """What `cost` is a share of: the time since it began, or the whole run."""
    cost_s: float | None = None
    """`cost` in seconds."""
    confidence: str | None = None
    """low, medium, high."""
    why: str = ""
    """Sentences for a person."""
    next: str = ""
    """What to do."""
    evidence: dict[str, Value] = {}
    """Numbers and words by name; the ends of the names are units."""
    explains: str | None = None
    """Key of the finding that this may explain: both were seen at the same place and time."""

    @property
    def headline(self) -> str:
        """Its kind, and who, in one line: "memory creep: rank 2 (node-0)"."""
        what = (
            None
            if self.signal == "steps"
            else text.words(self.what or "")
            if self.signal == "nodes"
            else self.what
        )
        inside = self.what if self.label == "stalled" else " and ".join(self.stages)
        return headline(self.label, self.ranks, self.nodes, what=what, inside=inside or "")


def from_plain(fields: Mapping[str, Any]) -> Finding:
    """Return the finding that has these fields, as a summary has them; others are left out."""
    known_fields = {name: fields[name] for name in Finding.__struct_fields__ if name in fields}
    lists = {name: tuple(value) for name, value in known_fields.items() if isinstance(value, list)}
    return Finding(**{**known_fields, **lists})


def headline(
    label: str, ranks: Sequence[int], nodes: Sequence[str], *, what: str | None = None, inside: str = ""
) -> str:
    """Return a kind, what it is about and who in one line: "straggler: rank 5 (node-1) in data"."""
    who = text.ranks(ranks)
    where = text.listed(list(nodes[:_NODES]), max(0, len(nodes) - _NODES))
    place = f"{who} ({where})" if who and where else who or where
    about = " on ".join(filter(None, (what, place)))
    return text.words(label) + (f": {about}" if about else "") + (f" in {inside}" if inside else "")


def key_of(label: str, ranks: Iterable[int] = (), *parts: object) -> str:
    """Return the key of a finding: its kind, whom it names, and what else tells it from others."""
    named = sorted(ranks)
    more = [f"+{len(named) - _KEY_RANKS}"] * (len(named) > _KEY_RANKS)
    who = ",".join([*map(str, named[:_KEY_RANKS]), *more])
    return ":".join([label, *(str(part) for part in (who, *parts) if part not in (None, ""))])


def listed(steps: Sequence[Finding], others: Iterable[Finding], most: int = MOST) -> list[Finding]:
    """
    Return the findings of a run in the order in which every face has them: those of the steps as they are
    (the verdict's first), then the others, the costliest first, of equal cost the most severe first.
    """
    rest = sorted(others, key=lambda one: (-(one.cost or 0.0), SEVERITIES.index(one.severity)))
    return _with_own_keys([*steps, *rest])[:most]


def _with_own_keys(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with a number after the key of each that has that of another one before it."""
    seen, unique = dict[str, int](), list[Finding]()
    for one in findings:
        times = seen[one.key] = seen.get(one.key, 0) + 1
        unique.append(one if times == 1 else msgspec.structs.replace(one, key=f"{one.key}#{times}"))
    return unique


def explaining(findings: Iterable[Finding], key: str | None) -> list[Finding]:
    """Return those of `findings` that may explain the one of that `key`."""
    return [one for one in findings if key is not None and one.explains == key]


def known(values: Mapping[str, Any]) -> dict[str, Value]:
    """Return those of `values` that are known, as evidence."""
    return {name: value for name, value in values.items() if value is not None}
