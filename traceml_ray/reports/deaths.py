"""
Who died first, and why: the headline of a run that broke.

When one rank dies, its peers fail in their collectives and the launcher ends the rest. The culprit
is the first death that is neither of the two.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.store.streams import Stream, last_attempt
from traceml_ray.wire import SEGMENT_BITS, STAGES

ENDED = "process_ended"
"""Kind of event that tells how a process ended, whether that was a death or not."""
FATAL = ("exception", "rank_lost", ENDED)
"""Kinds of event that deaths are told by."""
_FROM_PEERS = re.compile(
    r"connection closed by peer|connection reset|connection refused|broken pipe|socket timeout"
    r"|nccl|processgroup|gloo|distbackenderror|distnetworkerror|tcpstore"
    r"|heartbeat monitor|watchdog caught collective",
    re.IGNORECASE,
)
_SIGNAL = re.compile(r"Signal \d+ \(\w+\) received by PID \d+")
"""What torchrun says of a rank that raised nothing."""
_OUT_OF_MEMORY = re.compile(
    r"outofmemoryerror|memoryerror|out of memory|cublas_status_alloc_failed"
    r"|defaultcpuallocator: (can't|not enough)",
    re.IGNORECASE,
)
_SILENT = frozenset({"ray", "v1"})
"""
Sources of ranks that end without a word: a plain actor may be killed when its work is done, version 1 has no
last message. That alone is no death of a job.
"""


@dataclass(frozen=True)
class Death:
    """
    How one rank's process ended badly. `message` is the exception as `Type: text`, "" when there
    was none; `exit_code` is None where no launcher saw it, a signal is negative.
    """

    rank: int
    t_ns: int
    message: str = ""
    exit_code: int | None = None
    stream: Stream | None = None
    circumstances: str = ""
    """What was said when it was found to be gone."""
    oom_kills: int = 0
    """Processes of its cgroup that the kernel killed meanwhile because memory ran out."""

    @property
    def reason(self) -> str:
        """The exception, else the signal, else the exit code, else what was found, in words."""
        if self.message:
            return self.message.splitlines()[0]
        if self.exit_code is None and self.circumstances:
            return self.circumstances
        if self.out_of_memory:
            return "killed by the kernel: memory ran out"
        return exit_words(self.exit_code)

    @property
    def consequence(self) -> bool:
        """Whether it died of another's death: a collective that failed, or ended by the launcher."""
        return self.exit_code == -signal.SIGTERM or bool(_FROM_PEERS.search(self.message))

    @property
    def out_of_memory(self) -> bool:
        """Whether the exception says that memory ran out, or the kernel killed it for that."""
        if self.message:
            return bool(_OUT_OF_MEMORY.search(self.message))
        return self.oom_kills > 0 and self.exit_code in (None, -signal.SIGKILL)


def exit_words(code: int | None) -> str:
    """Return an exit code in words: `SIGKILL`, `exit code 1`; None is a process that just went away."""
    if code is None:
        return "its process ended without a word"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def deaths(
    failures: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], streams: Sequence[Stream]
) -> list[Death]:
    """
    Return the deaths of the last attempt of a run, first one first.

    `failures` are the launcher's (RankFailure as dicts), `events` and `streams` the run's. A death is told by
    an exception, the launcher, or the relay; each gives its time, the earliest counts.
    """
    own: dict[int | None, list[dict[str, Any]]] = {}
    for event in events:
        if event["kind"] in FATAL:
            own.setdefault(event["stream_id"], []).append(event)
    known = {(s.identity.global_rank, s.identity.pid) for s in streams if s.identity}
    told = {(failure["rank"], failure["pid"]): failure for failure in failures}
    found = [
        Death(failure["rank"], failure["t_ns"], _said(failure), failure["exit_code"])
        for who, failure in told.items()
        if who not in known
    ]
    for stream in last_attempt(streams):
        assert stream.identity is not None
        rank = stream.identity.global_rank
        failure = told.get((rank, stream.identity.pid))
        every = own.get(stream.id, [])
        mine = [event for event in every if event["kind"] != ENDED]
        seen = next((event for event in reversed(every) if event["kind"] == ENDED), None)
        lost = bool(mine) if stream.identity.source in _SILENT else stream.lost
        if not (failure or lost or any(event["kind"] == "exception" for event in mine)):
            continue
        times = [event["t_ns"] for event in every] + ([failure["t_ns"]] if failure else [])
        raised = [event["message"] for event in mine if event["kind"] == "exception"]
        message = next(filter(None, [*raised, _said(failure)]), "")
        ended = seen["data"] if seen else {}
        code = failure["exit_code"] if failure else _whole(ended, "exit_code")
        gone = next((event["message"] for event in mine if event["kind"] == "rank_lost"), "")
        t_ns, kills = min(times, default=stream.last_seen_ns), _whole(ended, "oom_kills") or 0
        found.append(Death(rank, t_ns, message, code, stream, gone, kills))
    return sorted(found, key=lambda death: death.t_ns)


def _whole(data: dict[str, Any], name: str) -> int | None:
    """Return a number that is told in an event; anybody may have sent that."""
    value = data.get(name)
    return value if isinstance(value, int) else None


def _said(failure: dict[str, Any] | None) -> str:
    message = str(failure["message"]) if failure else ""
    return "" if _SIGNAL.match(message) else message


def culprit(found: Sequence[Death]) -> Death | None:
    """Return the first death that no other explains; when every one is explained, the first."""
    first = [death for death in found if not death.consequence] or list(found)
    return first[0] if first else None


def headline(death: Death, node: str | None, others: int) -> Verdict:
    """Return the verdict that names `death`; `others` is the number of ranks that went down after it."""
    stream = death.stream
    step = stage = None
    if stream is not None:
        step = None if stream.last_key is None else stream.last_key >> SEGMENT_BITS
        stage = None if stream.open_stage is None else STAGES[stream.open_stage]
    where = f" ({node})" if node else ""
    at = "" if step is None else f" after step {step}" + (f", in `{stage}`" if stage else "")
    then = f" {others} other rank{'s' * (others != 1)} went down after it." if others else ""
    return Verdict(
        label="oom" if death.out_of_memory else "rank_lost",
        stage=stage,
        rank=death.rank,
        ranks=(death.rank,),
        node=node,
        confidence="medium" if death.consequence else "high",
        last_step=step,
        open_stage=stage,
        exit_reason=death.reason,
        why=f"rank {death.rank}{where} ended first{at}: {death.reason}.{then}",
        next=_advice(death),
    )


def _advice(death: Death) -> str:
    if death.out_of_memory:
        return "Smaller batch or activation checkpointing on this rank; see its memory below."
    if death.exit_code == -signal.SIGKILL:
        return (
            "It was killed: look for the kernel's out-of-memory killer (dmesg), and in the scheduler's log."
        )
    if not death.message and death.exit_code is None and death.circumstances:
        return "Look in the scheduler's log and in the cloud's: the machine went, not the process."
    if death.message or death.exit_code is None or death.exit_code > 0:
        return f"Read the traceback in rank {death.rank}'s own output."
    return f"It crashed: run rank {death.rank} with `python -X faulthandler` for its stack."
