"""Checks a trace against Chrome's Trace Event Format, as far as viewers depend on it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_KEYS = {"X": {"name", "dur"}, "s": {"name", "cat", "id"}, "f": {"name", "cat", "id"}, "M": {"name", "args"}}


def check(path: Path, nested: bool = True) -> dict[str, Any]:
    """
    Return the trace after checking that it is valid: types are right, all processes and threads have names,
    slices of a thread are `nested`, and each arrow has one beginning and one later end, both inside slices.
    """
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert (
            isinstance(event["ph"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        )
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0, event
        assert _KEYS.get(event["ph"], set()) <= event.keys(), event
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    _named(document["traceEvents"])
    if nested:
        for lane, lane_slices in slices.items():
            _nested(lane, lane_slices)
    _flows(document["traceEvents"], slices)
    return document


def processes(document: dict[str, Any]) -> dict[int, str]:
    """Return the names of processes, by pid."""
    names = [event for event in document["traceEvents"] if event["name"] == "process_name"]
    return {event["pid"]: event["args"]["name"] for event in names}


def _named(events: list[dict[str, Any]]) -> None:
    lanes = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    meta = [event for event in events if event["ph"] == "M"]
    named = [event["pid"] for event in meta if event["name"] == "process_name"]
    assert len(named) == len({*named}) and {*named} == {pid for pid, _ in lanes}
    assert lanes == {(event["pid"], event["tid"]) for event in meta if event["name"] == "thread_name"}


def _nested(lane: tuple[int, int], lane_slices: list[tuple[float, float]]) -> None:
    stack: list[float] = []
    for begin, end in sorted(lane_slices, key=lambda pair: (pair[0], -pair[1])):
        while stack and begin >= stack[-1] - 0.001:  # a time is rounded to 1 ns
            stack.pop()
        assert not stack or end <= stack[-1] + 0.001, (
            f"{lane}: a slice at {begin} ends after the one around it"
        )
        stack.append(end)


def _flows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    flows: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
    for ends in flows.values():
        ends.sort(key=lambda event: (event["ts"], event["ph"] == "f"))
        assert [event["ph"] for event in ends] == ["s", "f"], ends
        assert ends[0]["ts"] <= ends[1]["ts"] and ends[1]["bp"] == "e", ends
        for event in ends:
            inside = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in inside), event
