import os
import socket
import subprocess
import sys
from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.identity import IdentityError, RankIdentity, resolve

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "4711",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def places(identity: RankIdentity) -> tuple[int, ...]:
    """Return global, local and node rank, then world size, local world size, nodes."""
    return (
        identity.global_rank,
        identity.local_rank,
        identity.node_rank,
        identity.world_size,
        identity.local_world_size,
        identity.nnodes,
    )


@pytest.mark.parametrize(
    ("source", "environ"), [("torchrun", TORCHRUN), ("openmpi", OPENMPI), ("slurm", SLURM), ("pmi", PMI)]
)
def test_launchers_of_every_kind_place_the_same_rank_alike(source, environ):
    identity = resolve(environ=environ)
    assert places(identity) == (5, 1, 1, 8, 4, 2)
    assert identity.source == source


def test_precedence_follows_the_documented_order():
    explicit = {"global_rank": 0, "world_size": 2}
    everything = TORCHRUN | OPENMPI | SLURM | PMI
    assert resolve(environ=everything, **explicit).source == "explicit"
    for source, names in (("torchrun", TORCHRUN), ("openmpi", OPENMPI), ("slurm", SLURM), ("pmi", PMI)):
        assert resolve(environ=everything).source == source
        everything = {name: value for name, value in everything.items() if name not in names}
    assert resolve(environ=everything).source == "single"


def test_process_without_any_source_is_rank_0_of_1():
    identity = resolve(environ={})
    assert places(identity) == (0, 0, 0, 1, 1, 1)
    assert (identity.pid, identity.hostname) == (os.getpid(), socket.gethostname())
    assert (identity.job_id, identity.attempt, identity.node_id) == ("default", 0, None)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_rank_variables_count_only_with_rank_and_size(missing, how):
    environ = TORCHRUN | {missing: ""}
    if how == "absent":
        del environ[missing]
    assert resolve(environ=environ | PMI).source == "pmi"
    assert resolve(environ=environ).source == "single"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "one"),
        ("RANK", "-1"),
        ("RANK", "1.0"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "99999999999"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("GROUP_RANK", "-3"),
        ("TORCHELASTIC_RESTART_COUNT", "twice"),
        ("TRACEML_ATTEMPT", "twice"),
    ],
)
def test_invalid_count_is_named(name, value):
    with pytest.raises(IdentityError, match=rf"^{name}='{value}' must be an integer from "):
        resolve(environ=TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be below LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 must not be above WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": "8"}, "LOCAL_RANK=8 must be below WORLD_SIZE=8"),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}, "GROUP_RANK=2 must be below GROUP_WORLD_SIZE=2"),
    ],
)
def test_contradictory_values_are_named(change, message):
    with pytest.raises(IdentityError) as caught:
        resolve(environ=TORCHRUN | change)
    assert str(caught.value) == message


@pytest.mark.parametrize("half", [{"global_rank": 0}, {"world_size": 2}, {"local_rank": 0}])
def test_rank_by_keyword_needs_its_world_size(half):
    with pytest.raises(IdentityError, match="global_rank and world_size must be given together"):
        resolve(environ=TORCHRUN, **half)


def test_keywords_are_checked_like_variables():
    with pytest.raises(IdentityError, match=r"^global_rank=True must be an integer"):
        resolve(global_rank=True, world_size=2)
    with pytest.raises(IdentityError, match=r"^nnodes=0 must be an integer from 1"):
        resolve(global_rank=0, world_size=2, nnodes=0)
    with pytest.raises(IdentityError, match=r"^attempt=-1 must be"):
        resolve(attempt=-1, environ={})


def test_keywords_leave_a_broken_environment_unread():
    identity = resolve(global_rank=3, world_size=4, attempt=1, environ={"RANK": "x", "WORLD_SIZE": "y"})
    assert places(identity) == (3, 3, 0, 4, 4, 1)
    assert identity.attempt == 1


def test_ranks_dealt_to_nodes_in_turn_are_placed_by_their_local_rank():
    in_turn = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert places(resolve(environ=OPENMPI | in_turn)) == (3, 1, 1, 8, 4, 2)


def test_small_last_node_does_not_count_past_the_last():
    identity = resolve(global_rank=7, world_size=8, local_world_size=2, nnodes=2)
    assert places(identity) == (7, 1, 1, 8, 2, 2)


def test_uneven_slurm_nodes_hold_more_tasks_than_the_mean():
    uneven = {"SLURM_PROCID": "5", "SLURM_LOCALID": "5", "SLURM_NODEID": "0"}
    assert places(resolve(environ=SLURM | uneven)) == (5, 5, 0, 8, 6, 2)


def test_rank_and_world_size_alone_mean_one_node():
    assert places(resolve(environ={"RANK": "1", "WORLD_SIZE": "2"})) == (1, 1, 0, 2, 2, 1)


def test_node_rank_implies_more_nodes():
    assert places(resolve(environ={"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1"}))[2::3] == (1, 2)


def test_job_and_attempt_come_from_the_launcher_or_session():
    assert resolve(environ=TORCHRUN).attempt == 2
    assert resolve(environ=TORCHRUN | {"TRACEML_ATTEMPT": "5"}).attempt == 5  # of all nodes
    assert resolve(environ=TORCHRUN).job_id == "default"
    assert resolve(environ=TORCHRUN | {"TORCHELASTIC_RUN_ID": "nightly"}).job_id == "nightly"
    assert resolve(environ=SLURM).job_id == "4711"
    assert resolve(environ=SLURM | {"TRACEML_SESSION": "s1"}).job_id == "s1"
    assert resolve(environ={"TRACEML_SESSION": "s1"}, job_id="mine").job_id == "mine"


@given(
    world=st.integers(1, 64),
    data=st.data(),
    names=st.sets(st.sampled_from(["local_rank", "local_world_size", "node_rank", "nnodes"])),
)
def test_missing_values_are_filled_in_consistently(world, data, names):
    known = {name: data.draw(st.integers(0, world), label=name) for name in names}
    rank = data.draw(st.integers(0, world - 1), label="rank")
    try:
        identity = resolve(global_rank=rank, world_size=world, environ={}, **known)
    except IdentityError:
        return
    assert {name: getattr(identity, name) for name in known} == known
    assert 0 <= identity.local_rank < identity.local_world_size <= world
    assert 0 <= identity.node_rank < identity.nnodes
    wire = msgspec.msgpack.encode(identity)
    assert msgspec.msgpack.decode(wire, type=RankIdentity) == identity


@pytest.fixture
def process_group(tmp_path):
    """Initialise torch.distributed in this process, as rank 0 of a world of one."""
    torch = pytest.importorskip("torch")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_initialised_process_group_takes_precedence_over_the_environment():
    other_world = resolve(environ=TORCHRUN)
    assert (other_world.source, places(other_world)) == ("torch.distributed", (0, 0, 0, 1, 1, 1))
    broken = resolve(environ=TORCHRUN | {"LOCAL_RANK": "x"})
    assert places(broken) == (0, 0, 0, 1, 1, 1)
    same_world = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "4"}
    assert places(resolve(environ=TORCHRUN | same_world)) == (0, 0, 3, 1, 1, 4)
    assert resolve(global_rank=1, world_size=2, environ={}).source == "explicit"


def test_torch_without_a_process_group_leaves_the_environment_valid():
    pytest.importorskip("torch.distributed")
    assert resolve(environ=TORCHRUN).source == "torchrun"


def test_resolving_imports_neither_torch_nor_ray():
    code = (
        "import sys; from traceml_ray.identity import resolve; resolve();"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "[]"
