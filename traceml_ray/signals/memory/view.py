"""
The memory of the ranks of a run: the question, the answer (from the live judge, or from stored samples), and
its presentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.hang import COLLECTIVE
from traceml_ray.analysis.node_clock import NodeClock
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.model import Column, Facts, RankColumn, Section, Table
from traceml_ray.identity import RankFilter
from traceml_ray.signals.finding import MOST, Finding, OnSteps, key_of, known
from traceml_ray.signals.memory import sentences
from traceml_ray.signals.memory.judge import judge_recordings
from traceml_ray.signals.memory.recordings import (
    FileContents,
    Ints,
    NoSamplesError,
    Recording,
    merge,
)
from traceml_ray.signals.memory.sentences import GROWTH
from traceml_ray.signals.memory.shapes import (
    Attribution,
    Collective,
    Memory,
    MemoryFinding,
    MemoryNumbers,
    MemoryOfRank,
    RankMemory,
)
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.bundles import kept_why
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess, by_run, current_ranks, process_labels, world_size
from traceml_ray.store.samples import MemoryColumns
from traceml_ray.store.schema import legible
from traceml_ray.store.session_file import SessionFile


class RunMemory(Memory, frozen=True, kw_only=True):
    """Analysis of the memory of a run, with the memory that its ranks have used."""

    per_rank: dict[int, MemoryOfRank] = {}
    """Peak and last memory of each rank's newest process. Empty if it was not requested."""


class GetMemory(OfRun[RunMemory], frozen=True):
    """
    Current findings about the memory of the ranks of a run. With `peaks`, also what each rank has used, which
    requires a pass over all stored samples.
    """

    peaks: bool = True


_FINDINGS = 100
"""Largest number of findings in a summary."""


def memory_facts(memory: Memory) -> Facts:
    """Return which ranks have no known memory, if there are findings about others."""
    missing = missing_words(memory) if memory.findings else ()
    return Facts(("Memory", "".join(missing)))


def first_words(memory: Memory) -> Sequence[str]:
    """Return sentences: which rank's memory grew first, or that none did, and which ranks are missing."""
    cause, onset = memory.first_cause, memory.collective_onset
    if cause is not None:
        sentences = [cause.why, *cause.next[:1]]
    elif onset is not None:
        sentences = [onset.why]
    elif memory.findings:
        sentences = [memory.findings[0].why, *memory.findings[0].next[:1]]
    else:
        sentences = ["No memory growth detected."]
    return [*sentences, *missing_words(memory)]


def missing_words(memory: Memory) -> Sequence[str]:
    """Return a sentence that names the ranks without samples. Empty if all ranks have samples."""
    ranks = memory.missing_ranks
    return [f"No memory samples of {text.ranks(ranks)}."] if ranks else []


FORMAT = "traceml-ray session"
BUNDLE = "traceml-ray bundle"
_MOST_SAMPLES = 2_000_000
"""
Largest number of samples read: a quarter of an hour of 1,024 ranks, about 6 s of reading. A longer time is
sampled.
"""


def read(path: Path) -> FileContents:
    """
    Return the memory of every rank process of every run of a session file.

    Raises:
        NoSamplesError: no rank has reported its memory.
        SessionFileError: the file cannot be read.
    """
    with SessionFile(path) as file, legible(path), file.at_one_moment():
        recordings = recordings_of(file)
    if not recordings:
        raise NoSamplesError("no rank has reported its memory")
    kept = kept_why(path.parent)
    return FileContents(BUNDLE, recordings, [kept]) if kept else FileContents(FORMAT, recordings)


def recordings_of(file: SessionFile) -> list[Recording]:
    """
    Return the memory of every rank process of every run, per device, with its collectives. Raises
    `SessionFileError`.
    """
    processes = {process.id: process for process in file.processes() if process.rank is not None}
    labels = process_labels(file.cluster(), processes.values())
    worlds = {
        run: world_size(current_ranks(processes_of_run), None) or None
        for run, processes_of_run in by_run(processes.values()).items()
    }
    samples, _ = file.memory_samples(processes, most=_MOST_SAMPLES)
    clocks = file.clocks()
    recordings = []
    for columns_of_device in samples:
        process = processes[columns_of_device.process]
        run = process.identity.job_id if process.identity else None
        clock = clocks.get(process.identity.node_id or "") if process.identity else None
        columns_of_device, bound_ns = (
            (columns_of_device, None) if clock is None else _on_one_clock(columns_of_device, clock)
        )
        recording = Recording(
            process=process.process_id,
            node=labels[columns_of_device.process],
            device=columns_of_device.device,
            t_ns=columns_of_device.t_ns,
            columns=columns_of_device.columns,
            step=columns_of_device.step,
            bound_ns=bound_ns,
            rank=process.rank,
            world_size=None if run is None else worlds[run],
            run=run,
            first_step_ns=_first_step_ns(columns_of_device.t_ns, columns_of_device.step),
        )
        recordings.append(recording)
    _add_collectives(file, recordings)
    return recordings


def memory_of(file: SessionFile) -> Memory:
    """Return the findings about the memory of the ranks of a file's run. Empty if there are no samples."""
    run = file.run_id()
    recordings = [recording for recording in recordings_of(file) if recording.run == run]
    return judge_recordings(merge(recordings), RankFilter()) if recordings else Memory()


def memory_by_rank(file: SessionFile, ranks: Mapping[int, RankProcess]) -> dict[int, MemoryOfRank]:
    """Return the memory that the process of each rank has used. Raises `SessionFileError`."""
    resident, allocated = file.memory(), file.allocated_peaks()
    return {
        rank: MemoryOfRank(*resident.get(process.id, (None, None)), allocated.get(process.id))
        for rank, process in ranks.items()
    }


def _add_collectives(file: SessionFile, recordings: Sequence[Recording]) -> None:
    """
    Add which collectives each process was in, and when. Times are estimated from the steps of
    its samples.
    """
    processes = {process.id: process.process_id for process in file.processes()}
    timed = {
        recording.process: recording
        for recording in recordings
        if recording.step is not None and (recording.step >= 0).any()
    }
    for run in {recording.run for recording in timed.values()}:
        for span in file.for_run(run).groups():
            recording_of_span = timed.get(processes[span["process"]])
            if (
                recording_of_span is not None
                and recording_of_span.rank is not None
                and recording_of_span.run == run
                and is_collective(span["name"])
            ):
                assert recording_of_span.step is not None
                first, last = when(
                    recording_of_span.t_ns, recording_of_span.step, span["first_step"], span["last_step"] + 1
                )
                group, count, size = span["process_group"], span["count"], span["bytes"]
                recording_of_span.collectives.append(
                    Collective(recording_of_span.rank, span["name"], group, first, last, count, size)
                )


def is_collective(span: str) -> bool:
    """Return whether a span of that name is a collective, and not only the wait for one."""
    return bool(COLLECTIVE.match(span)) and span != "wait"


def when(t_ns: Ints, step: Ints, *steps: int) -> list[int]:
    """
    Return approximately when a process reached each of `steps`. At least one of its samples
    must have a step.
    """
    known = step >= 0
    return [int(at_ns) for at_ns in np.interp(steps, step[known], t_ns[known])]


def _on_one_clock(measured_columns: MemoryColumns, clock: NodeClock) -> tuple[MemoryColumns, int]:
    """Return samples on the aggregator's clock, in order of time, and the largest error of the times."""
    t_ns, bound_ns = clock.to_aggregator(measured_columns.t_ns)
    order = np.argsort(t_ns, kind="stable")
    columns = {name: values[order] for name, values in measured_columns.columns.items()}
    return replace(
        measured_columns, t_ns=t_ns[order], step=measured_columns.step[order], columns=columns
    ), int(bound_ns.max())


def _first_step_ns(t_ns: Ints, step: Ints) -> int | None:
    """Return when the first step was over: at the first sample in a later step than the first known one."""
    known = step[step >= 0]
    later = np.flatnonzero(step > known[0]) if len(known) else known
    return int(t_ns[later[0]]) if len(later) else None


def memory_of_device(device: int | None) -> str:
    """Return whose memory it is: the host's (None), or that of a device."""
    return "host" if device is None else f"GPU {device}"


def ranks_table(rows: Sequence[RankMemory]) -> Table:
    """
    Return (some rows of) `Memory.ranks` as a table. Growth is above the settled level of a
    rank's memory.
    """
    columns = [
        Column("rank", lambda row: row.rank, "figures", link=lambda row: ("rank", row.rank)),
        Column("node", lambda row: row.node),
        Column("memory", lambda row: memory_of_device(row.device)),
        Column("samples", lambda row: row.samples, "count"),
        Column("allocated +", lambda row: row.allocated_growth_bytes, "size"),
        Column("reserved +", lambda row: row.reserved_growth_bytes, "size"),
        Column("hidden", lambda row: row.gap_bytes, "size"),
        Column("RSS +", lambda row: row.rss_growth_bytes, "size"),
        Column("used", lambda row: row.used_bytes, "size"),
        Column("in all", lambda row: row.total_bytes, "size"),
        Column("runs out in", lambda row: row.forecast_s, "age", written=_forecast),
        Column("finding", lambda row: text.words(row.anomaly or ""), tone=lambda row: row.severity or ""),
    ]
    spare = "samples", "hidden", "reserved +", "node", "in all"
    empty = "No rank matches."
    return Table("Memory of ranks", columns, rows, empty=empty, badness=_used, spare=spare)


def _used(row: RankMemory) -> float:
    """Return the share of its memory that a rank uses. 0 if it is not known."""
    return (row.used_bytes or 0) / (row.total_bytes or 1)


def _fullest(rows: Sequence[RankMemory]) -> list[str]:
    """
    Return a sentence that names the rank with the largest share of its memory in use. Empty if
    none is known.
    """
    known = [row for row in rows if row.used_bytes is not None and row.total_bytes]
    if not known:
        return []
    row = max(known, key=_used)
    used = f"{text.size(row.used_bytes)} of {text.size(row.total_bytes)}, {text.share(_used(row))}"
    return [f"fullest: rank {row.rank} ({row.node}, {memory_of_device(row.device)}) {used}"]


def _forecast(row: RankMemory) -> str:
    if row.forecast_s is None:
        return ""
    steps = "" if row.forecast_steps is None else f", {text.count(row.forecast_steps, 'step')}"
    return text.duration(row.forecast_s) + steps


class MemoryView(View[RunMemory]):
    """See `View`."""

    name = "memory"
    question = GetMemory
    finds = MappingProxyType({"peaks": False})
    overview = True
    page = "memory"

    def answer(self, run: Run, asked: GetMemory) -> RunMemory:
        """
        Return the current findings, or those of all samples; if requested, with what each rank
        has used.
        """
        memory: Memory = memory_of(run.file) if run.live is None else run.live
        per_rank = memory_by_rank(run.file, run.ranks) if asked.peaks else {}
        return RunMemory(**msgspec.structs.asdict(memory), per_rank=per_rank)

    def findings(self, answer: Memory, steps: Sequence[Finding], verdict: OnSteps | None) -> list[Finding]:
        """Return the findings with their relations: to communication, and to the rank that grew first."""
        return _findings(answer, steps)

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 5 s if ranks send samples."""
        samples = any(process.memory_from for process in ranks.values())
        return 5.0 if samples and world < SLOW_RANKS else None

    def cause(self, death: Verdict, answer: Memory) -> str:
        """Return what memory did before, if a rank ran out of memory or was killed."""
        return sentences.cause_of_death(answer, death)

    def block(self, answer: RunMemory) -> MemoryNumbers:
        """Return what each rank has used, and the findings."""
        return MemoryNumbers(
            per_rank=answer.per_rank,
            first_cause=answer.first_cause,
            collective_onset=answer.collective_onset,
            findings=answer.findings[:_FINDINGS],
            missing_ranks=answer.missing_ranks,
        )

    def of_block(self, block: MemoryNumbers) -> RunMemory:
        """Return the answer of a block: the findings, without the numbers of each rank process."""
        return RunMemory(**msgspec.structs.asdict(block))

    def details(self, answer: Memory) -> Sequence[Section]:
        """
        Return which ranks are missing, or that nothing was found, and the memory of each rank
        in numbers.
        """
        if not answer.ranks:
            return [Section("model", [Facts(("", "No sample of a rank's memory."))], "Memory")]
        sentences = missing_words(answer) if answer.findings else first_words(answer)
        return [Section("model", [Facts.listed("", sentences), ranks_table(answer.ranks)], "Memory")]

    def brief(self, answer: Memory) -> Facts:
        """
        Return that nothing was found, or which ranks are missing, and which rank's memory is
        the fullest.
        """
        if not answer.ranks:
            return Facts()
        # otherwise it is shown with the verdict
        serious = any(one.severity != "info" for one in answer.findings)
        words = missing_words(answer) if serious else first_words(answer)
        return Facts.listed("Memory", [*words, *_fullest(answer.ranks)])

    def sections(self, answer: RunMemory) -> Sequence[Section]:
        """Return which ranks have no known memory. Findings are shown elsewhere."""
        per_rank = getattr(answer, "per_rank", {})
        peaks = {rank: one.rss_peak_bytes for rank, one in per_rank.items()}
        column = RankColumn("peak rss", "size", peaks)
        return [Section("model", [memory_facts(answer)], "Memory", per_rank=[column])]


def _findings(memory: Memory, steps: Sequence[Finding]) -> list[Finding]:
    """
    Return the findings about memory, and separate findings that may explain them: communication, and that the
    memory of one rank grew before the others', or that of several at once.

    Growth on a rank that ran out of memory may explain its death. Of many findings only the first ones are
    made, up to the number that is listed: they are in order.
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
