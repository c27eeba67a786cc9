"""What is shown of the memory of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.document.model import Facts
from traceml_ray.signals.memory.answer import RunMemory
from traceml_ray.signals.memory.shapes import Memory

_FINDINGS = 100
"""Of a summary."""
_SHOWN = "first_cause", "collective_onset", "findings", "missing_ranks"
"""Of what is found, in a summary."""


def memory_block(memory: RunMemory) -> dict[str, Any]:
    """Return the memory of each rank, by its number as text, and what was found about it, for the summary."""
    few = msgspec.structs.replace(memory, findings=memory.findings[:_FINDINGS])
    plain: dict[str, Any] = msgspec.to_builtins(few, str_keys=True)
    return {"per_rank": plain["per_rank"], **{name: plain[name] for name in _SHOWN}}


def memory_facts(memory: Memory) -> Facts:
    """Return of which ranks nothing is known about memory, where something was found of others."""
    missing = missing_words(memory) if memory.findings else ()
    return Facts(("Memory", "".join(missing)))


def first_words(memory: Memory) -> Sequence[str]:
    """Return in sentences which rank's memory grew first, or that none did, and who is missing."""
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
    """Return in a sentence of which ranks there are no samples; none where there are of all."""
    ranks = memory.missing_ranks
    return [f"There are no samples of {text.ranks(ranks)}."] if ranks else []
