"""
The aggregator as a Ray actor around `AggregatorCore`. A background thread commits, judges, and writes the
files of what has ended.

Ray imports this module in every process that calls the actor, for example in a rank that finds no relay. So
imports that only the actor needs are inside the actor.
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
    from traceml_ray.monitor.sink_process import SinkProcess
    from traceml_ray.store.session import SessionFolder

GC_ALLOCATIONS = 100_000
"""
Number of allocations between two garbage collections (Python's default: 700). The messages of a large job
make this many objects a second, and none of them is in a reference cycle.
"""
COMMIT_S = 1.0
LATE_ROUND_S = 1.5
"""
Time in s after which a job of many nodes is judged, and its rows are committed, although some nodes have not
sent theirs. Otherwise both are done once all nodes have.
"""
JUDGE_S = 0.25
JUDGE_SHARE = 0.1
"""
Largest share of a core that judging may use. A large job is judged less often, at most once per commit. A job
of many nodes is judged once all nodes have sent their rows, see `LATE_ROUND_S`.
"""


class Aggregator:
    """
    The aggregator of one session. Only bytes go in and out. A restarted aggregator continues from the session
    file. When the session is over (`monitor.finish`), it ends all actors of the session, itself last.

    It is synchronous, with one thread for `ingest`, two for `query` and one for `bulk`, so that neither a
    slow question nor a large trace delays rows.
    """

    def __init__(self, config: bytes) -> None:
        from traceml_ray.monitor.aggregator import AggregatorCore
        from traceml_ray.ray.gauges import RayGauges
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
        self._gauges = RayGauges()
        self._core = AggregatorCore(
            folder, made.settings, dict(made.info), flush=lambda: self._ask_relays("flush", HAND_OVER_S),
            gauges=self._gauges.set,
        )  # fmt: skip
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
        self._sinks = self._start_sinks()
        threading.Thread(target=self._beat, name="traceml-beat", daemon=True).start()

    def _start_sinks(self) -> SinkProcess | None:
        """Start the process that reports the session elsewhere, where the settings ask for that."""
        from traceml_ray.monitor.sink_process import SinkProcess
        from traceml_ray.sinks.table import wanted

        if not wanted(self._config.settings):
            return None
        core, config = self._core, self._config
        return SinkProcess(
            core.folder.path,
            config.settings,
            core.query,
            core.errors,
            ended=lambda: self._gauges.set([]),
            environ=config.environ,
        )

    def _beat(self) -> None:
        commit_at = judge_at = 0.0
        idle_ttl = self._config.settings.idle_ttl
        while not (self._is_over() or self._core.idle_s() >= idle_ttl):
            try:
                complete = self._core.pace.round_is_complete
                if time.monotonic() >= commit_at and not complete:
                    commit_at = self._commit()
                self._core.endings.write_due()
                if self._core.endings.left_behind:
                    self._stay_alone()
                if (time.monotonic() >= judge_at or complete) and not self._is_over():
                    now = time.monotonic()
                    self._core.judge()
                    took = time.monotonic() - now
                    pause = min(COMMIT_S, max(JUDGE_S, took / JUDGE_SHARE))
                    if not self._loaded and self._core.verdict:
                        self._load_reports()
                    judge_at = now + (LATE_ROUND_S if self._core.pace.many_nodes else pause)
                if complete:
                    commit_at = self._commit()
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

    def _commit(self) -> float:
        """
        Commit; return when the next commit is due. With many nodes it then waits for the end of their round:
        a commit beside it holds up the messages that arrive.
        """
        due = time.monotonic() + (LATE_ROUND_S if self._core.pace.many_nodes else COMMIT_S)
        self._core.commit()
        return due

    def _load_reports(self) -> None:
        """Import the report's modules while the job runs, because the end of the job waits for the report."""
        from traceml_ray.document import text

        self._loaded = True
        text.load()

    def _is_over(self) -> bool:
        return self._stopped is not None or self._core.over or self._core.fenced

    def _stay_alone(self) -> None:
        """Keep the session once its launcher has gone, and find out whether missing nodes are lost."""
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
        """Record the state of a node of the cluster. A launcher's session may not be on all nodes."""
        if self._config.everywhere or not alive:
            self._core.node_state(node_id, hostname, address, alive)

    def _end_superseded(self) -> None:
        """
        End this process because another process has taken the session over. If the session has ended there,
        the actor ends permanently. Otherwise the other process is this actor, restarted by Ray.
        """
        from traceml_ray.store.schema import SessionFileError

        with contextlib.suppress(SessionFileError), self._core.stored() as file:
            if file.meta().get("status", "running") == "running":
                os._exit(1)
        end_myself()

    @ray.method(concurrency_group="ingest")
    def ingest(self, data: bytes, commit: bool = False) -> bytes:
        """
        Accept a RelayBatch and return a RelayReply. With `commit`, the batch is on disk before
        the reply.
        """
        reply = self._core.ingest(data)
        if self._core.pace.round_is_complete:
            self._wake.set()
        if commit and self._core.commit():
            reply = self._core.ingest(data)  # already taken: only answers what is stored
        return reply

    @ray.method(concurrency_group="ingest")
    def finish(self, data: bytes) -> bytes:
        """
        Accept the `Finish` of a node that has left, or the end of a run. Return `Finished`: the progress of
        that end.
        """
        reply = self._core.end(data)
        self._wake.set()
        return reply

    @ray.method(concurrency_group="bulk")
    def bulk(self, data: bytes) -> bytes:
        """Accept a `TracePart`; return a `TraceReply`."""
        return self._core.bulk(data)

    @ray.method(concurrency_group="query")
    def query(self, message: bytes) -> bytes:
        """Answer questions about the session, see `store.query`."""
        return self._core.query(message)

    @ray.method(concurrency_group="query")
    def about(self) -> bytes:
        """Return the identity and place of this aggregator: `About` as JSON."""
        folder, public = str(self._core.folder.path), msgspec.structs.replace(self._config, environ={})
        config = msgspec.Raw(msgspec.json.encode(public))
        return msgspec.json.encode(
            About(__version__, self._config.session, folder, self._node_id, config, self._core.started_at)
        )

    @ray.method(concurrency_group="query")
    def relay_wanted(self) -> None:
        """Look for nodes without a relay, because a process on such a node has found none."""
        self._membership.check_now()

    @ray.method(concurrency_group="query")
    def stop(self) -> bytes:
        """
        End the session: relays hand over what they hold, the files are written, and all actors of the session
        end. Return Finished; this actor exits a moment later.
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
        Call every relay, and wait a moment for those that reported recently. Return the handles of all relays
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
    """Find or create the session's aggregator on node `node_id`; return its handle. Raises as `make`."""
    return make(Aggregator, aggregator_name(config.session), node_id, config, fresh)
