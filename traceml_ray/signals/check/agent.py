"""
Sends what a check of this node has measured. A launcher leaves it in a file in the spool folder; one rank of
the node takes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from traceml_ray.signals.check.records import Checked
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.wire.codec import ready

FILE = "checks.json"
"""Name of the file, which is a list of `Checked`."""
_CHECKS = list[Checked]


class CheckReport(Collector):
    """
    Sends checks once.

    Args:
        spool: the spool folder. None: there are no checks.
    """

    def __init__(self, spool: str | None) -> None:
        self._file = Path(spool) / FILE if spool else None
        self._sent = 0

    @classmethod
    def of_rank(cls, rank: Rank) -> CheckReport:
        """Return the collector of a rank."""
        return cls(rank.spool)

    def collect(self, final: bool) -> Iterable[Checked]:
        """Return the checks of this node, if no other rank has taken them."""
        if self._file is None:
            return ()
        mine = self._file.with_name(f"{FILE}.{os.getpid()}")
        try:
            self._file.rename(mine)  # of several ranks one succeeds
        except FileNotFoundError:
            return ()
        data = mine.read_bytes()
        mine.unlink()
        checks = msgspec.json.decode(data, type=ready(_CHECKS))
        first, self._sent = self._sent, self._sent + len(checks)
        return [msgspec.structs.replace(one, number=first + place) for place, one in enumerate(checks)]
