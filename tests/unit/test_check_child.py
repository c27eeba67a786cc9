"""Lines that a process of a check sends."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from traceml_ray.signals.check import child
from traceml_ray.signals.check.child import LineReader

_MANY = 1100
"""A file descriptor that `select` refuses."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        try:
            os.close(end)
        except OSError:
            pass


def test_lines_that_arrive_together_are_returned_one_after_the_other(pipe: tuple[int, int]) -> None:
    lines = LineReader(pipe[0])
    os.write(pipe[1], b"one\ntwo\nthr")
    assert (lines.line(10), lines.line(10)) == (b"one", b"two")
    os.write(pipe[1], b"ee\n")
    assert lines.line(10) == b"three"


def test_line_that_is_not_complete_in_time_or_at_the_end_is_none(pipe: tuple[int, int]) -> None:
    lines = LineReader(pipe[0])
    os.write(pipe[1], b"begun")
    with pytest.raises(TimeoutError, match="did not answer within"):
        lines.line(0.01)
    os.close(pipe[1])
    with pytest.raises(EOFError):
        lines.line(10)


def test_line_that_is_too_long_is_refused(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_MOST_LINE_BYTES", 1000)
    os.write(pipe[1], b"x" * 1001)
    with pytest.raises(ConnectionError, match="too much"):
        LineReader(pipe[0]).line(10)


def test_process_with_many_open_files_reads_lines(pipe: tuple[int, int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= _MANY:
        pytest.skip("this process may not have so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _MANY + 10), hard))
    try:
        high = fcntl.fcntl(pipe[0], fcntl.F_DUPFD, _MANY)
        try:
            os.write(pipe[1], b"line\n")
            assert LineReader(high).line(10) == b"line"
        finally:
            os.close(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
