"""
Finds the ranks that block the others in a job that hangs, from the positions of all ranks.

In a hang no rank closes a row any more. If some ranks wait in the exchange of gradients and others do not,
the least advanced of the others block. If all wait for different things, the smallest group blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.analysis.verdict import Stack, Verdict
from traceml_ray.signals.collectives.match import ABSENT, Mismatch
from traceml_ray.stages import POST_SYNC, STAGES, SYNC_WAIT
from traceml_ray.wire.codec import ready

COLLECTIVE = re.compile(
    r"(all_(reduce|gather|to_all)|reduce|broadcast|scatter|gather|(monitored_)?barrier|i?send|i?recv|batch_isend"
    r"|send_object|recv_object|wait$)"
)
"""Pattern of span names that are functions of torch.distributed."""
WAITED = 0.5
"""
Share of the time without progress that a rank must have waited to prove a hang: all ranks may be busy with
one long step (a validation), which the first has just finished.
"""


BUSY_S = 3.0
"""Time since the training thread of a rank was last found to do something up to which it is busy, in s."""
MAX_BUSY_S = 600.0
"""Time without progress after which a rank that is busy hangs all the same, in s: it may repeat for ever."""


@dataclass(frozen=True)
class RankPosition:
    """
    The position of one rank.

    `elapsed_s` is the time since the rank entered `stage`. `span` is the open span inside the stage, entered
    `span_s` ago. `silent_s` is the time for which its agent has not answered although its process exists;
    `state` is then the process's state in the kernel. If the agent answers, it adds `where` the rank is in
    the user's code, the `call` of torch.distributed it is in, the `peer` that this call names (the rank that
    it sends to or receives from, or the root), its whole `stack`, and the time `still_s` since its training
    thread was last found to do something.
    """

    rank: int
    node: str
    step: int
    stage: int
    elapsed_s: float
    span: str | None = None
    span_s: float = 0.0
    ended: bool = False
    silent_s: float | None = None
    state: str | None = None
    where: str | None = None
    call: str | None = None
    stack: str = ""
    pending: str | None = None
    pending_seq: int | None = None
    pending_s: float = 0.0
    still_s: float | None = None
    peer: int | None = None

    @property
    def waits(self) -> bool:
        """
        Whether the rank waits for others. In a function of torch.distributed it may work first: it pickles an
        object.
        """
        works = self.call is not None and self.pending is None and self._moves
        return self.stage == SYNC_WAIT or (self.collective is not None and not works)

    @property
    def _moves(self) -> bool:
        return self.still_s is not None and self.still_s < BUSY_S

    @property
    def collective(self) -> str | None:
        """The function of torch.distributed that the rank waits in. None in the exchange of gradients."""
        pending = None if self.stage == SYNC_WAIT else self.pending
        return self.call or pending or (self.span if COLLECTIVE.match(self.span or "") else None)

    @property
    def waited_s(self) -> float:
        """Time that the rank has certainly waited, in s."""
        in_span = self.span_s if COLLECTIVE.match(self.span or "") else 0.0
        in_call = self.still_s or 0.0 if self.call else 0.0  # such as in `new_group`, which is no span
        return max(self.elapsed_s if self.stage == SYNC_WAIT else in_span, self.pending_s, in_call)

    @property
    def stalled(self) -> bool:
        """Whether the rank is known to be busy: in a known part between two steps, or its thread moves."""
        at_work = self.silent_s is None and not self.ended and not self.waits
        known = self.stage == POST_SYNC and self.span is not None
        return at_work and (known or self._moves)

    @property
    def key(self) -> tuple[int, int]:
        """Step and stage of the rank: how far it has come."""
        return self.step, self.stage

    @property
    def sends(self) -> bool:
        """Whether the rank waits for its peer to receive."""
        return (self.call or "").startswith("send")

    @property
    def awaits(self) -> int | None:
        """The rank that it waits for in a send or receive. None: it is in none, or from any rank."""
        return self.peer if (self.call or "").startswith(("send", "recv")) else None


def find(places: Sequence[RankPosition], quiet_s: float) -> Verdict | None:
    """
    Return the hang in `places` after `quiet_s` seconds in which no rank closed a row. None if there is no
    hang.

    It is not a hang while all ranks are busy, however long, or while no rank waits for another.
    """
    answering = [place for place in places if place.silent_s is None and not place.ended]
    waiting = [place for place in answering if place.waited_s >= WAITED * quiet_s]
    stopped = any(place.silent_s is not None and is_stopped(place.state) for place in places)
    if len(places) < 2 or not (waiting or stopped):
        return None
    blocking = _blocking(places, answering)
    ranks = {place.rank for place in blocking}
    others = [place for place in answering if place.rank not in ranks]
    first = blocking[0] if blocking else None
    stalled = quiet_s < MAX_BUSY_S and first is not None and all(place.stalled for place in blocking)
    known = first is not None and not first.ended and first.silent_s is None
    step = first.step if first and known else min(place.step for place in waiting or places)
    stage = None if first is None or first.ended else STAGES[first.stage]
    return Verdict(
        label="stalled" if stalled else "hang",
        stage=stage,
        stages=(stage,) if stage else (),
        rank=first.rank if first else None,
        ranks=tuple(sorted(place.rank for place in blocking)),
        node=first.node if first else None,
        nodes=tuple(dict.fromkeys(place.node for place in blocking)),
        confidence="high" if len(blocking) == 1 else "medium" if blocking else "low",
        from_step=step,
        to_step=step,
        last_step=step - 1 if step else None,
        open_stage=stage,
        span=first.span if first else None,
        why=f"{_why(blocking, others, answering)} {_nothing_closed(step)} for {text.age(quiet_s)}.",
        next=_next(blocking, answering, stalled),
        stacks=_stacks(blocking, others),
    )


SETUP_S = 120.0
"""Time for which no rank must have done anything before the first step, for a hang in `_SETUP`, in s."""


def find_in_setup(places: Sequence[RankPosition], quiet_s: float, world: int) -> Verdict | None:
    """
    Return the hang in which ranks wait for each other's process group before the first step. None: there is
    none. Arguments as for `find`; `world` is the number of ranks of the job.

    Before the first step any rank may compile or load, and a job that serves requests may wait in a
    collective for hours. Here all ranks are known, none does anything, and some wait where a group is made.
    """
    still = len(places) == world and all((place.still_s or 0.0) >= SETUP_S for place in places)
    alive = not any(place.ended or place.silent_s is not None for place in places)
    alike = len({(place.call, place.where) for place in places}) == 1
    if not still or not alive or alike or not any(place.call in _SETUP for place in places):
        return None
    finding = find(places, quiet_s)
    return finding if finding is not None and finding.label == "hang" else None


def _nothing_closed(step: int) -> str:
    """Return the begin of the sentence on the step that is open."""
    return "No step was closed" if step else "The first step was not closed"


PROVEN_S = 10.0
"""
Time for which ranks must have waited in a collective that cannot match before it is a hang, in s; or half of
the time without progress, if that is less.
"""


def with_mismatch(
    finding: Verdict | None, mismatch: Mismatch | None, places: Sequence[RankPosition], quiet_s: float
) -> Verdict | None:
    """
    Return `finding` with what the ranks' calls of collectives prove; see `find` for the other arguments.

    A mismatch that is proven is a hang wherever the ranks are, also before the first step. Other mismatches
    say more about a hang that is known. A rank that does not answer is named first: nothing is known of its
    last calls.
    """
    if mismatch is None or not mismatch.ranks or any(place.silent_s is not None for place in places):
        return finding
    waited_s = max(mismatch.waited_s or 0.0, *(place.waited_s for place in places), 0.0)
    waited = waited_s >= min(PROVEN_S, WAITED * quiet_s)
    known = finding is not None and finding.label == "hang" and mismatch.kind in {*ABSENT, "circle"}
    if not known and not (mismatch.proven and waited):
        return finding
    blocking = [place for place in places if place.rank in mismatch.ranks]
    if not blocking:
        return finding
    number = f"Call {mismatch.seq:,} of {mismatch.desc}"
    if finding is not None and known and finding.ranks == mismatch.ranks:
        why = f"{finding.why} {number} is the `{mismatch.op}` that did not complete."
        return msgspec.structs.replace(finding, why=why)
    others = [place for place in places if place.rank not in mismatch.ranks and not place.ended]
    step = blocking[0].step if not blocking[0].ended else min(place.step for place in others or places)
    stage = None if blocking[0].ended else STAGES[blocking[0].stage]
    return Verdict(
        label="hang",
        stage=stage,
        stages=(stage,) if stage else (),
        rank=blocking[0].rank,
        ranks=mismatch.ranks,
        node=blocking[0].node,
        nodes=tuple(dict.fromkeys(place.node for place in blocking)),
        confidence=mismatch.confidence,
        from_step=step,
        to_step=step,
        last_step=step - 1 if step else None,
        open_stage=stage,
        span=blocking[0].span,
        why=f"{mismatch.why} {_nothing_closed(step)} for {text.age(quiet_s)}.",
        next=mismatch.next,
        stacks=_stacks(blocking, others),
    )


def with_unknown(
    finding: Verdict | None, unknown: Sequence[int], places: Sequence[RankPosition]
) -> Verdict | None:
    """
    Return `finding`; if it is a hang of no rank, with the ranks that have never reported.

    Args:
        finding: verdict of `find`, or of `with_mismatch`.
        unknown: ranks of the job of which nothing has arrived.
        places: positions of the other ranks.
    """
    if finding is None or finding.label != "hang" or finding.ranks or not unknown:
        return finding
    who = text.ranks(unknown)
    others = [place for place in places if place.waits and not place.ended] or places
    have, it = ("has", "it") if len(unknown) == 1 else ("have", "them")
    age = finding.why.rpartition(" No step was closed")[2]
    why = (
        f"{who[0].upper()}{who[1:]} {have} never reported, so nothing is known of {it}; {_others(others)}. "
        f"No step was closed{age}"
    )
    return msgspec.structs.replace(
        finding, why=why, next=f"Look at the process and the machine of {who}, and at its last output."
    )


def is_stopped(state: str | None) -> bool:
    """Return whether a process is stopped, from its state in the kernel. None: not known."""
    return (state or "").startswith("stopped")


def _blocking(places: Sequence[RankPosition], answering: Sequence[RankPosition]) -> list[RankPosition]:
    """
    Return the ranks that block: those that do not answer; if all answer, the least advanced; if all are
    equally far, those that wait for something else.
    """
    silent = [place for place in places if place.silent_s is not None]
    working = [place for place in answering if not place.waits]
    if silent:
        return silent
    if circle := _circle(answering):
        return circle
    if working:
        least = min(place.key for place in working)
        return [place for place in working if place.key == least]
    groups: dict[tuple[object, ...], list[RankPosition]] = {}
    for place in answering:
        doing = place.collective or place.stage, place.pending_seq, place.where
        groups.setdefault((place.step, *doing), []).append(place)
    fewest, *more = sorted(groups.values(), key=len)
    if more and len(fewest) < len(more[0]):
        return fewest
    return [place for place in places if place.ended] if not more else []


def _circle(answering: Sequence[RankPosition]) -> list[RankPosition]:
    """Return ranks of which each waits for a send or receive of the next one, from the lowest rank on."""
    by_rank = {place.rank: place for place in answering}
    for start in sorted(by_rank):
        path = [by_rank[start]]
        while (place := by_rank.get(_awaited(path[-1]))) is not None and place not in path:
            path.append(place)
        if place is path[0] and len(path) > 1 and len({one.sends for one in path}) == 1:
            return path
    return []


def _is_circle(blocking: Sequence[RankPosition]) -> bool:
    following = [*blocking[1:], *blocking[:1]]
    return len(blocking) > 1 and all(a.awaits == b.rank for a, b in zip(blocking, following, strict=True))


def _awaited(place: RankPosition) -> int:
    return -1 if place.awaits is None else place.awaits


def _why(
    blocking: Sequence[RankPosition], others: Sequence[RankPosition], answering: Sequence[RankPosition]
) -> str:
    if not blocking:
        if len({(place.collective, place.where, place.step) for place in answering}) > 1:
            waits = [f"{text.ranks([place.rank])} {_doing(place)}" for place in answering[:8]]
            return f"The ranks wait for different things: {text.listed(waits)}."
        return f"Every rank {_doing(answering[0])}: the exchange itself does not complete."
    if _is_circle(blocking):
        waits = [f"{text.ranks([place.rank])} {_doing(place)}" for place in blocking[:8]]
        more = f"; and so on, {len(blocking):,} ranks" if len(blocking) > len(waits) else ""
        return f"Ranks wait for each other: {'; '.join(waits)}{more}."
    first = blocking[0]
    nodes = text.listed(list(dict.fromkeys(place.node for place in blocking)))
    who = f"{text.ranks([place.rank for place in blocking])} ({nodes})"
    verb = "is" if len(blocking) == 1 else "are"
    if first.ended:
        what = "has ended" if len(blocking) == 1 else "have ended"
    elif first.silent_s is not None:
        state = f", {first.state}" if first.state else ""
        what = (
            f"{'does' if len(blocking) == 1 else 'do'} not answer: no message for {text.age(first.silent_s)} "
            f"although the process exists{state}. Last known position: {_position(first)}"
        )
    elif first.waits:
        what = _doing(first)
    else:
        span = f"`{first.span}`" if first.span else None
        where = ", ".join(filter(None, [span, first.where, _position(first)]))
        what = f"{verb} in {where}, for {text.age(first.elapsed_s)}"
    steps = {place.step for place in others}
    if first.waits and len(steps) == 1 and steps != {first.step} and _doing(first) == _doing(others[0]):
        return f"{who} {what}, in step {first.step:,}; {_others(others)}, in step {others[0].step:,}."
    return f"{who} {what}; {_others(others)}." if others else f"{who} {what}."


def _position(place: RankPosition) -> str:
    return f"`{STAGES[place.stage]}` of step {place.step:,}"


def _doing(place: RankPosition) -> str:
    where = f", {place.where}" if place.where else ""
    peer = "" if place.peer is None or not place.call else f" {_PEER.get(place.call, 'of')} rank {place.peer}"
    return f"waits in {f'`{place.collective}`{peer}' if place.collective else 'the gradient exchange'}{where}"


_PEER = {
    **dict.fromkeys(("recv", "recv_object_list", "scatter", "scatter_object_list"), "from"),
    **dict.fromkeys(("broadcast", "broadcast_object_list"), "from"),
    **dict.fromkeys(("send", "send_object_list", "gather", "gather_object", "reduce"), "to"),
}
"""Call of torch.distributed → how it stands to the rank that it names."""


def _others(others: Sequence[RankPosition]) -> str:
    """Describe what most of the other ranks do: "the other 3 wait in `all_reduce`, main (train.py:60)"."""
    alike: dict[str, int] = {}
    for place in others:
        doing = _doing(place) if place.waits else f"is in {place.where or _position(place)}"
        alike[doing] = alike.get(doing, 0) + 1
    doing, count = max(alike.items(), key=lambda item: item[1])
    if len(others) == 1:
        return f"the other one {doing}"
    verb, _, rest = doing.partition(" ")
    doing = doing if count == 1 else f"{_PLURAL[verb]} {rest}"
    which = f"the other {count:,}" if count == len(others) else f"{count:,} of the other {len(others):,}"
    return f"{which} {doing}"


_PLURAL = {"waits": "wait", "is": "are"}


_MAKE_GROUPS = (
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "init_device_mesh",
)
_SETUP = ("init_process_group", *_MAKE_GROUPS)
"""Functions in which ranks wait for each other's process group."""


def _next(blocking: Sequence[RankPosition], answering: Sequence[RankPosition], stalled: bool) -> str:
    if answering and all(place.call in _MAKE_GROUPS for place in answering):
        return (
            "All ranks have to make the same groups in the same order, also those that they are no member "
            "of: look at what the list of groups depends on."
        )
    if not blocking:
        return "Look at the network between the nodes, and whether every rank takes part in every collective."
    who = text.ranks([place.rank for place in blocking])
    if _is_circle(blocking):
        return "Let some of these ranks send before they receive, or give both to `batch_isend_irecv`."
    if blocking[0].ended:
        return f"Give every rank the same number of steps: {who} had fewer."
    if blocking[0].silent_s is not None:
        if is_stopped(blocking[0].state):
            return f"Resume {who} (kill -CONT), and find out what stopped it."
        return f"Look at the machine of {who} (dmesg, disk), and at the process with py-spy."
    if blocking[0].collective == "wait":  # no collective that torch's recorder knows
        verb = "wait" if len(blocking) > 1 else "waits"
        return (
            f"{who[0].upper()}{who[1:]} {verb} for an earlier `isend`, `irecv` or `async_op=True`: look for "
            "the rank that did not start the other side of it."
        )
    if blocking[0].waits:
        return (
            "All ranks have to call the same collectives in the same order: look for the reason why "
            f"{who} skipped one or called an additional one."
        )
    if stalled:
        ends = f"`{blocking[0].span}` ends" if blocking[0].span else f"{who} is done"
        return f"The job continues when {ends}."
    return f"Look at the stack of {who}: the others wait for what it is doing there."


def _stacks(blocking: Sequence[RankPosition], others: Sequence[RankPosition]) -> tuple[Stack, ...]:
    """Return all threads of the first blocking rank, and the training thread of the others, each once."""
    first = blocking[:1] if blocking and blocking[0].stack else []
    stacks = [Stack(ranks=(place.rank,), text=place.stack) for place in first]
    alike: dict[tuple[str | None, str | None], list[RankPosition]] = {}
    for place in [*blocking[1:], *others]:
        if place.stack:
            alike.setdefault((place.where, place.call), []).append(place)
    for places in alike.values():
        ranks = tuple(sorted(place.rank for place in places))
        stacks.append(Stack(ranks=ranks, text=places[0].stack.partition("\nthread ")[0]))
    return tuple(stacks)


def hangs(verdicts: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Return the hangs among the live verdicts of a run, each once, in its last version."""
    by_start: dict[int, Verdict] = {}
    for verdict in verdicts:
        if verdict.get("began_ns") is not None:
            by_start[verdict["began_ns"]] = msgspec.convert(verdict, ready(Verdict))
    return list(by_start.values())


def still_open(verdicts: Sequence[Verdict], status: str | None) -> Verdict | None:
    """
    Return the hang that the run is in, or ended in.

    Deaths after it (a collective's time-out, a person who ended the job) are only its consequences.
    """
    return verdicts[-1] if verdicts and verdicts[-1].lasted_s is None and status != "finished" else None
