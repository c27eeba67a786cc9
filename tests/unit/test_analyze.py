"""`traceml_ray.analyze` and the command `analyze`: what a person is told of memory, from files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sessions import Clock, Rank, Relay, aggregation
from snapshot import Snapshot
from stormlog_example import BEGAN_NS, MIB, SECOND, events, leak, level, of_cpu, write

import traceml_ray
from traceml_ray import cli
from traceml_ray.identity import RankFilterError
from traceml_ray.reports.analyze import (
    Analysis,
    AnalyzedFile,
    AnalyzeError,
    Refused,
    analyze,
    render_analysis,
)
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.memory.shapes import (
    Attribution,
    CollectiveOnset,
    FirstCause,
    MemoryFinding,
    RankMemory,
)
from traceml_ray.wire import messages as wire


def played() -> Analysis:
    """An analysis with everything in it."""
    at_ns = BEGAN_NS + 40 * SECOND

    def row(rank: int, **fields: Any) -> RankMemory:
        usual: dict[str, Any] = {
            "rank": rank,
            "node": f"node-{rank // 2}",
            "process": f"p{rank}",
            "device": rank % 2,
            "samples": 1200,
            "allocated_growth_bytes": 5 * MIB,
            "reserved_growth_bytes": 20 * MIB,
            "rss_growth_bytes": None,
            "gap_bytes": 600 * MIB,
            "used_bytes": 20_000 * MIB,
            "total_bytes": 80_000 * MIB,
            "forecast_steps": None,
            "forecast_s": None,
            "anomaly": None,
            "severity": None,
        }
        return RankMemory(**{**usual, **fields})

    cause = FirstCause(
        rank=2,
        node="node-1",
        device=0,
        at_ns=at_ns,
        lead_ns=4_200_000_000,
        lead_bound_ns=1_020_000_000,
        delta_bytes=3000 * MIB,
        counter="allocated_bytes",
        confidence="high",
        coverage=0.8,
        why="Why it is this rank.",
        next=["What to do first.", "What to do then."],
    )
    when: dict[str, Any] = {"from_ns": at_ns, "to_ns": at_ns + 60 * SECOND, "evidence": {}}
    creep = MemoryFinding(
        kind="creep",
        rank=2,
        node="node-1",
        device=0,
        severity="critical",
        confidence="high",
        next=["What to do."],
        why="It grows by 20 MB a step.",
        **when,
    )
    change = MemoryFinding(
        kind="step_change",
        rank=1,
        node="node-0",
        device=1,
        severity="info",
        confidence="low",
        next=["Nothing."],
        why="It rose once, and stayed.",
        **when,
    )
    attribution = Attribution(
        kind="collective_likely",
        rank=1,
        device=1,
        finding="step_change",
        from_ns=at_ns,
        op="all_reduce",
        group=0,
        bytes=512 * MIB,
        evidence={},
        why="It rose with the first all_reduce.",
    )
    read: dict[str, Any] = {"ranks": [0, 1, 2, 4], "samples": 4800, "notes": ["its last line is left out"]}
    return Analysis(
        first_cause=cause,
        findings=[creep, change],
        collectives=[attribution],
        ranks=[
            row(0, gap_bytes=None),
            row(1, anomaly="step_change", severity="info"),
            row(2, anomaly="creep", severity="critical", forecast_steps=41, forecast_s=812.0),
            row(4, allocated_growth_bytes=-5 * MIB),
        ],
        missing_ranks=[3],
        world_size=5,
        sources=[
            AnalyzedFile(path="exports/" + "deep/" * 12 + "events.json", format="Stormlog events", **read)
        ],
        refused=[Refused(path="exports/rank3.json", reason="it is not valid JSON: Input data was truncated")],
        notes=["The clocks of node-0 and node-1 were not compared."],
    )


def test_analysis_as_text(snapshot: Snapshot) -> None:
    analysis = played()
    together = CollectiveOnset(
        at_ns=BEGAN_NS, ranks=[0, 1, 2], delta_bytes=MIB, counter="rss_bytes", why="All at once."
    )
    onset = msgspec.structs.replace(analysis, first_cause=None, collective_onset=together)
    quiet = Analysis(ranks=analysis.ranks[:1])
    first = (render_analysis(shown).partition("\n\n")[0] for shown in (onset, quiet))
    snapshot("analyze", render_analysis(analysis), *first)


def test_long_lists_are_cut_with_the_number_of_the_others() -> None:
    analysis = played()
    quiet = [msgspec.structs.replace(analysis.ranks[0], rank=rank) for rank in range(100)]
    many = msgspec.structs.replace(
        analysis, ranks=[*quiet, analysis.ranks[2]], findings=analysis.findings * 30
    )
    text = render_analysis(many)
    assert "and 69 ranks more" in text and "and 40 findings more" in text
    assert "41 steps" in text


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """The exit code of the command line, its output and what it says on stderr."""
    try:
        code = cli.main(["analyze", *map(str, argv)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_rank_that_leaks_is_named_from_files_of_every_form(tmp_path: Path, suffix: str) -> None:
    analysis = traceml_ray.analyze(leak(tmp_path, suffix=suffix))
    cause = analysis.first_cause
    assert cause is not None
    assert (cause.rank, cause.node, cause.device, cause.lead_ns) == (2, "node-a", 0, None)
    assert cause.confidence == "high"
    assert abs(cause.at_ns - (BEGAN_NS + 40 * SECOND)) <= 5 * SECOND
    assert 1000 * MIB < cause.delta_bytes < 1700 * MIB
    assert {finding.rank for finding in analysis.findings if finding.severity != "info"} == {2}
    assert [(rank.rank, rank.samples) for rank in analysis.ranks] == [(rank, 120) for rank in range(4)]
    assert analysis.ranks[0].gap_bytes is None
    assert (analysis.missing_ranks, analysis.refused, analysis.notes, analysis.world_size) == ([], [], [], 4)
    assert [source.samples for source in analysis.sources] == [120] * 4


def test_rank_that_starts_late_is_not_the_first_cause(tmp_path: Path) -> None:
    """Both grow at the same moment; by its own samples rank 1 would have grown 30 s before."""
    write(tmp_path / "a.json", events(level(0, grows_at=60), rank=0, world=2))
    late = {"rank": 1, "world": 2, "began_ns": BEGAN_NS + 30 * SECOND}
    write(tmp_path / "b.json", events(level(1, 90, grows_at=30), **late))
    analysis = analyze([tmp_path / "a.json", tmp_path / "b.json"])
    assert analysis.first_cause is None
    assert analysis.collective_onset is not None and analysis.collective_onset.ranks == [0, 1]


def test_ranks_without_wall_clock_times_have_no_order(tmp_path: Path) -> None:
    for rank in range(3):
        values = level(rank, grows_at=(None, 30, 60)[rank])
        write(tmp_path / f"{rank}.json", events(values, rank=rank, world=3, began_ns=0))
    analysis = analyze(tmp_path)
    assert (analysis.first_cause, analysis.collective_onset) == (None, None)
    assert {incident.rank for incident in analysis.incidents} == {1, 2}
    assert "whether others grew before is not known" in analysis.notes[0]
    assert "which rank grew first is not known" in render_analysis(analysis)
    write(tmp_path / "2.json", events(level(2), rank=2, world=3, began_ns=0))
    cause = analyze(tmp_path).first_cause
    assert cause is not None and (cause.rank, cause.lead_ns) == (1, None)


def test_only_rank_that_grows_is_named_without_times_and_world_size(tmp_path: Path) -> None:
    for rank in range(3):
        values = level(rank, grows_at=40 if rank == 1 else None)
        timeline = {"timestamps": [*range(len(values))], "allocated": values}
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}/telemetry_timeline.json").write_text(json.dumps(timeline))
    analysis = analyze(tmp_path)
    cause = analysis.first_cause
    assert cause is not None and (cause.rank, cause.lead_ns, cause.confidence) == (1, None, "low")
    assert "GB from 41 s (its own clock), and no other rank" in render_analysis(analysis).splitlines()[0]
    assert "(2 ranks not observed then)" in cause.why


def test_resident_memory_of_a_cpu_is_judged(tmp_path: Path) -> None:
    for rank in range(3):
        values = level(rank, grows_at=50 if rank == 1 else None)
        write(tmp_path / f"{rank}.csv", of_cpu(values, rank=rank, world=3))
    analysis = analyze(tmp_path)
    assert analysis.first_cause is not None
    assert (analysis.first_cause.rank, analysis.first_cause.device) == (1, None)
    assert all(rank.allocated_growth_bytes is None for rank in analysis.ranks)
    assert (analysis.ranks[1].rss_growth_bytes or 0) > 500 * MIB


def test_buffers_of_a_communicator_are_told_from_a_leak_by_the_spans_of_a_session(tmp_path: Path) -> None:
    """From step 160 on both ranks use all_to_all, and hold 300 MiB more outside of the allocator."""
    clock = Clock()
    aggregator, relay = aggregation(tmp_path, clock), Relay()
    ranks = [Rank(number, 2) for number in range(2)]
    for second in range(160):
        batches = []
        for rank in ranks:
            number, later = rank.identity.global_rank, second >= 80
            outside = 400 * MIB + 300 * MIB * later + (second * 7 + number) % 5 * 65_536
            memory = MemorySample(
                t_ns=clock.now,
                step=2 * second,
                device=0,
                allocated_bytes=900 * MIB,
                reserved_bytes=1000 * MIB,
                process_bytes=1000 * MIB + outside,
            )
            use = wire.SpanSum("all_to_all_single", 0, 2, 1000, 600, 2 * second, 2 * second + 1, MIB)
            norm = wire.SpanSum("all_reduce", 0, 2, 1000, 600, 2 * second, 2 * second + 1, 4)
            batches.append(rank.batch(2, memory=[memory], spans=[norm, use] if later else [norm]))
        aggregator.ingest(relay.message(*batches))
        clock.tick()
    aggregator.commit()
    analysis = analyze(tmp_path)
    assert [(collective.rank, collective.op, collective.kind) for collective in analysis.collectives] == [
        (0, "all_to_all_single", "collective_confident"),
        (1, "all_to_all_single", "collective_confident"),
    ]
    assert {(finding.kind, finding.severity) for finding in analysis.findings} == {("step_change", "info")}
    assert analysis.first_cause is None


def with_spikes(
    rank: int, spiking: bool, marks: dict[str, Any] | None, *, world: int = 4
) -> list[dict[str, Any]]:
    """Return 12 samples; the seventh has 1,500 MiB outside of the allocator if `spiking`, and its mark."""
    records = events([2000 * MIB] * 12, rank=rank, world=world, outside=40 * MIB)
    if spiking:
        records[6]["device_used_bytes"] += 1500 * MIB
    if marks is not None and "event_type" not in marks:
        records[6] |= marks
    elif marks is not None:
        late = records[6]["timestamp_ns"] + 10_000_000
        records.append({**records[6], "device_used_bytes": 2000 * MIB, "timestamp_ns": late, **marks})
    return records


NCCL = {"event_type": "collective", "context": "NCCL all-reduce phase", "metadata": {"phase": "sync"}}
IN_METADATA = {"event_type": "note", "context": None, "metadata": {"phase": "communication.collective"}}


@pytest.mark.parametrize(
    ("suffix", "marks", "spiking", "kinds", "op"),
    [
        (".json", NCCL, 4, {"collective_confident"}, "all_reduce"),
        (".jsonl", NCCL, 4, {"collective_confident"}, "all_reduce"),
        (".csv", NCCL, 4, {"collective_confident"}, "all_reduce"),
        (".json", IN_METADATA, 4, {"collective_confident"}, "collective"),
        (".json", {"context": "allgather"}, 4, {"collective_confident"}, "all_gather"),
        (".json", NCCL, 1, {"collective_likely"}, "all_reduce"),
        (".json", None, 4, {"collective_suspect"}, None),
        (".json", None, 1, set(), None),
    ],
)
def test_marks_of_collectives_in_files_explain_a_spike_of_hidden_memory(
    tmp_path: Path, suffix: str, marks: dict[str, Any] | None, spiking: int, kinds: set[str], op: str | None
) -> None:
    for rank in range(4):
        write(tmp_path / f"{rank}{suffix}", with_spikes(rank, rank < spiking, marks))
    analysis = analyze(tmp_path)
    assert {collective.kind for collective in analysis.collectives} == kinds
    assert [collective.rank for collective in analysis.collectives] == [*range(spiking * bool(kinds))]
    assert all(
        (collective.op, collective.finding) == (op, "transient_spike") for collective in analysis.collectives
    )
    assert all(finding.severity == "info" for finding in analysis.findings)
    if not kinds - {"collective_suspect"}:
        assert [f.kind for f in analysis.findings] == ["transient_spike"] * len(analysis.collectives)


def test_marks_of_one_rank_are_those_of_its_peers(tmp_path: Path) -> None:
    """Only rank 0 marks its phases, as one that enters them and one that leaves them."""
    for rank in range(4):
        records = with_spikes(rank, True, None)
        if rank == 0:
            phases = (("phase_enter", -20), ("phase_exit", 30))
            records += [
                {**records[6], "event_type": kind, "context": f"{kind}: train / barrier"}
                | {"timestamp_ns": records[6]["timestamp_ns"] + ms * 1_000_000}
                for kind, ms in phases
            ]
        write(tmp_path / f"{rank}.json", records)
    analysis = analyze(tmp_path)
    assert [(collective.rank, collective.kind, collective.op) for collective in analysis.collectives] == [
        (rank, "collective_confident", "barrier") for rank in range(4)
    ]


def test_missing_ranks_are_those_of_the_world_size_and_the_filter(tmp_path: Path) -> None:
    leak(tmp_path, 8)
    for rank in (1, 6):
        (tmp_path / f"rank{rank}.json").unlink()
    assert analyze(tmp_path).missing_ranks == [1, 6]
    analysis = analyze(tmp_path, ranks="2,4-6")
    assert (analysis.missing_ranks, [rank.rank for rank in analysis.ranks]) == ([6], [2, 4, 5])
    with pytest.raises(AnalyzeError, match=r"ranks '1,6': the files have ranks 0, 2-5 and 7 only"):
        analyze(tmp_path, ranks="1,6")
    with pytest.raises(RankFilterError):
        analyze(tmp_path, ranks="4-")


def test_nothing_to_analyze_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AnalyzeError, match="no memory samples in"):
        analyze(tmp_path)
    with pytest.raises(AnalyzeError, match="gone: No such file or directory"):
        analyze(str(tmp_path / "gone"))
    with pytest.raises(AnalyzeError, match="no file at all"):
        analyze([])
    with pytest.raises(AnalyzeError, match="sensitivity 'most': choose low, medium or high"):
        analyze(tmp_path, sensitivity="most")  # type: ignore[arg-type]


def test_command_prints_the_first_cause_in_its_first_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, leak(tmp_path))
    assert (code, err) == (0, "")
    first = out.splitlines()[:3]
    assert "Rank 2 (node-a, device 0)" in first[0]
    assert all(len(line) <= 100 for line in out.splitlines())
    assert all(title in out for title in ("Findings", "Ranks", "Read"))


def test_json_has_the_documented_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, leak(tmp_path), "--json", "--ranks", "0-2")
    document = json.loads(out)
    assert code == 0
    assert {
        *("first_cause", "collective_onset", "findings", "collectives", "ranks", "missing_ranks"),
        *("sources", "refused"),
    } <= document.keys()
    cause = {"rank", "node", "at_ns", "lead_ns", "lead_bound_ns", "delta_bytes", "confidence"}
    assert cause <= document["first_cause"].keys()
    finding = {"kind", "rank", "device", "severity", "confidence", "from_ns", "to_ns", "evidence", "next"}
    assert (
        all(finding <= finding_shown.keys() for finding_shown in document["findings"])
        and document["findings"]
    )
    assert document["collective_onset"] is None
    assert document["ranks"][0]["gap_bytes"] is None


def test_refused_file_is_named_and_the_others_are_analyzed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leak(tmp_path)
    (tmp_path / "rank3.json").write_text('[{"timestamp_ns": 1')
    code, out, err = run(capsys, tmp_path)
    assert code == 2
    assert err == f"traceml-ray: {tmp_path}/rank3.json: it is not valid JSON: Input data was truncated\n"
    assert "Rank 2 (node-a, device 0)" in out.splitlines()[0]
    assert "rank 3 of 4" in out
    assert "Not used" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "nowhere: no such file or folder, and no session 'nowhere' under traceml-sessions"),
        ([".", "--ranks", "a"], "'a' is not a rank; write all, or 0,2, or 0,4-7"),
        ([".", "--sensitivity", "most"], "invalid choice: 'most'"),
        ([".", "--fail-on", "info"], "invalid choice: 'info'"),
        ([], "the following arguments are required: SESSION|PATH"),
    ],
)
def test_mistake_gives_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert reason in err and len(err.splitlines()) == 1


def test_growth_of_a_single_rank_is_no_matter_of_order(tmp_path: Path) -> None:
    analysis = analyze(write(tmp_path / "x.json", events(level(0, grows_at=40))))
    lines = render_analysis(analysis).splitlines()
    assert analysis.first_cause is None
    assert lines[0] == "First      rank 0 grew; there is no other rank to compare it with"
    assert lines[1].startswith("Worst      Rank 0 (node-a, device 0): allocated memory grows by 21 MB/s")


def test_every_refused_file_is_named_where_none_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.json", "b.jsonl", "c.csv"):
        (tmp_path / name).write_bytes(b"\xff{")
    code, out, err = run(capsys, tmp_path / "gone", tmp_path / "a.json", tmp_path / "b.jsonl", tmp_path)
    lines = [line.removeprefix(f"traceml-ray: {tmp_path}/").partition(":")[0] for line in err.splitlines()]
    assert (code, out, lines) == (2, "", ["gone", "a.json", "b.jsonl", "c.csv"])


def test_exit_code_says_whether_a_finding_is_severe_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = leak(tmp_path / "bad")
    assert {finding.severity for finding in analyze(bad).findings} == {"warning", "info"}
    assert run(capsys, bad, "--fail-on", "warning")[0] == 3
    assert run(capsys, bad, "--fail-on", "critical")[0] == 0
    (bad / "broken.json").write_text("{")
    assert run(capsys, bad, "--fail-on", "warning")[0] == 3
    assert run(capsys, bad, "--fail-on", "critical")[0] == 2
    for rank in range(2):
        write(tmp_path / f"good/{rank}.json", events(level(rank), rank=rank, world=2))
    assert run(capsys, tmp_path / "good", "--fail-on", "warning")[0] == 0


def test_device_is_full_when_torch_alone_has_nearly_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver was not asked: what torch holds is the least that is used."""
    records = events(level(0, grows_at=40))
    for record in records:
        record["device_total_bytes"] = 2800 * MIB
    path = write(tmp_path / "x.json", records)
    analysis = analyze(path)
    assert ("near_limit", "critical") in {(finding.kind, finding.severity) for finding in analysis.findings}
    (row,) = analysis.ranks
    assert (row.gap_bytes, row.total_bytes) == (None, 2800 * MIB)
    assert row.forecast_s is not None and row.forecast_s < 60
    assert any(
        "at this rate at most" in finding.why for finding in analysis.findings if finding.kind == "creep"
    )
    assert run(capsys, path, "--fail-on", "critical")[0] == 3


def test_command_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from traceml_ray.cli import main; main(['analyze', sys.argv[1]]); "
        "sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    write(tmp_path / "x.json", events([MIB] * 3))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, b"")
