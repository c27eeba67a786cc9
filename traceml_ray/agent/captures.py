"""The captures of one process: what commands ask for, and what is sent of it, by the agent's thread."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import msgspec

from traceml_ray import wire
from traceml_ray.agent import all_threads
from traceml_ray.agent.all_threads import AllThreadsProfiler
from traceml_ray.agent.capture import Capture
from traceml_ray.agent.mark_log import LOCK_S
from traceml_ray.agent.patch import rpc
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.spans import Spans
from traceml_ray.agent.torch_profiler import TorchProfiler
from traceml_ray.codec import ready
from traceml_ray.errors import Errors

KEPT_S = 30.0
"""A trace that nobody asks for any more is let go after so long."""


class Captures:
    """
    The captures of one process, one at a time.

    Args:
        recorder: of the training thread's marks.
        spans: shows what the profiler costs as a span.
        errors: counts what goes wrong.
        folder: where a trace may be while it is made.
        clock: monotonic seconds.
        calls: names calls over torch.distributed.rpc; None: no thread but the one that trains is recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        spans: Spans,
        errors: Errors,
        folder: str | None,
        clock: Callable[[], float] = time.monotonic,
        calls: rpc.RpcCalls | None = None,
    ) -> None:
        self._recorder, self._spans, self._errors = recorder, spans, errors
        self._folder, self._clock, self._calls = folder, clock, calls
        self._now: Capture | None = None
        self._heard = 0.0

    # -- the agent's thread --------------------------------------------------------------------------

    def obey(self, command: wire.Command) -> None:
        """Do what a command asks for that is meant for this rank; it is repeated."""
        if command.name == "trace":
            self._send_again(command)
            return
        wanted = msgspec.convert(command.args, ready(wire.ProfileCommand))
        self._heard = self._clock()
        now = self._now
        if now is not None and now.wanted.id == wanted.id and now.wanted.number >= wanted.number:
            now.others_are_done = bool(wanted.over)
            return
        if now is not None:
            now.let_go()
        self._recorder.settle(LOCK_S)  # whether it has done a step
        self._now = Capture(
            wanted, self._recorder, self._spans, self._errors, self._profiler(wanted), self._clock()
        )
        self._now.arm()

    def _profiler(self, wanted: wire.ProfileCommand) -> Callable[[Callable[[], object]], TorchProfiler]:
        """Return what makes the profiler, of a function that is called when the script starts its own."""
        options = bool(wanted.memory), bool(wanted.stacks), bool(wanted.shapes)
        if self._calls is None or not rpc.is_on() or not all_threads.is_possible():
            return functools.partial(TorchProfiler, *options)
        return functools.partial(AllThreadsProfiler, *options, calls=self._calls)

    def _send_again(self, command: wire.Command) -> None:
        now, offset = self._now, command.args.get("offset")
        if now is not None and now.wanted.id == command.args.get("profile") and isinstance(offset, int):
            self._heard = self._clock()
            now.sent = min(now.sent, max(0, offset))

    def turn(self) -> None:
        """Write the trace that is there; give up what takes too long; let go of what is over."""
        now = self._now
        if now is None:
            return
        if now.state == "recorded":
            if now.settled:
                now.export(self._folder)
        elif now.serves and now.state in ("armed", "recording"):
            now.serve(self._clock())
        elif now.state == "armed" and not now.is_on and self._clock() - now.began > now.wanted.limit_s:
            now.end("refused", f"step {now.wanted.first_step} did not come within {now.wanted.limit_s:g} s")
        elif now.state == "recording":
            now.watch(self._clock())
        elif now.state in ("sending", "refused", "failed") and self._clock() - self._heard > KEPT_S:
            now.let_go()
            self._now = None

    def pieces(self, most: int) -> list[wire.TracePiece]:
        """Return the next pieces of the trace, `most` at most."""
        now = self._now
        return [] if now is None else now.pieces(most)

    def lose(self, offset: int) -> None:
        """Note that pieces from `offset` on were lost on their way: they are sent again."""
        if self._now is not None:
            self._now.sent = min(self._now.sent, offset)

    @property
    def status(self) -> wire.Capture | None:
        """How far it is; None while there is none."""
        return None if self._now is None else self._now.status()

    def abandon(self) -> None:
        """End it: this process is no longer watched. Any thread may, once."""
        now, self._now = self._now, None
        if now is not None:
            now.let_go()

    def forked(self) -> None:
        """In a child of this process, which is not watched: nothing is recorded."""
        now, self._now = self._now, None
        if now is not None:
            now.forked()
