"""Every threshold of the memory analysis, in one place."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryLimits:
    """Numbers the memory rules use; shares are 0..1."""

    min_growth_bytes: int = 64 * MIB
    """Smallest change that is worth a word,"""
    growth_of_peak: float = 0.10
    """and smallest growth of a rank that can be the first cause, as a share of its highest value."""


MEMORY = MemoryLimits()
