"""
How invalid bytes are generated, how many examples are tried, and how much time and memory they
may cost.
"""

from __future__ import annotations

import os
import resource
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "30"))
"""Number of examples of each property; `make fuzz` uses many more."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.sampled_from([-1, 0, 1, 1 << 31, 1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 63)])
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=60)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
"""Any value that msgpack can hold."""
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
"""Any value that Python's JSON parser accepts, including NaN and integers of any size."""

BOMBS = [
    *(head + b"\xff\xff\xff\xff\x01" for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")),
    *(nest * 20_000 + b"\xc0" for nest in (b"\x91", b"\x81\xa1k", b"\x81")),
    b"\xdd\x00\x00\xea\x60" + bytes(60_000),
    b"\xdd\x00\x00\xea\x60" + b"\x90" * 60_000,
    b"\xdd\x00\x00\xea\x60" + b"\x80" * 60_000,
]
"""Msgpack that claims 2**32 entries, is nested deeply, or has very many small entries."""


@st.composite
def mutated(draw: st.DrawFn, data: bytes, pieces: list[bytes] | None = None) -> bytes:
    """Return `data` with bytes changed, cut or doubled, and with `pieces` (BOMBS) inserted."""
    changed = bytearray(data)
    for kind in draw(st.lists(st.sampled_from("fffctdip"), min_size=1, max_size=6)):
        begin = draw(st.integers(0, max(0, len(changed) - 1)))
        end = min(len(changed), begin + draw(st.integers(0, 40)))
        if kind == "f" and changed:
            changed[begin] = draw(st.integers(0, 255))
        elif kind == "c":
            del changed[begin:]
        elif kind == "t":
            del changed[begin:end]
        elif kind == "d":
            changed[begin:begin] = changed[begin:end]
        elif kind == "i":
            changed[begin:begin] = draw(st.binary(max_size=8))
        elif kind == "p":
            changed[begin : begin + 1] = draw(st.sampled_from(pieces or BOMBS))
    return bytes(changed)


def fuzz(share: float = 1.0) -> settings:
    """Return settings for the number of tries. `share`: fraction of them, for slower tests."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=max(3, int(EXAMPLES * share)), deadline=None, suppress_health_check=checks)


@contextmanager
def limited(mib: int) -> Iterator[None]:
    """
    Make every allocation fail that would grow this process by more than `mib` MiB. Nothing
    becomes slower.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (mib << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def bounded(seconds: float = 20.0, mib: float | None = None) -> Iterator[None]:
    """
    Fail if the block takes longer than `seconds`, with an allowance for a shared machine, or if it holds more
    than `mib` MiB of Python's own memory at a time. Only for the main thread.
    """

    def ring(*_: object) -> None:
        raise AssertionError(f"it hangs: {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    if mib is not None:
        tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / (1 << 20) if mib is not None else 0.0
    finally:
        if mib is not None:
            tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, left, every)
        signal.signal(signal.SIGALRM, before)
    assert peak <= (mib or 0.0), f"{peak:.1f} MiB"
