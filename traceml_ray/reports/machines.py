"""
The part of machines in a verdict: anomalies of the nodes that it names, from samples in memory or on disk. If
a verdict names no rank because devices have no clock, this module says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from traceml_ray import text
from traceml_ray.analysis.anomalies import Between, Machine, anomalies
from traceml_ray.analysis.step_stats import Timeline, span, trained_since
from traceml_ray.analysis.thresholds import MACHINE
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.settings import SHORTEST_STEP_NS
from traceml_ray.store.rank_processes import RankProcess, node_key
from traceml_ray.wire.messages import CLOSED, DEVICE_CLOCK

_MAX_PEERS = 16
"""Largest number of nodes to compare with, evenly chosen."""
_MAX_EXAMINED = 10
"""Largest number of changes of verdict that get evidence; the newest ones."""


def reference_rank(verdict: Verdict, ranks: Mapping[int, RankProcess]) -> int | None:
    """Return the rank whose rows date the verdict's steps; None if the verdict names no rank."""
    if verdict.meaning.names == "all":
        return min(ranks, default=None)
    return verdict.rank if verdict.rank in ranks else None


@dataclass
class Machines:
    """
    The nodes of a run.

    Args:
        between: returns the samples of nodes between two times.
        ranks: the process of each rank of the run.
        every: all rank processes of the session.
        labels: names of the nodes, by `node_key`.

    A node's samples are on its own clock, a verdict is on the aggregator's clock.
    """

    between: Between
    ranks: Mapping[int, RankProcess]
    every: Iterable[RankProcess]
    labels: Mapping[str, str]

    def when(self, verdict: Verdict, line: Timeline) -> tuple[int, int] | None:
        """
        Return the time span of the verdict (ns since the epoch); None if it names no rank, or is not known.
        `line` is the timeline of `reference_rank`.
        """
        rank = reference_rank(verdict, self.ranks)
        if rank is None:
            return None
        process = self.ranks[rank]
        if verdict.began_ns is not None:
            last_ns = max(process.last_seen_ns for process in self.ranks.values())
            lasted_s = verdict.lasted_s
            return verdict.began_ns, last_ns if lasted_s is None else verdict.began_ns + int(lasted_s * 1e9)
        if verdict.exit_reason is not None:
            return process.last_seen_ns - int(MACHINE.live_s * 1e9), process.last_seen_ns
        if process.last_rows_ns is None:
            return None
        return span(line, process.last_rows_ns, verdict.from_step, verdict.to_step)

    def examine(
        self, verdict: Verdict, first_ns: int, last_ns: int, trained_ns: int, since_ns: int | None = None
    ) -> Verdict:
        """
        Return `verdict` with the anomalies from `first_ns` to `last_ns`. The cause began at `since_ns` (None:
        `first_ns`). If there are no peers, earlier samples show what is usual, except samples before
        `trained_ns`, the end of warm-up: a starting job does other work.
        """
        since_ns = first_ns if since_ns is None else since_ns
        all_nodes = verdict.meaning.names == "all"
        on = {rank: node_key(process) for rank, process in self.ranks.items()}
        named = {on[rank] for rank in verdict.ranks if rank in on}
        others = sorted(set(on.values()) - named)
        peers = others[:: -(-len(others) // _MAX_PEERS) or 1]
        own_nodes, peers = (peers, []) if all_nodes else (sorted(named), peers)
        nodes = [*own_nodes, *peers]
        lead_ns = max(trained_ns, first_ns - int(MACHINE.lead_s * 1e9))
        during = {
            **self.between(peers, min(first_ns, lead_ns), last_ns),
            **self.between(own_nodes, first_ns, last_ns),
        }
        before = self.between(
            own_nodes, max(trained_ns, since_ns - int(MACHINE.before_s * 1e9)), since_ns - 1
        )
        pids = self._pids(nodes)
        machines = [
            Machine(
                self.labels.get(node, node),
                during[node],
                before.get(node),
                pids[node],
                frozenset(rank for rank in verdict.ranks if on.get(rank) == node),
            )
            for node in nodes
            if node in during
        ]
        evidence = anomalies(machines, all_nodes=all_nodes)
        return verdict if evidence is None else msgspec.structs.replace(verdict, machine=evidence)

    def with_evidence(self, verdict: Verdict, lines: Mapping[int, Timeline], warmup_steps: int) -> Verdict:
        """
        Return a stored `verdict` with the anomalies of its nodes. `lines` are the timelines of the run's
        ranks.
        """
        rank = reference_rank(verdict, self.ranks)
        if verdict.machine is not None or rank is None or rank not in lines:
            return verdict
        when, end_ns = self.when(verdict, lines[rank]), self.ranks[rank].last_rows_ns
        if when is None or end_ns is None:
            return verdict
        return self.examine(verdict, *when, trained_since(lines[rank], end_ns, warmup_steps))

    def newest_with_evidence(
        self, verdicts: Sequence[Verdict], lines: Mapping[int, Timeline], warmup_steps: int
    ) -> list[Verdict]:
        """Return `verdicts`. The newest of those that name a rank have the anomalies of its nodes."""
        named = [
            index for index, verdict in enumerate(verdicts) if reference_rank(verdict, self.ranks) is not None
        ]
        newest = set(named[-_MAX_EXAMINED:])
        return [
            self.with_evidence(verdict, lines, warmup_steps) if index in newest else verdict
            for index, verdict in enumerate(verdicts)
        ]

    def _pids(self, nodes: Iterable[str]) -> dict[str, dict[int, int | None]]:
        """
        Return the processes on each node: node → pid → rank of the run (None: of another run, or an earlier
        process).
        """
        pids: dict[str, dict[int, int | None]] = {node: {} for node in nodes}
        for process in self.every:
            if process.identity is not None and node_key(process) in pids and process.identity.pid > 1:
                rank = process.rank
                current = rank is not None and self.ranks.get(rank) is process
                pids[node_key(process)][process.identity.pid] = rank if current else None
        return pids


_SETTING = "TRACEML_DEVICE_CLOCK"
_TURN_ON = (
    f"Set {_SETTING}=1: then late ranks are named on CUDA as well, by the device's clock. By "
    f"default it is not read in steps that are shorter than {SHORTEST_STEP_NS // 1_000_000} ms."
)
_OTHERWISE = {"tp", "pp"}
"""Ways in which ranks depend on each other, with a device clock or without."""


def with_advice(verdict: Verdict, processes: Iterable[RankProcess]) -> Verdict:
    """
    Return `verdict`. For CUDA ranks it says how to have them judged, or why they are not. If device clocks
    have stopped themselves, it says what it does not cover.
    """
    all_processes = [*processes]
    verdict = msgspec.structs.replace(
        verdict, note="; ".join(filter(None, (verdict.note, _closed(all_processes))))
    )
    if verdict.label != "accounting_only":
        return verdict
    for process in all_processes:
        why = process.missing.get(DEVICE_CLOCK)
        if why and not _OTHERWISE & {*(process.strategy or "").split("+")}:
            advice = _TURN_ON if _SETTING in why else f"The device's clock is not read: {why}."
            return msgspec.structs.replace(verdict, next=f"{advice} {verdict.next}")
    return verdict


def _closed(processes: Sequence[RankProcess]) -> str:
    """
    Return the ranks whose device clocks have stopped themselves, the first with its step
    and reason; or "".
    """
    closed = {
        process.identity.global_rank: why.removeprefix(CLOSED).strip()
        for process in processes
        if process.identity and (why := process.missing.get(DEVICE_CLOCK, "")).startswith(CLOSED)
    }
    if not closed:
        return ""
    rank = min(closed)
    step, _, why = closed[rank].partition(": ")
    others = f", those of {text.count(len(closed) - 1, 'other rank')} then or later" * (len(closed) > 1)
    return (
        f"rank {rank}'s device clock closed at step {step}{others}: {why}. Later steps are not on the "
        "device's clock, so they are not compared with earlier ones"
    )
