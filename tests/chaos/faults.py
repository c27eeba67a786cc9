"""What can be done to a monitor while it runs: each is a `harness.Fault`."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Generator

import msgspec
from chaos.harness import TRAIN, Fault, Run
from ray_cluster import until

from traceml_ray.stages import ROW_BYTES
from traceml_ray.store.profiles import under_way
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

Steps = Generator[None, None, None]
RELAY, AGGREGATOR, RAYLET, GCS = "NodeRelay", "Aggregator", "raylet", "gcs_server"
PAUSE_S = 1.5
"""Of training, where there has to be time for something to be noticed."""
SINKS = {"prometheus", "alerts", "kubeflow", "opentelemetry", "trackers"}
"""The sinks that can fail, all of which have nobody who takes what they send."""


def nothing(_run: Run) -> Steps:
    """No harm, but the monitor is up before training goes on."""
    yield


def killed(*names: str, node: int = 0) -> Fault:
    """Kill them for good, or until Ray makes them again."""

    def fault(run: Run) -> Steps:
        for name in names:
            run.signal(name, signal.SIGKILL, node)
        yield

    return fault


def stopped(name: str, *, go_on: bool = False, node: int = 0) -> Fault:
    """Stop it at the first stop; have it `go_on` at the third."""

    def fault(run: Run) -> Steps:
        run.signal(name, signal.SIGSTOP, node)
        yield
        yield
        if go_on:
            run.signal(name, signal.SIGCONT, node)
        yield

    return fault


def in_turn(*faults: Fault) -> Fault:
    """The first harm of each, one at each stop."""

    def fault(run: Run) -> Steps:
        for one in faults:
            next(one(run))
            yield

    return fault


def hung(who: str, *, go_on: bool = False) -> Fault:
    """Hang it in the middle of a message."""

    def fault(run: Run) -> Steps:
        (run.folder / f"hang.{who}").touch()
        yield
        yield
        if go_on:
            (run.folder / f"hang.{who}").unlink()
        yield

    return fault


def disk_hangs(*, go_on: bool = False) -> Fault:
    """Nothing that is asked of the disk that sessions are on returns; have it `go_on` at the third stop."""

    def fault(run: Run) -> Steps:
        fifo = run.folder / "hang.disk"
        os.mkfifo(fifo)
        yield
        time.sleep(PAUSE_S)
        yield
        if go_on:
            waited_for = os.open(fifo, os.O_RDWR)  # lets go of everybody who waits
            fifo.unlink()
            run.undo.append(lambda: os.close(waited_for))
        yield

    return fault


def frozen(run: Run) -> Steps:
    """Who writes to the disk that sessions are on hangs in the kernel, where not even SIGKILL ends it."""
    subprocess.run(["fsfreeze", "--freeze", str(run.out)], check=True)
    run.thaw.append(lambda: subprocess.run(["fsfreeze", "--unfreeze", str(run.out)], check=True))
    yield
    time.sleep(PAUSE_S)
    yield


def slow(run: Run) -> Steps:
    """An aggregator that gets a tenth of the time."""
    run.signal(AGGREGATOR, signal.SIGSTOP)
    command = "while kill -CONT {0} && sleep 0.05 && kill -STOP {0} && sleep 0.45; do :; done"
    (aggregator,) = run.processes(AGGREGATOR)
    beating = subprocess.Popen(["bash", "-c", command.format(aggregator.pid)], stderr=subprocess.DEVNULL)
    run.undo.append(beating.kill)
    yield


def filled(*, freed: bool = False, kill: str = "") -> Fault:
    """Fill the disk that sessions are on, kill something then, and make room again at the third stop."""

    def fault(run: Run) -> Steps:
        filler = run.out / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
        yield
        if kill:
            run.signal(kill, signal.SIGKILL)
        time.sleep(PAUSE_S)
        yield
        if freed:
            filler.unlink()
        yield

    return fault


def read_only(run: Run) -> Steps:
    """No file can be made, or removed, in the session's folder any more."""
    if os.geteuid():
        run.session.chmod(0o500)
        run.undo.append(lambda: run.session.chmod(0o700))
    else:
        subprocess.run(["chattr", "+i", str(run.session)], check=True)
        run.undo.append(lambda: subprocess.run(["chattr", "-i", str(run.session)], check=True))
    yield


def unbundled(run: Run) -> Steps:
    """A bundle is wanted where no folder for it can be made; that is counted."""
    (run.session / "bundles").write_text("")
    with connected(run) as sock:
        sock.send(codec.encode(wire.ControlRequest(codec.VERSION, "a")))

    def counted() -> bool:
        with SessionFile(run.session / "session.sqlite") as file:
            return "bundle: FileExistsError" in file.meta().get("errors", {})

    until(counted, "the bundle failed", 20)
    yield


def profiled(*names: str) -> Fault:
    """Kill them once ranks are asked for a profile; without any, that is all."""

    def fault(run: Run) -> Steps:
        wanted = wire.ProfileRequest(steps=20)
        with connected(run) as sock:
            sock.send(codec.encode(wire.ControlRequest(codec.VERSION, "p", wire.MeasureRequest("p", wanted))))
        until(lambda: (now := under_way(run.session)) is not None and now.ranks, "a capture", 20)
        yield
        for name in names:
            run.signal(name, signal.SIGKILL)
        yield

    return fault


def corrupted(run: Run) -> Steps:
    """Garbage over the session file, and what belongs to it."""
    for path in run.session.glob("session.sqlite*"):
        path.write_bytes(secrets.token_bytes(path.stat().st_size))
    yield


def removed(run: Run) -> Steps:
    """The session's folder is gone."""
    shutil.rmtree(run.session)
    yield


def clock(who: str, seconds: float) -> Fault:
    """Move the wall clock of `rank`s or of the `monitor`."""

    def fault(run: Run) -> Steps:
        (run.folder / f"clock.{who}").write_text(str(seconds))
        yield

    return fault


def spoken(run: Run) -> Steps:
    """Send what no agent sends, and what one has sent before."""
    with SessionFile(run.session / "session.sqlite") as file:
        processes = [(process.process_id, process.last_batch) for process in file.processes()]
    replayed = [batch(name, number) for name, last in processes for number in range(last + 1)]
    good = batch("0" * 16, 0)
    newer = msgspec.structs.replace(codec.decode(good, wire.RankBatch), v=codec.VERSION + 1)
    messages = [
        *(b"\0", b"\xc1junk", secrets.token_bytes(4000), bytes(60_000)),
        *(good[:cut] for cut in range(1, len(good), 7)),
        *(codec.encode(newer), good + b"\0"),
        *replayed * 3,
        secrets.token_bytes(wire.MAX_BATCH_BYTES + 1),
    ]
    if run.case.command == TRAIN:
        (run.folder / "messages.part").write_bytes(msgspec.msgpack.encode(messages))
        (run.folder / "messages.part").rename(run.folder / "messages")
        until(lambda: (run.folder / "messages.sent").exists(), "messages were sent", 30)
    else:
        with connected(run) as sock:
            send(sock, messages)
    yield


def send(sock: socket.socket, messages: list[bytes]) -> None:
    """Send them, and read what is answered."""
    for data in messages:
        with contextlib.suppress(OSError):  # larger than a packet can be, here
            sock.send(data)
        with contextlib.suppress(BlockingIOError):
            sock.recv(1 << 16, socket.MSG_DONTWAIT)


def flooded(run: Run) -> Steps:
    """A process that sends as fast as it can, for itself and for many that are not, and reads no answer."""
    data = [batch("f" * 16, number, wire.MAX_ROWS) for number in range(300)]
    data += [batch(f"{number:016}", 0, 0) for number in range(3000)]
    with connected(run) as sock:
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            for one in data:
                sock.send(one)
    yield


def stolen(*, kill: bool = False) -> Fault:
    """Somebody else listens at the relay's path, and takes everything."""

    def fault(run: Run) -> Steps:
        path = run.socket
        path.unlink()
        thief = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thief.bind(str(path))
        thief.listen(16)
        run.undo.append(thief.close)
        if kill:
            run.signal(RELAY, signal.SIGKILL)
        yield

    return fault


def unlinked(run: Run) -> Steps:
    """The relay's socket is removed, and the relay killed."""
    run.socket.unlink()
    run.signal(RELAY, signal.SIGKILL)
    yield


def sinks_harmed(port: int) -> Fault:
    """
    Where the sinks send, nobody listens until every sink has failed. Then somebody listens who never answers,
    and at the third stop somebody who ends every connection.
    """

    def fault(run: Run) -> Steps:
        until(lambda: failed_sinks(run) >= SINKS, "every sink fails", 90)
        yield
        hanging = socket.create_server(("127.0.0.1", port), backlog=64)
        time.sleep(PAUSE_S)
        yield
        ending = threading.Thread(target=end_connections, args=(hanging,), daemon=True)
        ending.start()
        run.undo.append(lambda: hanging.shutdown(socket.SHUT_RDWR))
        time.sleep(PAUSE_S)
        yield

    return fault


def failed_sinks(run: Run) -> set[str]:
    """Return the sinks that the session knows not to deliver, by the first word of their names."""
    with SessionFile(run.session / "session.sqlite") as file:
        sinks = file.meta().get("sinks", [])
    return {sink["name"].split()[0] for sink in sinks if sink["failed"] and sink["error"]}


def end_connections(listening: socket.socket) -> None:
    """End every connection at once, until the socket is shut down."""
    with contextlib.suppress(OSError), listening:
        while True:
            listening.accept()[0].close()


@contextlib.contextmanager
def connected(run: Run) -> Generator[socket.socket, None, None]:
    """A connection to the relay."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(run.socket))
        yield sock


def batch(process_id: str, seq: int, rows: int = 4) -> bytes:
    """A batch such as an agent might have sent."""
    return codec.encode(
        wire.RankBatch(
            v=codec.VERSION, process_id=process_id, seq=seq, sent_ns=0, produced=rows * (seq + 1), dropped=0,
            first_row=rows * seq, keys=bytes(8 * rows), flags=bytes(rows), rows=bytes(ROW_BYTES * rows),
        )
    )  # fmt: skip
