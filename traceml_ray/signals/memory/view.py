"""The memory of the ranks of a run: as its live judge has it, or from the samples that are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.model import Section
from traceml_ray.signals.memory import sentences
from traceml_ray.signals.memory.answer import GetMemory, RunMemory
from traceml_ray.signals.memory.sections import memory_block, memory_facts
from traceml_ray.signals.memory.shapes import Memory
from traceml_ray.signals.memory.stored import memory_by_rank, memory_of
from traceml_ray.signals.view import Run, View
from traceml_ray.wire.codec import ready


class MemoryView(View[RunMemory]):
    """See `View`."""

    name = "memory"
    question = GetMemory

    def answer(self, run: Run, asked: GetMemory) -> RunMemory:
        """Return what is found now, or of all samples; with what each rank has used, where that is asked."""
        memory: Memory = memory_of(run.file) if run.live is None else run.live
        per_rank = memory_by_rank(run.file, run.ranks) if asked.peaks else {}
        return RunMemory(**msgspec.structs.asdict(memory), per_rank=per_rank)

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
        return [Section("model", [memory_facts(answer)], "Memory")]
