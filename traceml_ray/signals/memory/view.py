"""The memory of the ranks of a run: as its live judge has it, or from the samples that are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.model import RankColumn, Section
from traceml_ray.signals.finding import MOST, Finding, key_of, known
from traceml_ray.signals.memory import sentences
from traceml_ray.signals.memory.answer import GetMemory, RunMemory
from traceml_ray.signals.memory.sections import memory_block, memory_facts
from traceml_ray.signals.memory.sentences import GROWTH
from traceml_ray.signals.memory.shapes import Attribution, Memory, MemoryFinding
from traceml_ray.signals.memory.stored import memory_by_rank, memory_of
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire.codec import ready


class MemoryView(View[RunMemory]):
    """See `View`."""

    name = "memory"
    question = GetMemory
    finds = MappingProxyType({"peaks": False})
    overview = True
    page = "memory"

    def answer(self, run: Run, asked: GetMemory) -> RunMemory:
        """Return what is found now, or of all samples; with what each rank has used, where that is asked."""
        memory: Memory = memory_of(run.file) if run.live is None else run.live
        per_rank = memory_by_rank(run.file, run.ranks) if asked.peaks else {}
        return RunMemory(**msgspec.structs.asdict(memory), per_rank=per_rank)

    def findings(
        self, answer: Memory, steps: Sequence[Finding], verdict: Mapping[str, Any] | None
    ) -> list[Finding]:
        """Return what was found, and its relations: to communication, and which grew first."""
        return _findings(answer, steps)

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 5 s, where ranks send samples."""
        samples = any(process.memory_from for process in ranks.values())
        return 5.0 if samples and world < SLOW_RANKS else None

    def cause(self, death: Verdict, answer: Memory) -> str:
        """Return what memory had done before, where a rank died for lack of it, or was killed."""
        return sentences.cause_of_death(answer, death)

    def block(self, answer: RunMemory) -> dict[str, Any]:
        """Return what each rank has used, and what was found, as plain values."""
        return memory_block(answer)

    def of_block(self, block: Any) -> RunMemory:
        """Return the answer of a block: what was found, without numbers of ranks."""
        return msgspec.convert(block or {}, ready(RunMemory), strict=False, str_keys=True)

    def sections(self, answer: RunMemory) -> Sequence[Section]:
        """Return of which ranks nothing is known; what was found is among the findings."""
        per_rank = getattr(answer, "per_rank", {})
        peaks = {rank: one.rss_peak_bytes for rank, one in per_rank.items()}
        column = RankColumn("peak rss", "size", peaks)
        return [Section("model", [memory_facts(answer)], "Memory", per_rank=[column])]


def _findings(memory: Memory, steps: Sequence[Finding]) -> list[Finding]:
    """
    Return the findings about memory, and as findings of their own what may explain them: communication, and
    that the memory of one rank grew before that of the others, or that of several at once.

    What had grown on a rank that died of lack of memory may explain its death. Of many findings only the
    first are made, as many as are listed: they are in order.
    """
    most_severe = memory.findings[:MOST]
    dead = {rank: one.key for one in steps if one.label == "oom" for rank in one.ranks}
    findings = [_finding(one, dead.get(one.rank)) for one in most_severe]
    made = [(one, finding.key) for one, finding in zip(most_severe, findings, strict=True)]
    keys = {(one.rank, one.device, one.kind): key for one, key in made}
    grows = [(one, key) for one, key in made if one.kind in GROWTH]
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


def _finding(one: MemoryFinding, explained: str | None) -> Finding:
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
        explains=explained if one.kind in GROWTH else None,
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
