"""What the calls of all ranks show, for people and as JSON: groups, newest calls, and the first mismatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from traceml_ray import text
from traceml_ray.document.json import as_json
from traceml_ray.document.model import Column, Table
from traceml_ray.document.text import page
from traceml_ray.signals.collectives.calls import CallTable
from traceml_ray.signals.collectives.match import STATED, Mismatch, match_table, timed_out
from traceml_ray.signals.collectives.waiting import waits

_MOST_ROWS = 40
"""Largest number of rows that are printed. JSON has all."""


class NewestCall(msgspec.Struct, frozen=True):
    """The call in which ranks of a group are, or that they made last."""

    group: str
    """The group for a person: `group mesh_tp`."""
    ranks: tuple[int, ...]
    """Global ranks that are alike."""
    seq: int | None
    """Number of the call in the group. None: the ranks have called none."""
    op: str
    """Operation, shapes and types; empty: there is no call."""
    where: str | None
    """Place in the user's code; None: not known."""
    state: Literal["waits", "over", "none"]
    """`waits`: the call is not over on these ranks; `over`: it is; `none`: no call is known."""


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a job's ranks."""

    ranks: tuple[int, ...]
    """Ranks whose calls are known."""
    calls: int
    """Number of calls that were compared."""
    hang: bool
    """Whether the job hung: it is known, or a rank had waited for as long as the time-out of its group."""
    mismatch: Mismatch | None
    """The first call that does not match. None: there is none."""
    newest: tuple[NewestCall, ...]
    """What the ranks of each group call, equal ranks together."""
    refused: tuple[str, ...] = ()
    """Files that are not used, with the reason."""

    @property
    def bad(self) -> bool:
        """Whether there is a mismatch. A rank that may still come is none."""
        mismatch = self.mismatch
        return mismatch is not None and (mismatch.proven or (self.hang and mismatch.kind not in STATED))


def examine(
    table: CallTable, *, hang: bool | None, world: int | None = None, refused: Sequence[str] = ()
) -> Examined:
    """Return what the calls in a table show; for `hang` and `world` see `match`."""
    hang = timed_out(table, waits(table)) if hang is None else hang
    return Examined(
        ranks=tuple(sorted(table.ranks)),
        hang=hang,
        calls=sum(len(calls.seqs) for by_rank in table.groups.values() for calls in by_rank.values()),
        mismatch=match_table(table, hang=hang, world=world),
        newest=tuple(_newest(table)),
        refused=tuple(refused),
    )


def _newest(table: CallTable) -> Iterator[NewestCall]:
    for group, by_rank in table.groups.items():
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, calls in sorted(by_rank.items()):
            position = calls.pending()
            waits = position is not None
            position = len(calls.seqs) - 1 if position is None else position
            if position < 0:
                alike.setdefault((), []).append(rank)
                continue
            key = calls.seqs[position], calls.signatures[position], calls.places[position], waits, position
            alike.setdefault(key[:4], []).append(rank)
        for kind, ranks in sorted(alike.items()):
            calls = by_rank[ranks[0]]
            position = calls.index(kind[0]) if kind else None
            yield NewestCall(
                group=table.text_of(group),
                ranks=tuple(ranks),
                seq=kind[0] if kind else None,
                op="" if position is None else table.signature(calls, position).text(),
                where=None if position is None else table.place(calls, position),
                state=("waits" if kind[3] else "over") if kind else "none",
            )


_COLUMNS = [
    Column("group", lambda row: row.group.removeprefix("group "), "name"),
    Column("ranks", lambda row: row.ranks, "ranks"),
    Column("call", lambda row: row.seq, "plain"),
    Column("operation", lambda row: row.op, "code"),
    Column("at", lambda row: row.where, "code"),
    Column("state", lambda row: row.state),
]


def as_text(examined: Examined) -> str:
    """Return the first mismatch in sentences, and the newest calls as a table."""
    rows, mismatch = examined.newest, examined.mismatch
    compared = f"{text.count(examined.calls, 'call')} of {text.count(len(examined.ranks), 'rank')}"
    lines = [f"Collectives: {_headline(mismatch)} ({compared})"]
    if mismatch is not None:
        waited = mismatch.waited_s
        lines += ["", mismatch.why]
        lines += [f"Longest wait until this was recorded: {text.age(waited)}."] * (waited is not None)
        lines += ["", f"Next: {mismatch.next}", f"Confidence: {mismatch.confidence}."]
    more = len(rows) - _MOST_ROWS
    note = f"{more:,} more rows: --json has all." if more > 0 else ""
    return page([lines, Table("Newest calls", _COLUMNS, rows[:_MOST_ROWS], note)])


def _headline(mismatch: Mismatch | None) -> str:
    if mismatch is None:
        return "all match"
    who = f": {text.ranks(mismatch.ranks)}" if mismatch.ranks else ""
    return f"{_HEADLINES[mismatch.kind]}{who}"


_HEADLINES = {
    "operation": "another operation",
    "size": "another size",
    "dtype": "another type",
    "root": "another root",
    "order": "another order of two groups",
    "circle": "ranks wait for each other",
    "missing": "did not join",
    "behind": "skipped a call, or made one more",
    "late": "not joined yet",
    "no_answer": "no record of a rank",
    "all_wait": "all ranks wait",
}


def to_json(examined: Examined) -> str:
    """Return all of it as JSON."""
    return as_json(msgspec.to_builtins(examined))
