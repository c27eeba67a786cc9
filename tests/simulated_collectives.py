"""Ranks that run programs of collectives over several groups, move by move, and what is seen of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from traceml_ray.signals.collectives.calls import CollectiveCall, ProcessGroup, RankCollectives

OPS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")
SIZES = (4, 16, 64)
DTYPES = ("Float", "Half")


class Step(NamedTuple):
    """A collective in the program of a rank."""

    group: str
    op: str
    size: int
    dtype: str
    line: int


def program(groups: list[ProcessGroup], length: int, choice: random.Random) -> list[Step]:
    """Return a program that repeats a few collectives, as the steps of training do."""
    loop = [
        Step(
            choice.choice(groups).name,
            choice.choice(OPS),
            choice.choice(SIZES),
            choice.choice(DTYPES),
            10 + line,
        )
        for line in range(choice.randint(1, 6))
    ]
    return [loop[i % len(loop)] for i in range(length)]


@dataclass
class Simulated:
    """
    Ranks that call what their programs say. A call is over when all members of its group have made it alike.

    Args:
        groups: the groups, with their ranks.
        programs: the program of each rank.
        ahead: number of calls that a rank may have in progress: 1 as with gloo, more as on a device.
    """

    groups: list[ProcessGroup]
    programs: list[list[Step]]
    ahead: int = 1
    made: list[list[CollectiveCall]] = field(default_factory=list)
    now_ns: int = 1_000_000_000

    def __post_init__(self) -> None:
        self.made = [[] for _ in self.programs]
        self._by_name = {group.name: group for group in self.groups}

    def able(self) -> list[int]:
        """Return the ranks that can make their next call."""
        return [
            rank
            for rank, steps in enumerate(self.programs)
            if len(self.made[rank]) < len(steps)
            and sum(not self.is_over(call) for call in self.made[rank][-self.ahead :]) < self.ahead
        ]

    def move(self, rank: int) -> None:
        """Let a rank make its next call."""
        step = self.programs[rank][len(self.made[rank])]
        seq = 1 + sum(call.group == step.group for call in self.made[rank])
        sizes = () if step.op == "barrier" else ((step.size,),)
        types = (step.dtype,) * len(sizes)
        self.now_ns += 1_000_000
        place = f"train (train.py:{step.line})"
        call = CollectiveCall(
            step.group, seq, step.op, sizes, types, sizes, types, created_ns=self.now_ns, where=place
        )
        self.made[rank].append(call)

    def run(self, choice: random.Random, moves: int | None = None) -> None:
        """Make moves until no rank can go on, or that many."""
        while (moves is None or moves > 0) and (able := self.able()):
            self.move(choice.choice(able))
            moves = None if moves is None else moves - 1

    def is_over(self, call: CollectiveCall) -> bool:
        """Whether all members of the group have made a call alike."""
        members = self._by_name[call.group].ranks or ()
        kind = call.op, call.in_sizes, call.in_dtypes
        others = [self._numbered(rank, call.group, call.seq) for rank in members]
        return all(
            other is not None and (other.op, other.in_sizes, other.in_dtypes) == kind for other in others
        )

    def _numbered(self, rank: int, group: str, seq: int) -> CollectiveCall | None:
        for call in self.made[rank]:
            if call.group == group and call.seq == seq:
                return call
        return None

    def seen(self, rank: int, *, newest: int | None = None, known: bool = True) -> RankCollectives:
        """
        Return what is seen of a rank now.

        Args:
            rank: the rank.
            newest: number of its newest calls that its ring holds. None: all.
            known: whether the ranks of its groups are recorded.
        """
        calls = [
            CollectiveCall(
                *(
                    call.group,
                    call.seq,
                    call.op,
                    call.in_sizes,
                    call.in_dtypes,
                    call.out_sizes,
                    call.out_dtypes,
                ),
                done=self.is_over(call),
                created_ns=call.created_ns,
                where=call.where,
            )
            for call in self.made[rank]
        ]
        kept = calls if newest is None else calls[-newest:] if newest else []
        called = {call.group for call in calls}
        groups = [
            group if known else ProcessGroup(group.name, group.desc)
            for group in self.groups
            if rank in (group.ranks or ()) and (known or group.name in called)
        ]
        return RankCollectives(
            rank=rank,
            calls=kept,
            groups=groups,
            whole=len(kept) == len(calls),
            taken_ns=self.now_ns + 5_000_000_000,
        )
