"""
How the agent gets into a training process, and out of it: how the process ends, and what is sent of that.

The launcher puts a folder with our `sitecustomize` on the ranks' PYTHONPATH. It waits for
`import torch` and nothing else: a process that never imports torch never loads this module.
A process has one agent at most.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from traceml_ray.agent.channel import Channel, SocketChannel
from traceml_ray.agent.rank_agent import RankAgent, new_process_id
from traceml_ray.errors import error_text, is_out_of_memory, sendable
from traceml_ray.identity import RankIdentity, resolve
from traceml_ray.settings import RelayPaths, Settings, table
from traceml_ray.signals.memory.agent import MemoryHistory
from traceml_ray.stages import DATA
from traceml_ray.text import masked_text
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

_CALLS = 30
"""Largest number of calls of a traceback that are sent: the last ones."""
_TRACEBACK_CHARS = 6000
_MESSAGE_CHARS = 2000
_WHERE_CHARS = 64
_OF_DATA = "traceml_ray.agent.patch.data_waits"
"""Module whose frames wait for batches."""


def event(
    opened: wire.OpenStage, error: BaseException | None, kind: str = "exit", **data: codec.Value
) -> wire.Event:
    """Return the event of how the training thread ended, in `opened`: as `kind`, or by an exception."""
    message, stage = "", opened.stage
    if error is not None:
        stage = _raised_in(error, stage)
        kind, data = "exception", {"type": type(error).__name__, "traceback": _traceback(error)}
        message = masked_text(error_text(error)[:_MESSAGE_CHARS])
    return wire.Event(kind, time.time_ns(), opened.step, stage, message, data)


def out_of_memory(opened: wire.OpenStage, error: BaseException, where: str) -> wire.Event:
    """Return event `oom`: memory ran out in `where`, and the script may go on."""
    data: dict[str, codec.Value] = {"where": sendable(where)[:_WHERE_CHARS], "type": type(error).__name__}
    data["traceback"] = _traceback(error)
    message = masked_text(error_text(error)[:_MESSAGE_CHARS])
    return wire.Event("oom", time.time_ns(), opened.step, opened.stage, message, data)


def _raised_in(error: BaseException, opened: int) -> int:
    """Return in which stage `error` was raised: one that came through a loader has left `data` by now."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == _OF_DATA:
            return DATA
    return opened


def _traceback(error: BaseException) -> str | None:
    """Return its last calls, as Python prints them; None where they cannot be had."""
    try:
        lines = traceback.format_exception(error, limit=-_CALLS)
    except Exception:  # the script's own classes may answer with anything
        return None
    text = sendable("".join(lines))[-2 * _TRACEBACK_CHARS :]
    return masked_text(text)[-_TRACEBACK_CHARS:]


def end_as_interrupted() -> None:
    """
    Have a process that an unhandled KeyboardInterrupt ends die of SIGINT, as it would have without us.

    Python notes that such an exception came out of the code of a whole file or string; any `exec` of a string
    at exit (a dataclass that is imported then) makes it forget that, and exit with 1.
    """
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


SITE_FOLDER = str(Path(__file__).parent / "site")
RANK_PID = "TRACEML_RANK_PID"
"""Set in a rank's environment once it is watched: its children see it and stay out."""

COMMAND = "TRACEML_COMMAND"
"""Set where a command of any kind runs: which of its processes are ranks shows in what they do."""

ChannelTo = Callable[[Settings, RelayPaths], Channel | None]
"""Returns the way to the relay, None where there is none."""

_agent: RankAgent | None = None
_asleep: RankAgent | None = None
"""Instrumentation that is in place, although the process is not known to be a rank yet."""
_lock = threading.Lock()


def _variables() -> list[tuple[str, str]]:
    """Return the settings and paths that a rank is given, each with its variable."""
    settings = [name for name, setting in table(Settings).items() if setting.of_ranks]
    return [(name, f"TRACEML_{name.upper()}") for name in (*settings, *RelayPaths.__struct_fields__)]


def rank_environment(
    settings: Settings, paths: RelayPaths, environ: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables that make a rank's process watch itself."""
    environ = dict(os.environ) if environ is None else environ
    path = [SITE_FOLDER, *filter(None, [environ.get("PYTHONPATH")])]
    values = msgspec.structs.asdict(settings) | msgspec.structs.asdict(paths)
    variables = {variable: str(values[name]) for name, variable in _variables() if values[name] is not None}
    return {"PYTHONPATH": os.pathsep.join(path), **variables}


def clear_rank_environment() -> None:
    """In a process that launches a job of its own inside another one: forget the other's variables."""
    inside = [os.environ.pop(name, None) for name in (RANK_PID, COMMAND)]
    if any(inside):
        for _, variable in _variables():
            os.environ.pop(variable, None)


def start_on_import(pid: int, channel_to: ChannelTo) -> None:
    """Called by our `sitecustomize` when torch has been imported, in process `pid` or a fork of it."""
    try:
        if os.environ.get(COMMAND):
            _start_asleep(channel_to)
        elif os.getpid() == pid:  # not forked before torch was imported
            settings, paths = Settings.load(), RelayPaths.load()
            start(settings, channel=channel_to(settings, paths), spool=paths.spool)
    except Exception as error:
        # The script goes on without a monitor; the report names this rank as one that never reported.
        sys.stderr.write(f"traceml-ray: not watching this process: {error_text(error)}\n")


def _start_asleep(channel_to: ChannelTo) -> None:
    """
    Instrument this process; it reports nothing before it joins a process group or takes an optimizer step.

    A launcher, or a helper of it, does neither, whatever it has in its environment. There is no thread until
    then: the process may be about to fork its ranks.
    """
    global _asleep
    settings, paths = Settings.load(), RelayPaths.load()
    if paths.socket is not None:
        _asleep = RankAgent(settings, SocketChannel(paths.socket), spool=paths.spool)
        _asleep.instrumentation.when_rank(functools.partial(_wake, channel_to))
        _asleep.instrumentation.install()


def _wake(channel_to: ChannelTo) -> None:
    global _asleep
    with _lock:
        agent, _asleep = _asleep, None
        if agent is not None:
            agent.process_id = new_process_id()  # forks of one process are ranks of their own
            agent.channel = channel_to(agent.settings, RelayPaths.load()) or agent.channel
            _begin(agent)


def start(
    settings: Settings | None = None,
    *,
    channel: Channel | None = None,
    identity: Callable[[], RankIdentity] = resolve,
    spool: str | None = None,
) -> RankAgent | None:
    """
    Instrument this process and start its agent; None when there is no relay to talk to.

    Args:
        settings: default: from the environment.
        channel: the way to the relay.
        identity: returns who this process is; asked again and again until its source is
            torch.distributed, or whatever started the rank.
        spool: folder for what may not be stored when this process ends; None: that is lost, and counted.
    """
    global _asleep
    with _lock:
        if _agent is not None:
            return _agent
        settings = settings if settings is not None else Settings.load()
        if channel is None:
            return None
        asleep, _asleep = _asleep, None
        if asleep is not None:
            asleep.instrumentation.remove()
        agent = RankAgent(settings, channel, identity, spool)
        agent.instrumentation.install()
        _begin(agent)
        return agent


def _begin(agent: RankAgent) -> None:
    global _agent
    os.environ[RANK_PID] = str(os.getpid())
    _restore_pythonpath()
    _agent = agent
    agent.start()
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_child)
    if multiprocessing.parent_process() is not None:  # a forked one ends without `atexit`
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)


def current() -> RankAgent | None:
    """Return this process's agent, if it is watched."""
    return _agent


def stop(events: list[wire.Event] | None = None) -> None:
    """Put torch back as it was, send what is left, `events` last, and end the agent's thread."""
    global _agent, _asleep
    with _lock:
        agent, _agent = _agent, None
        asleep, _asleep = _asleep, None
    if asleep is not None:
        asleep.instrumentation.remove()
    if agent is not None:
        atexit.unregister(_at_exit)
        agent.guard("profile", agent.captures.abandon)
        agent.abandon(forked=False)
        agent.instrumentation.remove()
        agent.close(events)
        os.environ.pop(RANK_PID, None)


def _at_exit() -> None:
    global _agent
    agent, _agent = _agent, None
    if agent is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # it reached the top
    if error is not None and is_out_of_memory(error_text(error)):
        agent.collector(MemoryHistory).write()
    agent.guard("profile", agent.captures.abandon)
    recorder = agent.recorder
    end = agent.guard("exit", lambda: event(recorder.open_stage(), error, tail_ns=recorder.tail_ns()))
    agent.ended_in = end.stage if end and error is not None else None
    agent.guard("exit", lambda: agent.close([end] if end else []))
    end_as_interrupted()


def _in_child() -> None:
    """After a fork (DataLoader workers): the child is no rank and keeps nothing of ours."""
    global _agent
    agent, _agent = _agent, None
    if agent is not None:
        atexit.unregister(_at_exit)
        agent.recorder.forked()
        agent.guard("profile", agent.captures.forked)
        agent.abandon(forked=True)
        agent.instrumentation.remove()
        for collector in agent.collectors.values():
            agent.guard("remove", collector.remove)
        agent.channel.forked()


def _restore_pythonpath() -> None:
    """Take our folder off PYTHONPATH again, so that children start as they would without us."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if SITE_FOLDER in parts:
        parts.remove(SITE_FOLDER)  # an empty one is the working directory, and stays
        os.environ["PYTHONPATH"] = os.pathsep.join(parts)
    if parts == []:
        del os.environ["PYTHONPATH"]
