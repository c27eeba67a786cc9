"""`traceml-ray profile` on traces that are there: of a stored profile, and of files of a user."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest
from recorded import WALL_NS, operation, written
from trace_format import check, processes

from traceml_ray.cli import main
from traceml_ray.launchers import control
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, ProfileStep, RankProfile, StoredProfile
from traceml_ray.store.session import DATABASE, prepare
from traceml_ray.wire import messages as wire

MS = 1_000_000
STEP = ProfileStep(7, WALL_NS, WALL_NS + 100 * MS, WALL_NS + 90 * MS, [0, 0, 0, 40 * MS, 50 * MS, 0])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with one session `s` that has a profile `p` of three ranks, one of which could not."""
    folder = prepare(tmp_path / "out", "s").path
    (folder / DATABASE).touch()
    here, ranks = profiles.unfinished(folder, "p"), [RankProfile(2, "refused", "a profiler is on already")]
    for rank in (0, 1):
        extra = [operation("aten::copy_", 30_000 + 1000 * number, 900) for number in range(10 * rank)]
        late = [operation("aten::mul", 60_000, 9000 * rank + 1)]
        written(here / f"rank-{rank}.json.gz", [operation("aten::mm", 1000, 5000), *extra, *late])
        ranks.append(
            RankProfile(
                rank, "captured", None, "ab", f"node-{rank}", file=f"rank-{rank}.json.gz", steps=[STEP]
            )
        )
    manifest = Profile(
        id="p",
        session="s",
        run=None,
        time="",
        t_ns=1,
        why="",
        first_step=7,
        n_steps=1,
        ranks=ranks,
        traceml_ray="0",
    )
    profiles.finish(folder, manifest)
    return folder.parent


def run(out: Path, line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["profile", *shlex.split(line.format(out=out)), "--out", str(out)])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_table_of_a_profile(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(out, "s --table --name 'aten::c*' --top 3", capsys)
    assert code == 0 and " ".join(text.split()).endswith("node-1 1 aten::copy_ operation 9.000 9.000 10")
    code, text, _ = run(out, "s --id p --ranks 0", capsys)
    assert code == 0 and "node-0" in text and "node-1" not in text
    code, text, _ = run(out, "s --trace {out}/one.json.gz --ranks 0", capsys)
    assert code == 0 and "1 rank, " in text
    code, text, _ = run(out, "s --sort calls --top 1", capsys)  # shows, and records nothing
    assert code == 0 and "aten::copy_" in text
    code, text, _ = run(out, "s --json --sort calls --top 1", capsys)
    assert [row["name"] for row in json.loads(text)] == ["aten::copy_"]
    assert run(out, "s --csv {out}/t.csv --parquet {out}/t.parquet", capsys)[0] == 0
    assert len([*csv.reader((out / "t.csv").open())]) == 6 and (out / "t.parquet").stat().st_size


def test_options_that_record_have_one_made_and_show_that(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[wire.ProfileRequest] = []
    newer = msgspec.structs.replace(profiles.read_profile(out / "s/profiles/p"), id="q")
    shutil.copytree(out / "s/profiles/p", profiles.unfinished(out / "s", "q"), dirs_exist_ok=True)
    made = StoredProfile(profiles.finish(out / "s", newer), newer)
    shutil.copytree(made.path, profiles.unfinished(out / "s", "r"), dirs_exist_ok=True)
    profiles.finish(out / "s", msgspec.structs.replace(newer, id="r", why="rank 0 is late."))

    def record(_: Path, wanted: wire.ProfileRequest) -> StoredProfile:
        asked.append(wanted)
        return made

    monkeypatch.setattr(control, "profile", record)
    code, text, _ = run(out, "s --trace {out}/t.gz", capsys)
    assert code == 0 and not asked and "2 ranks" in text
    code, text, messages = run(out, "s --ranks 1,2 --steps 2 --shapes --json --top 1", capsys)
    assert code == 0 and [row["name"] for row in json.loads(text)] == ["aten::mul"]
    assert asked == [wire.ProfileRequest("1,2", 2, shapes=True)]
    assert messages.startswith("Profile q: 1 step from step 7 on") and "This is" not in messages
    assert run(out, "s --steps 2", capsys)[0] == 0 and len(asked) == 2
    assert (
        "This is profile r, 1 step from step 7 on: rank 0 is late."
        in run(out, "s --ranks 0 --table", capsys)[2]
    )


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("s --id p --steps 3", "--steps records a new profile, --id is for existing ones"),
        ("s --list --stacks", "--stacks records a new profile, --list is for existing ones"),
        ("merge {out}/s/profiles/p --memory", "--memory records a new profile, merge is for existing"),
        ("s --run b --table", "--run is for recording a profile: add --steps"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    out: Path, line: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, messages = run(out, line, capsys)
    assert (code, text) == (2, "") and error in messages


def test_difference_of_a_profile(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run(out, "s --diff 1,median", capsys)
    assert text.startswith("Rank 1 spends 9 ms a step more in `aten::copy_` (10 calls more) than rank 0.\n")
    _, text, _ = run(out, "s --diff 1,0 --stage backward --json", capsys)
    document = json.loads(text)
    assert (document["stage"], document["operations"][0]["name"], document["others"]) == (
        "backward",
        "aten::mul",
        [0],
    )


def test_json_is_one_document_whatever_else_is_asked_for(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, _ = run(out, "s --table --json --top 1", capsys)
    assert [row["name"] for row in json.loads(text)] == ["aten::mul"]
    _, text, messages = run(out, "s --diff 1,0 --table --json --csv {out}/t.csv --trace {out}/t.gz", capsys)
    document = json.loads(text)
    assert (document["difference"]["others"], len(document["operations"])) == ([0], 5)
    assert "t.csv: 5 rows" in messages and "t.gz: 2 ranks" in messages


def test_one_trace_of_a_profile_and_of_files(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(out, "s --trace {out}/m.json.gz", capsys)[0] == 0
    assert "node-1 / rank 1 / steps" in processes(check(out / "m.json.gz")).values()
    traces = "{out}/s/profiles/p/rank-0.json.gz {out}/s/profiles/p/rank-1.json.gz"
    code, text, _ = run(out, f"merge {traces} --trace {{out}}/u.json.gz --diff 1", capsys)
    assert code == 0 and "2 ranks, 0 collectives matched\nTimes are by the clock" in text
    assert sorted(processes(check(out / "u.json.gz")).values()) == ["rank 0", "rank 1"]
    assert "Rank 1 spends 9 ms in the trace more in" in text
    assert "Rank 1 spends 9 ms a step more in" in run(out, "merge {out}/s/profiles/p --diff 1", capsys)[1]


def test_file_that_cannot_be_written_is_named_as_it_was_given(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("csv", "trace"):
        code, _, error = run(out, f"s --{option} {{out}}/none/x.gz", capsys)
        assert code == 1 and error == f"traceml-ray: {out}/none/x.gz: No such file or directory\n"


def test_traces_of_which_nothing_says_the_rank_are_told_apart(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        written(out / f"{name}.json", [operation("aten::mm", 1000, 5000)])
    _, text, _ = run(out, "merge {out}/a.json {out}/b.json --table", capsys)
    assert "a.json" in text and "b.json" in text
    code, _, error = run(out, "merge {out}/a.json {out}/b.json --diff 0,1", capsys)
    assert code == 2 and "put the rank into its name, as rank0.json" in error


def test_traces_of_users_become_one_without_being_asked(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out)
    assert run(out, "merge s/profiles/p/rank-0.json.gz", capsys)[0] == 0
    check(out / "merged-trace.json.gz")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("s --id q --table", "no profile q in"),
        ("nothing --table", "no session 'nothing'"),
        ("s --diff 5,median", "rank 5 was not recorded: the profile has ranks 0 and 1"),
        ("s --diff five", "write two ranks, as 5,2, or 5,median"),
        ("s --diff 1 --stage data", "no complete `data`"),
        ("s --table --sort nme", "no column 'nme'"),
        ("s --table --ranks x", "is not a rank"),
        ("s --table --ranks 7", "no trace of --ranks 7: there are traces of ranks 0 and 1"),
        ("s --stage forward", "--stage forward needs --diff"),
        ("s --list --json", "--list cannot be combined with an option that shows"),
        ("s --steps 0", "steps=0 must be an integer from 1 to 50"),
        ("s x.json", "write `profile merge TRACE …`"),
        ("merge {out}", "no trace in"),
        ("merge {out}/s/profiles/p/rank-0.json.gz --diff 7,0", "the profile has rank 0"),
        ("merge {out}/s/profiles/p --trace {out}/s/profiles/p/rank-1.json.gz", "would be overwritten"),
        ("merge {out}/missing.json", "No such file"),
        ("merge {out}/s/profiles/p/profile.json", "no traceEvents"),
    ],
)
def test_what_cannot_be_shown_is_said(
    out: Path, capsys: pytest.CaptureFixture[str], line: str, reason: str
) -> None:
    code, text, error = run(out, line, capsys)
    assert (code, text) == (2, "") and reason in error and error.startswith("traceml-ray: ")
    assert len(error.splitlines()) == 1
