"""Meanings of the numbers of NVIDIA's critical errors (XID) that occur in training."""

from __future__ import annotations

_MEANINGS = {
    8: "the GPU stopped processing",
    13: "graphics engine exception, mostly of the program: an illegal access",
    31: "GPU memory page fault, mostly of the program: an illegal address",
    32: "corrupted command stream",
    43: "the GPU stopped processing for a program that failed",
    45: "cleanup after an earlier error",
    48: "uncorrectable (double-bit) ECC error",
    61: "internal microcontroller warning",
    62: "internal microcontroller halt",
    63: "memory row remapped or page retired",
    64: "memory row or page could not be remapped or retired",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of corrected ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor (GSP) did not answer",
    120: "error of the GPU's system processor (GSP)",
    140: "unrecovered ECC error",
}


def meaning(xid: int) -> str:
    """Return the number with its meaning: "XID 79: the GPU has fallen off the bus"."""
    return f"XID {xid}: " + _MEANINGS.get(xid, "see NVIDIA's XID list")
