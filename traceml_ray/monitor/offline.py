"""
Ends a session that its aggregator does not end, from the session file and spool files. This happens in this
process (`finish_offline`), or in a separate process (`OfflineEnd`) that can be left alone if the disk hangs.

A call to a disk that hangs does not return, and a process with such a call may never end. A launcher has to
end in time, so it touches the disk of a session whose aggregator does not answer only in another process:
`python -m traceml_ray.monitor.offline`. The stdin of that process receives one line with a JSON
`OfflineRequest`, and one JSON string with the reason once the session may be taken over. Its stdout has
READY, and at the end one JSON `Reply`.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from traceml_ray.errors import error_text
from traceml_ray.files import remove
from traceml_ray.monitor.finish import DISK_S, KILL_S, LOCKED_S, REPORT_S
from traceml_ray.settings import Settings
from traceml_ray.store.session import DATABASE, SessionFolder
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready

_READY = b"ready"
_LOOK_S = 0.02
"""Interval between two checks whether the process makes progress, in s."""


def finish_offline(
    folder: Path,
    settings: Settings,
    finish: wire.Finish,
    spool: Path | None = None,
    info: dict[str, Any] | None = None,
    why: str = "",
) -> Path | None:
    """
    End a session whose aggregator does not answer, from its file and from what agents and relays left in
    `spool`. If that aggregator continues later, it writes nothing any more. `info` is as for
    `AggregatorCore`. `why`, the reason for this way of ending, becomes an event.

    A damaged session file is set aside, and the session is made from `spool` alone. Then the path of the
    damaged file is returned. Raises `SessionFileError`, OSError or `sqlite3.Error` when the files cannot be
    read or written.
    """
    from traceml_ray.monitor.aggregator import AggregatorCore  # these import numpy
    from traceml_ray.store.fence import take_over
    from traceml_ray.store.schema import damaged

    aside, file = None, SessionFolder(Path(folder)).sqlite
    while True:
        try:
            take_over(file, LOCKED_S)
            with contextlib.closing(AggregatorCore(folder, settings, info or {})) as aggregation:
                read = aggregation.ingest_spool(spool) if spool is not None else []
                aggregation.finish(finish, f"finished without the aggregator: {why}" if why else "")
                remove(read)
            return aside
        except Exception:
            if aside is not None or not damaged(file):
                raise
        aside = file.replace(file.with_suffix(".damaged"))
        for rest in ("-wal", "-shm"):
            file.with_name(file.name + rest).unlink(missing_ok=True)


class OfflineRequest(msgspec.Struct, frozen=True):
    """The arguments of `finish_offline`."""

    folder: str
    settings: Settings
    finish: wire.Finish
    spool: str | None
    info: dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """The result of an `OfflineRequest`."""

    error: str = ""
    aside: str = ""
    """Name of the damaged session file that was set aside."""


class DiskHangsError(OSError):
    """The disk of a session does not answer. The message is written for people."""


class OfflineEnd:
    """
    Runs `finish_offline` in a separate process, which starts at once.

    Args:
        request: what to end.
        environ: environment of the process.
        cwd: working directory of the process; not on the disk of the session.

    Raises OSError when the process cannot be started.
    """

    def __init__(self, request: OfflineRequest, environ: Mapping[str, str], cwd: Path) -> None:
        self._folder = request.folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=cwd,
            env={**environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._send(msgspec.json.encode(request))

    def finish(self, why: str = "") -> Reply:
        """
        Tell the process to end the session. Call this once no other process writes it. `why`, the reason for
        this way of ending, becomes an event.

        Raises `DiskHangsError` when the process waits for the disk for longer than `DISK_S`, or takes longer
        than `REPORT_S` in total.
        """
        try:
            self._wait_for_line()
            self._send(msgspec.json.encode(why))
            line = self._wait_for_line()
        finally:
            self._process.kill()  # it may never be gone: nobody waits for that
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        try:
            return msgspec.json.decode(line, type=ready(Reply))
        except msgspec.DecodeError:
            code = self._process.returncode
            return Reply(f"the process that finishes the session ended with exit code {code}")

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it says nothing either
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def _wait_for_line(self) -> bytes:
        """
        Return the next line of the process, waiting as long as it makes progress. b"" once it has
        ended.
        """
        assert self._process.stdout is not None
        before, since = None, time.monotonic()
        deadline = since + REPORT_S
        while not select.select([self._process.stdout], [], [], _LOOK_S)[0]:
            progress, now = _progress(self._process.pid), time.monotonic()
            if progress is None or progress != before:
                before, since = progress, now
            if now - since > DISK_S or now > deadline:
                raise DiskHangsError(f"the disk of {self._folder} does not answer")
        return self._process.stdout.readline()


def _progress(pid: int) -> tuple[Any, ...] | None:
    """
    Return values that change while a process makes progress. None: it waits for a CPU core or
    cannot be seen.
    """
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() == psutil.STATUS_RUNNING:
                return None
            return process.cpu_times(), process.num_ctx_switches(), process.io_counters()
    except (psutil.Error, OSError):  # without /proc
        return None


def main() -> None:
    """Serve one request."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=ready(OfflineRequest))
    file = Path(request.folder) / DATABASE
    with contextlib.suppress(OSError), file.open("rb") as database:  # all else would wait behind it, too
        database.read(1)
    import traceml_ray.monitor.aggregator  # noqa: F401 - while the aggregator may still answer

    _answer(_READY)
    if not (order := sys.stdin.buffer.readline()):  # the launcher has gone
        return
    spool = None if request.spool is None else Path(request.spool)
    try:
        aside = finish_offline(
            Path(request.folder), request.settings, request.finish, spool, request.info,
            msgspec.json.decode(order, type=ready(str)),
        )  # fmt: skip
    except Exception as error:
        _answer(msgspec.json.encode(Reply(error_text(error))))
    else:
        _answer(msgspec.json.encode(Reply(aside=aside.name if aside else "")))


def _answer(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
