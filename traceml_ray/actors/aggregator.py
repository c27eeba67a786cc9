"""The aggregator as a Ray actor: `Aggregation` with a beat of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import ray

from traceml_ray import wire
from traceml_ray.actors.aggregation import Aggregation
from traceml_ray.actors.config import ActorConfig
from traceml_ray.actors.names import end_myself

COMMIT_S = 1.0


class Aggregator:
    """
    One per session. Only bytes come in and go out; a restarted one goes on from the session file.

    Synchronous, with a thread for `ingest` and two for `query`: a slow question holds up nothing.
    """

    def __init__(self, config: bytes) -> None:
        made = ActorConfig.from_json(config)
        self._ttl = made.settings.idle_ttl
        self._aggregation = Aggregation(Path(made.folder), made.settings, dict(made.info))
        threading.Thread(target=self._beat, name="traceml-beat", daemon=True).start()

    def _beat(self) -> None:
        while self._aggregation.idle_s() < self._ttl:
            try:
                self._aggregation.commit()
                self._aggregation.judge()
            except Exception as error:  # without this thread nothing would be stored any more
                self._aggregation.errors[f"beat: {type(error).__name__}"] += 1
            time.sleep(COMMIT_S)
        self._aggregation.commit()
        end_myself()

    @ray.method(concurrency_group="ingest")
    def ingest(self, data: bytes, commit: bool = False) -> bytes:
        """Take a RelayBatch and return RelayReply; with `commit`, it is on disk before that."""
        reply = self._aggregation.ingest(data)
        if commit and self._aggregation.commit():
            reply = self._aggregation.ingest(data)  # already taken: only answers what is stored
        return reply

    @ray.method(concurrency_group="ingest")
    def finish(self, data: bytes) -> bytes:
        """Take Finish, end the session and write its files; return Finished."""
        try:
            message = wire.decode(data, wire.Finish)
            self._aggregation.finish(message)
            if message.stop:
                self._aggregation.close()  # the session file is whole, without a WAL beside it
        except Exception as error:
            return wire.encode(wire.Finished(wire.VERSION, False, f"{type(error).__name__}: {error}"))
        return wire.encode(wire.Finished(wire.VERSION, True))

    @ray.method(concurrency_group="query")
    def query(self, request: bytes) -> bytes:
        """Answer a question (see `Aggregation.query`)."""
        return self._aggregation.query(request)
