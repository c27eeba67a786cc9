"""The agent in a real process of its own: an unchanged script, a socket to a relay, every way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from descent import DESCENT
from ray_cluster import until
from sessions import NoSamples, Straight, aggregation, ask

from traceml_ray.agent.bootstrap import SITE_FOLDER, rank_environment
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import RelayPaths, Settings
from traceml_ray.stages import ROW_BYTES
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import read_spool

TRAIN = f"""
import torch
from torch.utils.data import DataLoader, TensorDataset
{DESCENT}
def train(steps=20, **options):
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    optimizer = Descent(net.parameters())
    loader = DataLoader(TensorDataset(torch.ones(steps * 2, 8)), batch_size=2, **options)
    for (batch,) in loader:
        net(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class Heard(Straight):
    """The way to the aggregator, on which it can be seen what went."""

    def __init__(self, aggregator: AggregatorCore) -> None:
        super().__init__(aggregator)
        self.messages: dict[int, wire.RelayBatch] = {}

    def ingest(self, data: bytes, commit: bool) -> bool:
        message = codec.decode(data, wire.RelayBatch)
        return super().ingest(data, commit) and bool(self.messages.setdefault(message.seq, message))


class Node:
    """What a rank's process meets: the relay of its node, and the aggregator, without Ray."""

    def __init__(self, folder: Path) -> None:
        self._aggregator = aggregation(folder / "session")
        self._way = Heard(self._aggregator)
        node = wire.NodeIdentity("n", "host", "127.0.0.1")
        self._relay = RelayCore(folder / "relay.sock", node, self._way, NoSamples(), Settings())
        self._relay.start()

    def heard(self) -> list[bytes]:
        """Everything that processes have sent so far."""
        assert self._relay.flush(20)
        return [data for message in self._way.messages.values() for data in message.batches]

    def batches(self) -> list[wire.RankBatch]:
        """The same, once the last word of a rank is there."""
        batches = until(lambda: (sent := self._decoded()) and sent[-1].final and sent, "its last word")
        assert isinstance(batches, list)
        return batches

    def last(self) -> list[wire.RankBatch]:
        """The last words that are there."""
        return [batch for batch in self._decoded() if batch.final]

    def processes(self) -> int:
        """How many processes have reported."""
        return len({batch.process_id for batch in self.batches()})

    def printed(self, rank: int) -> list[tuple[str, str]]:
        """The last lines of a rank, with their stream."""
        self.heard()
        self._aggregator.commit()
        return [(line.stream, line.text) for line in ask(self._aggregator, "output", rank=rank)[0].lines]

    def _decoded(self) -> list[wire.RankBatch]:
        return [codec.decode(data, wire.RankBatch) for data in self.heard()]

    def close(self) -> None:
        self._relay.close()
        self._aggregator.close()


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def run(
    tmp_path: Path, script: str, *, stderr: Any = subprocess.PIPE, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` as a rank's process; its output and exit code."""
    file = tmp_path / "script.py"
    file.write_text(script)
    settings = Settings(session="s", interval=0.1)
    paths = RelayPaths(str(tmp_path / "relay.sock"), str(tmp_path))
    base = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        [sys.executable, str(file)],
        env={**base, **rank_environment(settings, paths, base)},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )


def test_agent_watches_an_unchanged_script_to_its_end(tmp_path: Path, relay: Node) -> None:
    script = TRAIN.replace("Descent(net.parameters())", "torch.optim.SGD(net.parameters(), lr=0.1)")
    done = run(tmp_path, script + "train()", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (0, "")
    batches = relay.batches()
    assert relay.processes() == 1 and batches[-1].final
    assert sum(len(b.flags) for b in batches) == batches[-1].produced == 20
    assert batches[-1].identity is not None and batches[-1].identity.global_rank == 1
    assert batches[-1].errors == {} and batches[-1].missing == {}
    (end,) = [event for b in batches for event in b.events]
    assert end.kind == "exit" and isinstance(end.data["tail_ns"], int)
    (left,) = tmp_path.glob("*.spool")
    copy = [codec.decode(data, wire.RankBatch) for data in read_spool(left)]
    assert copy == batches[-len(copy) :]  # the relay has it all, but has not confirmed that it is stored


def test_last_lines_of_a_killed_rank_are_there(tmp_path: Path, relay: Node) -> None:
    """Stdout is a pipe, so what Python writes is seen; stderr a file of the rank's own, which is read."""
    script = (
        TRAIN
        + """
import os, signal, sys, time
os.write(2, b"first words of C\\n")
print("never flushed", end="\\n50%\\r60%")
train()
while not os.path.exists("heard"):
    time.sleep(0.01)
os.write(2, b"\\x1b[31mlast words of C\\x1b[0m, TOKEN=abc\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    known = {("stdout", "never flushed"), ("stdout", "60%"), ("stderr", "first words of C")}
    last = "stderr", "last words of C, TOKEN=***"

    def hear() -> None:
        until(lambda: {*relay.printed(0)} == known, "its first words")
        (tmp_path / "heard").touch()

    with (tmp_path / "stderr").open("w") as stderr, ThreadPoolExecutor(1) as beside:
        heard = beside.submit(hear)
        done = run(tmp_path, script, stderr=stderr, PYTHONUNBUFFERED="", RANK="0", WORLD_SIZE="1")
        heard.result()
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    until(lambda: {*relay.printed(0)} == known | {last}, "its last words")


def test_child_processes_start_as_without_the_agent(tmp_path: Path, relay: Node) -> None:
    script = """
import json, os, subprocess, sys
import torch
told = (
    "import json, os, sys;"
    "print(json.dumps([os.environ.get('PYTHONPATH'), [m for m in sys.modules if 'traceml_ray.' in m]]))"
)
print(subprocess.run([sys.executable, "-c", told + "; import torch"], capture_output=True, text=True).stdout)
"""
    done = run(tmp_path, script, PYTHONPATH=":/some/where")  # the working directory first
    assert json.loads(done.stdout) == [":/some/where", []]
    assert relay.processes() == 1


PROFILED = """
    import threading
    from traceml_ray.wire import messages as wire
    from traceml_ray.agent import bootstrap

    captures, on = bootstrap.current().captures, torch.autograd._profiler_enabled
    steps = dict(first_step=10, steps=25, limit_s=60.0, record_s=60.0)
    captures.handle_command(wire.Command("profile", dict(id="p", number=1, run="r", ranks="0", **steps)))

    def train_twice():
        train()
        options = dict(num_workers=1, worker_init_fn=lambda _: print("in a worker:", on()))
        train(multiprocessing_context="fork", **options)
        print("in the rank:", on(), "from step", captures.status.steps[0][0])

    thread = threading.Thread(target=train_twice)
    thread.start()
    thread.join()
"""
"""As in a worker of Ray Train, where the thread that trains is not the one that has loaded torch."""


@pytest.mark.parametrize(
    ("main", "ending", "code", "printed", "error", "steps"),
    [
        (PROFILED, "sys.exit(3)", 3, "in a worker: False\nin the rank: False from step 10\n", "", 40),
        ("    train(num_workers=1, multiprocessing_context='spawn')", "sys.exit('no')", 1, "", "no\n", 20),
    ],
    ids=["forked during a profile", "spawned"],
)
def test_loader_workers_are_not_watched_and_exit_codes_are_those_of_the_script(
    tmp_path: Path, relay: Node, main: str, ending: str, code: int, printed: str, error: str, steps: int
) -> None:
    done = run(tmp_path, f"{TRAIN}if __name__ == '__main__':\n{main}\n    import sys\n    {ending}")
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, error)
    assert relay.processes() == 1
    assert relay.batches()[-1].produced == steps


def test_forked_child_ends_unchanged_and_sends_nothing(tmp_path: Path, relay: Node) -> None:
    body = """
import os, sys
train()
child = os.fork()
if child == 0:
    train()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    early = """
import os
if os.fork() == 0:  # before torch is there
    import time, torch
    time.sleep(0.5)
    os._exit(0)
os.wait()
"""
    done = run(tmp_path, early + TRAIN + body)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "7", "")
    assert relay.processes() == 1
    batches = relay.batches()
    assert len({b.process_id for b in batches}) == 1 and batches[-1].produced == 20


@pytest.mark.usefixtures("relay")
def test_sitecustomize_of_the_machine_still_runs(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys; sys.theirs = __name__")
    body = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
    done = run(tmp_path, body, PYTHONPATH=str(theirs))
    assert done.stdout.split() == ["sitecustomize", str(theirs / "sitecustomize.py")]
    assert SITE_FOLDER not in done.stdout


def test_python_without_the_package_is_silent_until_torch_is_imported(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "torch.py").touch()
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = 1")
    environ = {
        **os.environ,
        **rank_environment(Settings(), RelayPaths("/none"), {"PYTHONPATH": str(tmp_path)}),
    }

    def run_script(body: str) -> tuple[str, str]:
        words = [str(tmp_path / "bare" / "bin" / "python"), "-c", body]
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        return done.stdout, done.stderr

    ask = "import importlib.util, sys; print(sys.theirs, importlib.util.find_spec('torch') is not None)"
    assert run_script(ask) == ("1 True\n", "")
    out, err = run_script("import torch, sys; print(sys.theirs)")
    assert out == "1\n"
    assert err == (
        "traceml-ray: not watching this process: ModuleNotFoundError: No module named 'traceml_ray'\n"
    )


def test_script_without_torch_loads_only_the_import_hook(tmp_path: Path, relay: Node) -> None:
    loaded = "import sys; print(*sorted(sys.modules))"
    plain = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=240)
    done = run(tmp_path, loaded)
    assert set(done.stdout.split()) - set(plain.stdout.split()) <= {
        *("sitecustomize", "traceml_ray", "traceml_ray.agent", "traceml_ray.agent.imports"),
    }
    assert done.returncode == 0
    assert not relay.heard()


def test_exception_keeps_its_traceback_and_is_reported(tmp_path: Path, relay: Node) -> None:
    done = run(tmp_path, TRAIN + "train()\nraise ValueError('as it was')", API_KEY="hush-hush")
    assert not [packet for packet in relay.heard() if b"hush-hush" in packet]
    plain = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert (done.returncode, done.stderr.replace(str(tmp_path) + "/", "")) == (
        plain.returncode,
        plain.stderr.replace(str(tmp_path) + "/", ""),
    )
    (event,) = [event for b in relay.batches() for event in b.events]
    assert (event.kind, event.message, event.step) == ("exception", "ValueError: as it was", 20)
    assert str(event.data["traceback"]).splitlines()[-3:] == plain.stderr.splitlines()[-3:]


@pytest.mark.usefixtures("relay")
def test_exit_code_is_kept_where_python_has_no_say(tmp_path: Path) -> None:
    assert run(tmp_path, TRAIN + "import os\ntrain()\nos._exit(5)").returncode == 5


@pytest.mark.usefixtures("relay")
def test_signal_ends_the_script_as_without_the_agent(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        done = run(tmp_path, TRAIN + f"import os\ntrain()\nos.kill(os.getpid(), {number:d})")
        assert done.returncode == -number


def test_rows_are_left_in_the_spool_without_a_relay(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN + "train()")
    assert (done.returncode, done.stderr) == (0, "")
    (left,) = tmp_path.glob("*.spool")
    batches = [codec.decode(data, wire.RankBatch) for data in read_spool(left)]
    assert sum(len(b.flags) for b in batches) == 20 and batches[-1].final


def test_api_calls_record_steps_stages_and_spans(tmp_path: Path, relay: Node) -> None:
    body = """
import time
import traceml_ray

net = torch.nn.Linear(8, 1)
def batches():
    for _ in range(5):
        time.sleep(0.01)
        yield torch.ones(2, 8)

for batch in traceml_ray.watch(batches()):
    with traceml_ray.trace_step(net):
        with traceml_ray.stage("tokenize"):
            time.sleep(0.005)
        net(batch).mean().backward()

before = torch.autograd.backward
traceml_ray.detach()
traceml_ray.detach()
print(before is torch.autograd.backward)
net(torch.ones(2, 8)).mean().backward()
with traceml_ray.trace_step(net), traceml_ray.stage("nobody listens"):
    pass
print(list(traceml_ray.watch([1, 2])))
"""
    done = run(tmp_path, TRAIN + body)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, ["False", "[1, 2]"], "")
    batches = relay.batches()
    rows = b"".join(b.rows for b in batches)
    assert len(rows) == 5 * ROW_BYTES and batches[-1].final
    data_ns = [int.from_bytes(rows[i + 8 : i + 16], "little") for i in range(0, len(rows), ROW_BYTES)]
    assert min(data_ns) > 9_000_000
    tokenize = [d for b in batches for d in b.spans if d.name == "tokenize"]
    assert sum(d.count for d in tokenize) == 5 and sum(d.total_ns for d in tokenize) > 25_000_000


# -- what a command of any kind starts: `traceml-ray run` ------------------------------------------------

RANK = """
import os, subprocess, sys
import torch, torch.distributed as dist

def rank(number):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=number, world_size=2)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in torch.utils.data.DataLoader(torch.ones(40, 8), batch_size=4):
        net(batch).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""
STARTED: dict[str, tuple[str, int]] = {
    "forked": ("torch.multiprocessing.start_processes(rank, (), 2, start_method='fork')", 2),
    "by a child of a child": (
        "again = [sys.executable, __file__, 'rank']\n"
        "if sys.argv[1:]: rank(int(os.environ['RANK']))\n"
        "else:\n"
        "    helps = [sys.executable, '-c', 'import torch; torch.save({}, \"x\")']\n"
        "    helper = subprocess.Popen(helps, env={**os.environ, 'RANK': '0'})\n"
        "    words = ['bash', '-c', '\"$@\"; exit $?', 'bash', *again]\n"
        "    ranks = [subprocess.Popen(words, env={**os.environ, 'RANK': str(n)}) for n in (0, 1)]\n"
        "    assert [one.wait() for one in (helper, *ranks)] == [0, 0, 0]",
        2,
    ),
    "alone, without a group": ("exec(TRAIN + 'train(steps=10)')", 1),
}


@pytest.mark.parametrize("how", list(STARTED))
def test_ranks_started_by_a_command_are_watched(tmp_path: Path, relay: Node, how: str) -> None:
    body, ranks = STARTED[how]
    script = f"{RANK}\nTRAIN = {TRAIN!r}\nif __name__ == '__main__':\n{textwrap.indent(body, '    ')}"
    done = run(tmp_path, script, TRACEML_COMMAND="1")
    assert (done.returncode, done.stderr) == (0, "")
    ended = until(lambda: len(relay.last()) >= ranks and relay.last(), "their last words")
    assert sorted(batch.identity.global_rank for batch in ended if batch.identity) == list(range(ranks))
    assert [batch.produced for batch in ended] == [10] * ranks
    assert all(batch.errors == {} and batch.missing == {} for batch in ended)
    assert relay.processes() == ranks


def test_attach_without_a_monitor_prints_one_hint_in_rank_0(tmp_path: Path) -> None:
    script = """
import os, sys, traceml_ray
for rank in "10":
    os.environ["RANK"] = rank
    print([traceml_ray.attach() for _ in range(3)])
    sys.stderr.write(f"rank {rank} is over\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "WORLD_SIZE": "2"},
    )
    assert done.stdout == 2 * f"{[False] * 3}\n"
    first, hint, last = done.stderr.splitlines()
    assert (first, last) == ("rank 1 is over", "rank 0 is over")
    assert "`traceml-ray run -- COMMAND`" in hint
