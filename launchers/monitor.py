"""
One launch's monitor: its session folder, its Ray, its actors, and their end.

Nothing here may hurt the run. Before the ranks start, a session that cannot be had is an error; from
then on whatever goes wrong is one line on stderr.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from traceml_ray import wire
from traceml_ray.actors.config import ActorConfig
from traceml_ray.actors.names import NAMESPACE
from traceml_ray.agent.bootstrap import rank_environment
from traceml_ray.session import SessionError, prepare
from traceml_ray.settings import Settings

from .cluster import PrivateRay
from .control import LIVE, Live, ask_finish, write_live
from .helper import HelperReply, HelperRequest

HELPER_S = 30.0
HELPER_END_S = 3.0
"""How long an unfinished helper may still take when the job is over (on a cluster not ours)."""
_SWEEP_AGE_S = 60.0


class Monitor:
    """
    Args:
        settings: of the session; `ray_address` None starts a private Ray.
        info: what the launcher knows of the run.
        environ: the user's environment.

    Raises SessionError when there can be no such session.

    """

    def __init__(
        self, settings: Settings, info: dict[str, str | int | float | None], environ: Mapping[str, str]
    ) -> None:
        self._session = prepare(settings.out, settings.session)
        self._spool = self._session.path / "spool"
        try:
            self._spool.mkdir(mode=0o700)
            self._runtime, self._lock = _private_folder()
        except OSError as error:
            self._session.release()
            raise SessionError(f"no room for the monitor's own files: {error}") from error
        self._environ = dict(environ)
        self.settings = msgspec.structs.replace(
            settings,
            session=self._session.name,
            socket=str(self._runtime / "relay.sock"),
            spool=str(self._spool),
        )
        self._info = info
        self._ray: PrivateRay | None = None
        self._helper: subprocess.Popen[bytes] | None = None
        self._ended = False

    def rank_environment(self) -> dict[str, str]:
        """Return what ranks have in their environment beyond the user's."""
        return rank_environment(self.settings, self._environ)

    def start(self) -> None:
        """Bring everything up in the background; call it on the main thread, which they die with."""
        try:
            if self._session.moved is not None:
                _say(f"an older session {self._session.name!r} is now {self._session.moved}")
            environ, address = self._environ, self.settings.ray_address
            if address is None:
                self._ray = PrivateRay(self._runtime, self._environ)
                self._ray.start()
                environ, address = self._ray.environ, self._ray.address
            write_live(self._session.path, Live(os.getpid(), str(self.settings.socket), NAMESPACE, address))
            self._helper = self._start_helper(address, environ)
        except Exception as error:
            _say(f"no monitor for this run: {type(error).__name__}: {error}")

    def finish(self, exit_code: int, failures: list[wire.RankFailure]) -> None:
        """End the session, have its files written, say what they say, and leave nothing behind."""
        self._ended = True
        try:
            message = wire.Finish(wire.VERSION, exit_code, failures)
            self._end_helper()
            finished = ask_finish(Path(str(self.settings.socket)), message)
            self._end_ray()
            if finished is None or not finished.ok:
                self._finish_offline(message, finished)
            shutil.rmtree(self._spool, ignore_errors=True)
            self._report()
        except Exception as error:
            _say(
                f"the session in {self._session.path} could not be finished: {type(error).__name__}: {error}"
            )
        finally:
            self._end_ray()
            with contextlib.suppress(OSError):
                (self._session.path / LIVE).unlink(missing_ok=True)
            shutil.rmtree(self._runtime, ignore_errors=True)
            os.close(self._lock)
            self._session.release()

    def _start_helper(self, address: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        settings = self.settings
        actors = ActorConfig(
            session=self._session.name,
            folder=str(self._session.path),
            socket=str(settings.socket),
            spool=str(self._spool),
            settings=settings,
            info=self._info,
        )
        request = HelperRequest(os.getpid(), address, actors, HELPER_S)
        helper = subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.launchers.helper"],
            cwd=self._runtime,  # the user's folder may hold files named like modules that Ray imports
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        watch = threading.Thread(target=self._watch, args=(helper, msgspec.json.encode(request)), daemon=True)
        watch.start()
        return helper

    def _watch(self, helper: subprocess.Popen[bytes], request: bytes) -> None:
        """Say so once if there will be no monitor."""
        to_send: bytes | None = request
        while True:
            try:
                answer, _ = helper.communicate(to_send, timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                to_send = None
            if self._ray is not None and self._ray.exited():
                helper.kill()
        try:
            reply = msgspec.json.decode(answer, type=HelperReply)
        except msgspec.MsgspecError:
            ended = self._ray.last_words() if self._ray is not None and self._ray.exited() else ""
            reply = HelperReply(False, ended or f"the helper ended with exit code {helper.returncode}")
        if not reply.ok and not self._ended:
            _say(f"training goes on without a live monitor: {reply.detail}")
            self._end_ray()

    def _end_helper(self) -> None:
        """Let an unfinished helper go; on a cluster that stays, what it made would stay, too."""
        if self._helper is None:
            return
        if self._ray is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._helper.wait(HELPER_END_S)
        self._helper.kill()
        self._helper.wait()

    def _end_ray(self) -> None:
        if self._ray is not None:
            self._ray.stop()

    def _finish_offline(self, message: wire.Finish, finished: wire.Finished | None) -> None:
        from traceml_ray.actors.aggregation import finish_offline

        if finished is not None:
            _say(f"finishing the session without its aggregator: {finished.detail}")
        finish_offline(self._session.path, self.settings, message, self._spool, self._info)

    def _report(self) -> None:
        """Say the verdict, in the words of the summary, and where to read on."""
        verdict = json.loads(self._session.summary_json.read_bytes())["verdict"]
        _say(f"{verdict['label']}: {verdict['why']}")
        if verdict["next"]:
            _say(f"next: {verdict['next']}")
        _say(f"files: {self._session.path}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody may be reading any more
        print(f"traceml-ray: {text}", file=sys.stderr, flush=True)


def _private_folder() -> tuple[Path, int]:
    """Return a new folder for sockets and Ray's files, and the lock that says that it is in use."""
    # Not TMPDIR: paths of sockets may not be long.
    _sweep(Path("/tmp"))
    folder = Path(tempfile.mkdtemp(prefix="traceml-", dir="/tmp"))
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _sweep(where: Path) -> None:
    """Remove the folders of launchers that were killed: nobody holds their lock."""
    for lock in where.glob("traceml-*/.lock"):
        try:
            status = lock.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _SWEEP_AGE_S:
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue
