"""The files of torch's flight recorder: read, refused, and what is named in recorded jobs."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from played import Played

from traceml_ray import cli
from traceml_ray.signals.collectives.dumps import DumpError, dump_files, parsed, read_dump, read_dumps
from traceml_ray.signals.collectives.match import Mismatch, match
from traceml_ray.signals.collectives.records import CallReport, CollectivesReport, GroupReport
from traceml_ray.signals.collectives.reported import as_dump

JOBS = Path(__file__).parents[1] / "data" / "collectives"
"""What torch 2.13 recorded of the jobs in `tests/collective_jobs.py`: four ranks, gloo."""

SECOND = 1_000_000_000

NAMED = {
    "missing": ("missing", (2,), "train", "missing"),
    "other_operation": ("operation", (1,), "other_operation", "other_operation"),
    "other_size": ("size", (3,), "other_size", "other_size"),
    "other_dtype": ("dtype", (3,), "other_dtype", "other_dtype"),
    "other_order": ("order", (0,), "other_order", "other_order"),
    "early_exit": ("missing", (1,), "train", "early_exit"),
    "exception": ("missing", (3,), "train", "exception"),
    "rank_zero_barrier": ("operation", (0,), "rank_zero_barrier", "rank_zero_barrier"),
    "subgroup": ("circle", (0, 1), "subgroup", "subgroup"),
    "one_behind": ("behind", (2,), "train", "one_behind"),
}
"""Job → kind, named ranks, function in which the first of them is, and function in which the others are."""


def _copied(job: str, folder: Path, waited_s: int = 7) -> Path:
    """Copy the files of a job. They were written some seconds after the last call."""
    copied = shutil.copytree(JOBS / job, folder / job)
    for file in dump_files([copied]):
        newest = max(call.created_ns or 0 for call in read_dump(file.path, file.rank).calls)
        os.utime(file.path, ns=(newest + waited_s * SECOND, newest + waited_s * SECOND))
    return copied


def _matched(job: str, folder: Path, *, hang: bool) -> Mismatch | None:
    refused = list[str]()
    mismatch = match(read_dumps(dump_files([_copied(job, folder)]), refused), hang=hang)
    assert not refused
    return mismatch


@pytest.mark.parametrize("job", NAMED)
def test_recorded_jobs(job: str, tmp_path: Path) -> None:
    mismatch = _matched(job, tmp_path, hang=True)
    assert mismatch is not None
    where, others = (str(place).partition(" (train.py:") for place in (mismatch.where, mismatch.others_where))
    assert (mismatch.kind, mismatch.ranks, where[0], others[0]) == NAMED[job]
    assert where[2].rstrip(")").isdecimal()
    assert others[2].rstrip(")").isdecimal()


def test_a_skipped_call_is_named_with_its_line(tmp_path: Path) -> None:
    """In the third step rank 2 leaves out the second of two equal collectives."""
    mismatch = _matched("one_behind", tmp_path, hang=True)
    assert mismatch is not None
    assert "skipped call" in mismatch.why


@pytest.mark.parametrize("job", ["healthy", "evaluates"])
def test_healthy_recorded_jobs_name_nothing(job: str, tmp_path: Path) -> None:
    mismatch = _matched(job, tmp_path, hang=False)
    assert mismatch is None or (mismatch.kind, mismatch.proven) == ("late", False)


def test_only_proven_mismatches_are_named_outside_a_hang(tmp_path: Path) -> None:
    matched = {job: _matched(job, tmp_path, hang=False) for job in NAMED}
    proven = {job for job, mismatch in matched.items() if mismatch is not None and mismatch.proven}
    assert proven == {job for job, (kind, *_) in NAMED.items() if kind not in ("missing", "behind")}


def _entry(seq: int, op: str = "all_reduce", **changed: Any) -> dict[str, Any]:
    """Return an entry as NCCL's recorder writes it."""
    sizes: dict[str, Any] = {"input_sizes": [[8]], "output_sizes": [[8]]}
    types = {"input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    entry = {"record_id": seq - 1, "process_group": ("0", "default_pg"), "collective_seq_id": seq}
    entry |= {"p2p_seq_id": 0, "profiling_name": f"nccl:{op}", "time_created_ns": 1_000_000_000 * seq}
    entry |= {"state": "completed", "retired": True, "timeout_ms": 600_000, "is_p2p": False, "frames": []}
    return entry | sizes | types | changed


def _dump(*entries: dict[str, Any], version: str = "2.10", ranks: str = "[0, 1]") -> dict[str, Any]:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": version, "entries": list(entries), "pg_config": groups, "pg_status": {}}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol(protocol: int) -> None:
    rank = parsed(pickle.dumps(_dump(_entry(1), _entry(2, retired=False, state="started")), protocol), 3)
    assert [(call.seq, call.op, call.done) for call in rank.calls] == [
        (1, "all_reduce", True),
        (2, "all_reduce", False),
    ]
    assert rank.rank == 3
    assert rank.whole
    assert [(group.name, group.desc, group.ranks, group.timeout_s) for group in rank.groups] == [
        ("0", "default_pg", (0, 1), 600.0)
    ]


def test_json_has_numbers_as_text_and_lists_for_pairs() -> None:
    entry = _entry(1, process_group=["0", "default_pg"], collective_seq_id="1", time_created_ns="5")
    rank = parsed(json.dumps(_dump(entry)).encode(), 0)
    assert [(call.group, call.seq, call.created_ns) for call in rank.calls] == [("0", 1, 5)]


def test_version_1_has_a_list_of_entries_with_one_number() -> None:
    old = {"record_id": 4, "pg_id": 0, "seq_id": 5, "profiling_name": "nccl:all_gather", "state": "scheduled"}
    old |= {"input_sizes": [[4]], "output_sizes": [[8]], "time_created_ns": 7, "retired": False}
    rank = parsed(pickle.dumps([old], 2), 1)
    assert [(call.group, call.seq, call.op, call.done) for call in rank.calls] == [
        ("0", 5, "all_gather", False)
    ]
    assert not rank.whole


def test_sends_and_receives_are_not_compared_by_number() -> None:
    send = _entry(2, "send 0->1", is_p2p=True, p2p_seq_id=1)
    together = _entry(2, "coalesced", input_sizes=[], output_sizes=[], retired=False)
    ranks = [parsed(pickle.dumps(_dump(*entries), 2), rank) for rank, entries in enumerate(
        [(_entry(1), _entry(2), send, together), (_entry(1), _entry(2))]
    )]  # fmt: skip
    assert match(ranks, hang=True) is None


def test_collectives_that_run_together_are_one_call() -> None:
    """An uneven all_gather of NCCL: a broadcast for each rank, and an entry that says when all are over."""
    pieces = [
        _entry(1, "_broadcast_oop", output_sizes=[[n]], retired=False, state="scheduled") for n in (8, 9)
    ]
    whole = [*pieces, _entry(1, "ALLGATHER_coalesced", input_sizes=[], output_sizes=[])]
    other = [pieces[0], {**pieces[1], "output_sizes": [[7]]}, whole[2]]
    alike = [parsed(pickle.dumps(_dump(*whole), 2), rank) for rank in (0, 1)]
    assert match(alike, hang=True) is None
    differs = match([alike[0], parsed(pickle.dumps(_dump(*other), 2), 1)])
    assert differs is not None
    assert (differs.seq, differs.proven) == (1, True)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/made by a pickle",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [Evil()]}, 2),
        pickle.dumps({"entries": [Evil()]}, 4),
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # would reserve 16 GB for the memo
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x00.",
        b"\x80\x02X\xff\xff\xff\xffabc",
        b"\x80\x02}X",
        b"\x80",
        b"",
        b"{",
        b"[" * 100_000,
        b'{"entries": 3}',
        b'{"entries": [1, null, {"profiling_name": 4}]}',
        pickle.dumps({"entries": ["x", None]}, 2),
        pickle.dumps([], 2)[:-1],
    ],
)
def test_foreign_files_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes(data)
    with pytest.raises(DumpError) as error:
        read_dump(path, 0)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert not Path("/tmp/made by a pickle").exists()


def test_shared_lists_cost_nothing_more() -> None:
    """A pickle of 60 kB names the same list of 1,000 sizes in 10,000 entries."""
    sizes = [[7] * 64] * 1000
    entries = [
        {"profiling_name": "nccl:all_to_all", "input_sizes": sizes, "collective_seq_id": 1}
        for _ in range(3000)
    ]
    rank = parsed(pickle.dumps({"entries": entries}, 2), 0)
    assert len({id(call.in_sizes) for call in rank.calls}) == 1


def test_ranks_are_in_the_names(tmp_path: Path) -> None:
    for name in ("trace_rank_0", "trace_rank_11.json", "node/rank_3/dump.pickle", "notes.txt", ".hidden_4"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert [file.rank for file in dump_files([tmp_path])] == [0, 3, 11]
    with pytest.raises(DumpError, match="does not end with the number"):
        dump_files([tmp_path / "notes.txt"])
    (tmp_path / "other_0").write_bytes(b"")
    with pytest.raises(DumpError, match="rank 0 is also in"):
        dump_files([tmp_path])
    with pytest.raises(DumpError, match="No such file"):
        dump_files([tmp_path / "none_0"])


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["collectives", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_command_exits_with_3_if_a_rank_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, shown, _ = _run(capsys, _copied("rank_zero_barrier", tmp_path))
    assert code == 3
    assert "another operation: rank 0" in shown
    assert "barrier" in shown
    assert _run(capsys, _copied("missing", tmp_path), "--hang")[0] == 3
    code, shown, _ = _run(capsys, _copied("other_size", tmp_path), "--json")
    assert code == 3
    assert json.loads(shown)["mismatch"]["kind"] == "size"


def test_the_command_names_nothing_in_healthy_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _run(capsys, _copied("healthy", tmp_path))[0] == 0
    code, shown, _ = _run(capsys, _copied("evaluates", tmp_path))
    assert code == 0
    assert "not joined yet" in shown


def test_a_wait_as_long_as_the_time_out_is_a_hang(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The time-out of the recorded jobs is a minute."""
    assert _run(capsys, _copied("missing", tmp_path, waited_s=50))[0] == 0
    assert _run(capsys, _copied("missing", tmp_path / "later", waited_s=70))[0] == 3


def test_a_copy_is_newer_and_says_nothing_of_a_hang(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, shown, hint = _run(capsys, _copied("evaluates", tmp_path, waited_s=86_400))
    assert (code, "Longest wait" in shown) == (0, False)
    assert "--hang" in hint
    code, shown, _ = _run(capsys, _copied("other_size", tmp_path, waited_s=86_400), "--json")
    assert (code, json.loads(shown)["mismatch"]["waited_s"]) == (3, None)


def test_dumps_of_reports_know_when_they_were_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    group = GroupReport("0", "default_pg", [(0, 2, 1)])
    for rank in (0, 1):
        op = ("all_reduce", "barrier")[rank]
        call = CallReport(0, 1, False, op, [], [], [], [], False, 42 * SECOND, None)
        report = CollectivesReport(100 * SECOND, "h", "recorder", [group], [call], True)
        (tmp_path / f"rank_{rank}.json").write_bytes(as_dump(report))
    assert "Longest wait until this was recorded: 42 s." in _run(capsys, tmp_path)[1]


def test_files_in_gzip(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = _copied("other_size", tmp_path)
    for file in dump_files([folder]):
        (folder / f"{file.path.name}.gz").write_bytes(gzip.compress(file.path.read_bytes()))
        file.path.unlink()
    assert _run(capsys, folder)[0] == 3
    (folder / "trace_rank_0.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    code, _, refused = _run(capsys, folder)
    assert code == 3
    assert "trace_rank_0.gz" in refused


def test_other_files_of_a_folder_are_no_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = _copied("healthy", tmp_path)
    for name in ("events.out.tfevents.1764263", "log.1", "core.77", "stdout_3.txt"):
        (folder / name).write_bytes(b"Some other text")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "weights.pt").write_bytes(b"PK")
    assert _run(capsys, folder, "--hang")[0] == 0
    (folder / "metrics_900.json").write_text("{}")
    code, shown, refused = _run(capsys, folder, "--hang")
    assert (code, "no record of a rank" in shown) == (2, False)
    assert "metrics_900.json" in refused


def test_a_rank_without_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = _copied("healthy", tmp_path)
    (folder / "trace_rank_1").unlink()
    assert _run(capsys, folder)[0] == 0
    folder = _copied("missing", tmp_path)
    (folder / "trace_rank_2").unlink()
    code, shown, _ = _run(capsys, folder, "--hang")
    assert code == 3
    assert "no record of a rank: rank 2" in shown
    (folder / "trace_rank_3").write_bytes(b"cut off")
    code, shown, refused = _run(capsys, folder, "--hang")
    assert code == 3
    assert "neither a pickle nor JSON" in refused


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for given in (tmp_path, tmp_path / "none_0", Path("/dev/null")):
        code, shown, reason = _run(capsys, given)
        assert (code, shown) == (2, "")
        assert reason.count("\n") == 1


class _Reporting(Played):
    """Ranks that have been asked for their collectives: all but rank 1 wait in the third."""

    def of_rank(self, rank: int) -> dict[str, Any]:
        tensor = [[8]], ["Float"]
        calls = [
            CallReport(0, number, False, "all_reduce", *tensor, *tensor, number < 3, 1, f"f (t.py:{number})")
            for number in (1, 2, 3)
        ]
        groups = [GroupReport("0", "default_pg", [(0, self.world, 1)])]
        report = CollectivesReport(self.clock(), "h1", "recorder", groups, calls[: 2 if rank == 1 else 3])
        return {"last_calls": [report]}


def test_a_session_has_the_last_collectives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    session = _Reporting(tmp_path / "hung", world=3, late=None)
    session.play()
    code, shown, _ = _run(capsys, tmp_path / "hung")
    assert code == 0
    assert "not joined yet: rank 1" in shown
    code, shown, _ = _run(capsys, "hung", "--sessions", tmp_path, "--hang", "--json")
    assert code == 3
    mismatch = json.loads(shown)["mismatch"]
    assert (mismatch["kind"], mismatch["ranks"], mismatch["seq"]) == ("missing", [1], 3)
    assert mismatch["others_where"] == "f (t.py:3)"


def test_a_session_without_reports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Played(tmp_path / "fast", world=2, late=None).play()
    code, shown, reason = _run(capsys, tmp_path / "fast")
    assert (code, shown) == (2, "")
    assert "no rank has reported its collectives" in reason
