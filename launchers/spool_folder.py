"""The folder of a launch in which ranks, and their relay, leave rows that are not known to be stored."""

from __future__ import annotations

from pathlib import Path

from traceml_ray.printing import say
from traceml_ray.signals.memory.records import SNAPSHOTS
from traceml_ray.store.session import SessionFolder
from traceml_ray.wire.spool import SUFFIX


def make_spool(runtime: Path, session: SessionFolder | None) -> Path:
    """
    Make the folder, below the private one of the launch: on the disk of the session, a rank that ends would
    hang when that disk does. A link in it leads to where their large files go. Raises OSError.
    """
    spool = runtime / "spool"
    spool.mkdir(mode=0o700)
    if session is not None:
        (session.path / SNAPSHOTS).mkdir(mode=0o700)
        (spool / SNAPSHOTS).symlink_to(session.path / SNAPSHOTS)
    return spool


def report_undelivered_rows(spool: Path, why: str = "") -> bool:
    """Print how many ranks have undelivered rows, and the path of `spool`; return whether any has."""
    left = len({path.name.partition(".")[0] for path in spool.glob(f"*{SUFFIX}")})
    if left:
        because = f" ({why})" if why else ""
        say(f"rows of {left} ranks could not be delivered{because}; they are in {spool}")
    return left > 0
