"""
Ray actor around `AggregatorCore`; a background thread commits, judges and writes what has ended.

Ray imports this module wherever the actor is called from, so into a rank that finds no relay: what only the
actor needs is imported in it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from traceml_ray import __version__
from traceml_ray.monitor.finish import GOODBYE_S, HAND_OVER_S, LINGER_S, RELAYS_S, failed
from traceml_ray.ray.actors import (
    About,
    ActorConfig,
    aggregator_name,
    end_myself,
    find_relays,
    is_restarted,
    relay_folder,
)
from traceml_ray.ray.membership import Membership, make
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready

if TYPE_CHECKING:
    from traceml_ray.store.session import SessionFolder

GC_ALLOCATIONS = 100_000
"""
Between collections of garbage (Python: 700): a large job's messages are so many objects a second, none of
them in a cycle.
"""
COMMIT_S = 1.0
JUDGE_S = 0.25
JUDGE_SHARE = 0.1
"""
A large job is judged less often, at most once a commit: judging may take this share of a core. One of many
nodes is judged once all have sent their rows, or half a second after they should have.
"""


class Aggregator:
    """
    One per session. Only bytes come in and go out; a restarted one goes on from the session file. When the
    session is over (`monitor.finish`) it ends every actor of it, itself last.

    Synchronous, with a thread for `ingest`, two for `query` and one for `bulk`: neither a slow question nor a
    large trace delays a row.
    """

    def __init__(self, config: bytes) -> None:
        from traceml_ray.monitor.aggregator import AggregatorCore
        from traceml_ray.store.session import Live, prepare, write_live

        gc.set_threshold(GC_ALLOCATIONS, 10, 10)
        made = msgspec.json.decode(config, type=ready(ActorConfig))
        context = ray.get_runtime_context()
        self._config = made
        self._node_id = context.get_node_id()
        self._held: SessionFolder | None = None
        if not made.folder:
            self._held = prepare(Path(made.settings.out).expanduser(), made.session, again=is_restarted())
        folder = Path(made.folder) if self._held is None else self._held.path
        self._core = AggregatorCore(
            folder, made.settings, dict(made.info), flush=lambda: self._ask_relays("flush", HAND_OVER_S)
        )
        self._membership = Membership(made, self._node_state, self._core.errors)
        self._wake = threading.Event()
        self._stopping = threading.Lock()
        self._stopped: wire.Finished | None = None
        self._alone = self._loaded = False
        if self._held is not None:
            socket = relay_folder(made.session, self._node_id) / "relay.sock"
            write_live(folder, Live(os.getpid(), str(socket), context.gcs_address))
        if made.everywhere:
            self._membership.start()
        threading.Thread(target=self._beat, name="traceml-beat", daemon=True).start()

    def _beat(self) -> None:
        commit_at = judge_at = 0.0
        idle_ttl = self._config.settings.idle_ttl
        while not (self._is_over() or self._core.idle_s() >= idle_ttl):
            try:
                now = time.monotonic()
                if now >= commit_at:
                    commit_at = now + COMMIT_S
                    self._core.commit()
                self._core.endings.write_due()
                if self._core.endings.left_behind:
                    self._stay_alone()
                if (now >= judge_at or self._core.pace.round_is_complete) and not self._is_over():
                    now = time.monotonic()
                    self._core.judge()
                    took = time.monotonic() - now
                    pause = min(COMMIT_S, max(JUDGE_S, took / JUDGE_SHARE))
                    if not self._loaded and self._core.verdict:
                        self._load_reports()
                    judge_at = now + (1.5 * COMMIT_S if self._core.pace.many_nodes else pause)
            except Exception as error:  # without this thread nothing would be stored any more
                self._core.errors.note("beat", error)
            self._wake.wait(0 if self._is_over() else max(0, min(commit_at, judge_at) - time.monotonic()))
            self._wake.clear()
        try:
            if self._core.fenced:
                self._end_superseded()
                return
            if self._core.over:
                time.sleep(LINGER_S)
            self._stop()
        except Exception as error:
            self._core.errors.note("stop", error)
        end_myself()

    def _load_reports(self) -> None:
        """Load what the report needs while the job runs: the end of the job waits for the report."""
        from traceml_ray.document import text

        self._loaded = True
        text.load()

    def _is_over(self) -> bool:
        return self._stopped is not None or self._core.over or self._core.fenced

    def _stay_alone(self) -> None:
        """Hold the session once its launcher has gone, and find out whether missing nodes are lost."""
        if not self._alone:
            self._alone = True
            self._membership.start()
            threading.Thread(target=self._inherit, name="traceml-lock", daemon=True).start()

    def _inherit(self) -> None:
        from traceml_ray.store.session import inherit

        try:
            self._held = self._held or inherit(self._core.folder.path)
        except Exception as error:
            self._core.errors.note("lock", error)

    def _node_state(self, node_id: str, hostname: str, address: str, alive: bool) -> None:
        """Note the state of a node of the cluster; a launcher's session is not on all of them."""
        if self._config.everywhere or not alive:
            self._core.node_state(node_id, hostname, address, alive)

    def _end_superseded(self) -> None:
        """
        End this process: another one has taken the session over. Where the session has ended there, the actor
        ends for good; otherwise the other process is this actor, restarted by Ray.
        """
        from traceml_ray.store.schema import SessionFileError

        with contextlib.suppress(SessionFileError), self._core.stored() as file:
            if file.meta().get("status", "running") == "running":
                os._exit(1)
        end_myself()

    @ray.method(concurrency_group="ingest")
    def ingest(self, data: bytes, commit: bool = False) -> bytes:
        """Take a RelayBatch and return RelayReply; with `commit`, it is on disk before that."""
        reply = self._core.ingest(data)
        if self._core.pace.round_is_complete:
            self._wake.set()
        if commit and self._core.commit():
            reply = self._core.ingest(data)  # already taken: only answers what is stored
        return reply

    @ray.method(concurrency_group="ingest")
    def finish(self, data: bytes) -> bytes:
        """Take Finish of a node that has left, or Run; return Finished: how far that end is."""
        reply = self._core.end(data)
        self._wake.set()
        return reply

    @ray.method(concurrency_group="bulk")
    def bulk(self, data: bytes) -> bytes:
        """Take TracePart, return TraceReply."""
        return self._core.bulk(data)

    @ray.method(concurrency_group="query")
    def query(self, message: bytes) -> bytes:
        """Answer questions about the session, see `store.query`."""
        return self._core.query(message)

    @ray.method(concurrency_group="query")
    def about(self) -> bytes:
        """Return who and where this is: `About` as JSON."""
        folder, config = str(self._core.folder.path), msgspec.Raw(msgspec.json.encode(self._config))
        return msgspec.json.encode(
            About(__version__, self._config.session, folder, self._node_id, config, self._core.started_at)
        )

    @ray.method(concurrency_group="query")
    def relay_wanted(self) -> None:
        """Look for nodes that have no relay: a process on one of them has found none."""
        self._membership.check_now()

    @ray.method(concurrency_group="query")
    def stop(self) -> bytes:
        """
        End the session: relays hand over what they hold, the files are written, and every actor of
        the session ends. Return Finished; this actor is gone a moment later.
        """
        try:
            return codec.encode(self._stop())
        finally:
            threading.Timer(GOODBYE_S, end_myself).start()

    def _stop(self) -> wire.Finished:
        with self._stopping:
            if self._stopped is None:
                self._stopped = self._end_session()
            return self._stopped

    def _end_session(self) -> wire.Finished:
        from traceml_ray.files import remove
        from traceml_ray.monitor.private_folders import is_private

        self._membership.end()
        self._core.endings.prepare_again()
        relays = self._ask_relays("end")
        finished = wire.Finished(codec.VERSION, "written")
        try:
            if not self._core.endings.complete:
                left = relay_folder(self._config.session, self._node_id)
                read = self._core.ingest_spool(left) if is_private(left) else []  # the relay may hang
                self._core.finish(wire.Finish(codec.VERSION, 0))
                remove(read)
        except Exception as error:
            self._core.errors.note("stop", error)
            finished = failed(error)
        self._core.close()
        for relay in relays:
            ray.kill(relay, no_restart=True)
        if self._held is not None:
            self._held.release()
        return finished

    def _ask_relays(self, method: str, *args: object) -> list[Any]:
        """
        Call every relay, wait a little for those that reported lately; return the handles of all that were
        found.
        """
        relays: dict[str, Any] = {}
        try:
            relays = find_relays(self._config.session)
            asked = {node: getattr(relay, method).remote(*args) for node, relay in relays.items()}
            awaited = [ref for node, ref in asked.items() if not self._core.endings.is_silent(node)]
            if awaited:
                ray.wait(awaited, num_returns=len(awaited), timeout=RELAYS_S)
        except Exception as error:  # the GCS does not answer
            self._core.errors.note(f"relays, {method}", error)
        return list(relays.values())


def ensure_aggregator(config: ActorConfig, node_id: str, *, fresh: bool = False) -> Any:
    """Find or make the session's aggregator, on that node; return its handle. Raises as `make`."""
    return make(Aggregator, aggregator_name(config.session), node_id, config, fresh)
