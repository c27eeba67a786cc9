"""
Starts the agent in a training process and stops it. Reports how the process ends.

The launcher puts a folder with our `sitecustomize` on the PYTHONPATH of the ranks. `sitecustomize` only waits
for `import torch`: a process that never imports torch never loads this module. A process has one agent at
most.
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
from traceml_ray.identity import ATTEMPT, RankIdentity, resolve
from traceml_ray.settings import RelayPaths, Settings, table
from traceml_ray.signals.memory.agent import MemoryHistory
from traceml_ray.stages import DATA
from traceml_ray.text import masked_text
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

_CALLS = 30
"""Largest number of calls of a traceback that are sent. The last calls are kept."""
_TRACEBACK_CHARS = 6000
_MESSAGE_CHARS = 2000
_WHERE_CHARS = 64
_OF_DATA = "traceml_ray.agent.patch.data_waits"
"""Module whose frames wait for batches."""


def event(
    opened: wire.OpenStage, error: BaseException | None, kind: str = "exit", **data: codec.Value
) -> wire.Event:
    """
    Return the event that says how the training thread ended, in the stage `opened`: by `kind`, or by an
    exception.
    """
    message, stage = "", opened.stage
    if error is not None:
        stage = _raised_in(error, stage)
        kind, data = "exception", {"type": type(error).__name__, "traceback": _traceback(error)}
        message = masked_text(error_text(error)[:_MESSAGE_CHARS])
    return wire.Event(kind, time.time_ns(), opened.step, stage, message, data)


def out_of_memory(opened: wire.OpenStage, error: BaseException, where: str) -> wire.Event:
    """Return the event `oom`: memory ran out in `where`. The script may continue."""
    data: dict[str, codec.Value] = {"where": sendable(where)[:_WHERE_CHARS], "type": type(error).__name__}
    data["traceback"] = _traceback(error)
    message = masked_text(error_text(error)[:_MESSAGE_CHARS])
    return wire.Event("oom", time.time_ns(), opened.step, opened.stage, message, data)


def _raised_in(error: BaseException, opened: int) -> int:
    """
    Return the stage in which `error` was raised. An error raised through a loader counts as `data`, which is
    closed by now.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == _OF_DATA:
            return DATA
    return opened


def _traceback(error: BaseException) -> str | None:
    """Return the last calls of the traceback as Python prints them. None if they cannot be read."""
    try:
        lines = traceback.format_exception(error, limit=-_CALLS)
    except Exception:  # attributes of the script's own exception classes may raise anything
        return None
    text = sendable("".join(lines))[-2 * _TRACEBACK_CHARS :]
    return masked_text(text)[-_TRACEBACK_CHARS:]


def end_as_interrupted() -> None:
    """
    Make a process that ends with an unhandled KeyboardInterrupt die of SIGINT, as it would without the agent.

    Python notes that such an exception left the code of a whole file or string. Any `exec` of a string at
    exit (for example importing a dataclass) clears that note, and Python would exit with 1.
    """
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


SITE_FOLDER = str(Path(__file__).parent / "site")
RANK_PID = "TRACEML_RANK_PID"
"""Set in the environment of a rank once it is watched. Child processes that see it start no agent."""

COMMAND = "TRACEML_COMMAND"
"""
Set where an arbitrary command runs. A process of it becomes a rank by its behavior: see `_start_asleep`.
"""

ChannelTo = Callable[[Settings, RelayPaths], Channel | None]
"""Returns the channel to the relay. None if there is no relay."""

_agent: RankAgent | None = None
_asleep: RankAgent | None = None
"""Agent whose instrumentation is installed although the process is not known to be a rank yet."""
_lock = threading.Lock()


def _variables() -> list[tuple[str, str]]:
    """Return the settings and paths that a rank receives, as (variable, value)."""
    settings = [name for name, setting in table(Settings).items() if setting.of_ranks]
    return [(name, f"TRACEML_{name.upper()}") for name in (*settings, *RelayPaths.__struct_fields__)]


def rank_environment(
    settings: Settings, paths: RelayPaths, environ: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables that make the process of a rank watch itself."""
    environ = dict(os.environ) if environ is None else environ
    path = [SITE_FOLDER, *filter(None, [environ.get("PYTHONPATH")])]
    values = msgspec.structs.asdict(settings) | msgspec.structs.asdict(paths)
    variables = {variable: str(values[name]) for name, variable in _variables() if values[name] is not None}
    return {"PYTHONPATH": os.pathsep.join(path), **variables}


def clear_rank_environment() -> None:
    """Remove the variables of an outer job, in a process that launches a job inside it."""
    inside = [os.environ.pop(name, None) for name in (RANK_PID, COMMAND, ATTEMPT)]
    if any(inside):
        for _, variable in _variables():
            os.environ.pop(variable, None)


def start_on_import(pid: int, channel_to: ChannelTo) -> None:
    """
    Start the agent in process `pid`, or in a fork of it. Our `sitecustomize` calls this once torch has been
    imported.
    """
    try:
        if os.environ.get(COMMAND):
            _start_asleep(channel_to)
        elif os.getpid() == pid:  # not forked before torch was imported
            settings, paths = Settings.load(), RelayPaths.load()
            start(settings, channel=channel_to(settings, paths), spool=paths.spool)
    except Exception as error:
        # The script continues without a monitor. The report lists this rank as one that never reported.
        sys.stderr.write(f"traceml-ray: not watching this process: {error_text(error)}\n")


def _start_asleep(channel_to: ChannelTo) -> None:
    """
    Instrument this process. It reports nothing until it joins a process group or takes an optimizer step.

    A launcher or its helper does neither, whatever its environment holds. No thread is started until then,
    because the process may be about to fork its ranks.
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
            agent.process_id = new_process_id()  # forks of one process are separate ranks
            agent.channel = channel_to(agent.settings, RelayPaths.load()) or agent.channel
            _begin(agent)


def start(
    settings: Settings | None = None,
    *,
    channel: Channel | None = None,
    identity: Callable[[], RankIdentity] = resolve,
    spool: str | None = None,
    part_of_run_ns: int | None = None,
) -> RankAgent | None:
    """
    Instrument this process and start its agent. Returns None if there is no relay.

    Args:
        settings: default: read from the environment.
        channel: the channel to the relay.
        identity: returns the identity of this process. It is called repeatedly until the identity comes from
            torch.distributed or from the launcher.
        spool: folder for rows that are not confirmed when this process ends. None: they are lost, and
            counted.
        part_of_run_ns: time from which on this process can be part of the run, see `Rank`.
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
        agent = RankAgent(settings, channel, identity, spool, part_of_run_ns)
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
    if multiprocessing.parent_process() is not None:  # a forked process ends without running `atexit`
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)


def current() -> RankAgent | None:
    """Return the agent of this process. None if the process is not watched."""
    return _agent


def stop(events: list[wire.Event] | None = None) -> None:
    """Remove all patches from torch, send what is left with `events` last, and end the agent's thread."""
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
    # the exception was not handled
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None and is_out_of_memory(error_text(error)):
        agent.collector(MemoryHistory).write()
    agent.guard("profile", agent.captures.abandon)
    recorder = agent.recorder
    end = agent.guard("exit", lambda: event(recorder.open_stage(), error, tail_ns=recorder.tail_ns()))
    agent.ended_in = end.stage if end and error is not None else None
    agent.guard("exit", lambda: agent.close([end] if end else []))
    end_as_interrupted()


def _in_child() -> None:
    """Disable everything in a forked child (a DataLoader worker): it is no rank."""
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
    """Remove our folder from PYTHONPATH, so that child processes start as they would without the agent."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if SITE_FOLDER in parts:
        parts.remove(SITE_FOLDER)  # an empty entry means the working directory, and stays
        os.environ["PYTHONPATH"] = os.pathsep.join(parts)
    if parts == []:
        del os.environ["PYTHONPATH"]
