"""The spool files of a relay's node: takes what agents left there, leaves what is not known to be stored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from traceml_ray.errors import Errors
from traceml_ray.files import remove
from traceml_ray.monitor.outbox import Outbox
from traceml_ray.monitor.rank_intake import RankIntake
from traceml_ray.monitor.spooled import spooled
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import SUFFIX, write_spool


@dataclass(eq=False)
class RelaySpool:
    """
    Used with the relay's lock held, except `salvage`.

    Args:
        folder: where the files are; None: there are none.
        outbox: has what is not known to be stored.
        intake: takes batches.
        errors: counts what cannot be read.
        lock: the relay's.
    """

    folder: Path | None
    outbox: Outbox
    intake: RankIntake
    errors: Errors
    lock: threading.RLock
    _taken: list[Path] = field(default_factory=list)
    """Files that can go once what was in them is stored."""
    _seen: set[Path] = field(default_factory=set)

    def collect(self, all_stored: Callable[[], bool]) -> None:
        """Take what agents have left since; remove the files before, once all is stored."""
        if self._taken and all_stored():
            remove(self._taken)
            self._seen.difference_update(self._taken)
            self._taken = []
        self._taken += self._read(self._seen)

    def read(self) -> list[Path]:
        """Take what agents left; return the files that can go once it is stored."""
        return self._read(set())

    def _read(self, seen: set[Path]) -> list[Path]:
        """Take what is in files not `seen`; return these."""
        read = []
        for path, batches in spooled(self.folder, self.errors, seen) if self.folder else ():
            for batch, frame in batches:
                try:
                    self.intake.accept(batch, frame)
                except wire.WireError as error:
                    self.errors.note("spool", error)
            read.append(path)
        return read

    def salvage(self) -> list[Path]:
        """Leave what is not known to be stored; return the files. Any thread may. Raises OSError."""
        if self.folder is None:
            return []
        with self.lock:
            packets, waiting = self.outbox.salvage()
        packed = [frame for packet in packets for frame in wire.decode(packet, wire.RelayBatch).batches]
        frames: dict[str, list[bytes]] = {}
        for frame in [*packed, *waiting]:
            frames.setdefault(wire.decode(frame, wire.RankBatch).process_id, []).append(frame)
        # An agent's own file, which begins later or goes further, sorts after this one.
        files = {self.folder / f"{process}.0{SUFFIX}": held for process, held in frames.items()}
        for path, held in files.items():
            write_spool(path, held)
        return [*files]
