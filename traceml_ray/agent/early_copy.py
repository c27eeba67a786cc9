"""
A file with what a rank has reported before its relay is there.

Ray takes long to start if ranks use every core. Without the file, a rank that is killed before that, or ended
by a launcher because another rank failed, would leave nothing.
"""

from __future__ import annotations

from pathlib import Path

from traceml_ray.agent.outbox import RankOutbox
from traceml_ray.files import remove
from traceml_ray.wire.spool import SUFFIX, add_to_spool

NAME = f".+{SUFFIX}"
"""Sorts before the other spool files of the process, which go on where this one ends."""


class EarlyCopy:
    """
    The copy of one rank process; nothing here runs on the training thread.

    Args:
        spool: the folder; None: there is none.
        most: bytes; what comes after these is not copied.
    """

    def __init__(self, spool: str | None, most: int) -> None:
        self._spool, self._most = spool, most
        self._path: Path | None = None
        """Path of the file, once there is one."""
        self._last = self._bytes = 0
        """Number of the newest batch in the file; `_bytes` is the size of all of them."""

    def tick(self, process_id: str, outbox: RankOutbox) -> None:
        """
        Copy new batches. Remove the file once there is a relay and everything is stored. Raises
        OSError.
        """
        if outbox.connected:
            if self._path is not None and not outbox.holds(self._last):
                self.remove()
            return
        new = [batch for batch in outbox.after(self._last) if batch.data]
        size = sum(len(batch.data) for batch in new)
        if self._spool is None or not new or self._bytes + size > self._most:
            return
        self._path = Path(self._spool) / f"{process_id}{NAME}"
        add_to_spool(self._path, [batch.data for batch in new])
        self._last, self._bytes = new[-1].seq, self._bytes + size

    def remove(self) -> None:
        """Remove the file: what is in it is stored, or in another one."""
        if self._path is not None:
            remove([self._path])
            self._path = None
