"""What makes a bundle, what is in it, and how many are kept; on a fake clock, with the aggregator's core."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from played import Played, look
from sessions import SECOND, aggregation, ask

from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.launchers import control
from traceml_ray.monitor.finish import OTHERS_S
from traceml_ray.reports.answers import Answers
from traceml_ray.signals.collectives.dumps import dump_files, read_dumps
from traceml_ray.signals.collectives.records import CallReport, CollectivesReport, GroupReport
from traceml_ray.store import query
from traceml_ray.store.bundles import Bundle, bundles_of, making, names_of, new_name, prune
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

WORLD = 4
OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path / "demo", WORLD, late=None)
    yield made
    made.aggregator.close()


def raised(t_ns: int, message: str = OOM, kind: str = "exception", **data: Any) -> wire.Event:
    about = {"type": message.partition(":")[0], "traceback": f"Traceback: x\n{message}", **data}
    return wire.Event(kind, t_ns, 7, 3, message, about)


def send(played: Played, rank: int, *events: wire.Event, **fields: Any) -> None:
    """One batch of one rank, and a judgement."""
    relay = played.relays[0]
    batch = played.ranks[rank].batch(0, events=list(events), **fields)
    assert played.aggregator.ingest(relay.message(batch))
    played.aggregator.judge()


def settled(played: Played, seconds: int = 3) -> list[Bundle]:
    for _ in range(seconds):
        played.play(5)
    return bundles_of(played.folder)


def finish(played: Played, code: int = 0, **fields: Any) -> None:
    message = codec.encode(wire.Finish(codec.VERSION, code, node_id="", **fields))
    played.aggregator.end(message)
    played.clock.tick(OTHERS_S + 1)
    played.aggregator.endings.write_due()


def test_caught_error_of_memory_makes_a_bundle_with_the_last_minutes_of_every_rank(played: Played) -> None:
    for _ in range(8):
        played.play(5, environment={"torch": "2.13.0"})
    send(played, 2, raised(played.clock.now, kind="oom", where="step 7"))
    (bundle,) = settled(played)
    manifest = bundle.manifest
    assert bundle.path.name.endswith("-oom") and bundle.path.parent.name == "bundles"
    assert (manifest.reason, manifest.rank, manifest.node, manifest.step) == ("oom", 2, "host-0", 7)
    assert manifest.why.startswith("memory ran out on rank 2 in step 7: OutOfMemoryError")
    assert manifest.exception == OOM and manifest.traceback and manifest.traceback.endswith(OOM)
    assert manifest.environment == [{"ranks": [0, 1, 2, 3], "values": {"torch": "2.13.0"}}]
    assert [(entry["ranks"], entry["values"]["rss_bytes"]) for entry in manifest.memory_from] == [
        ([*range(4)], "kernel")
    ]
    assert [*manifest.ranks] == ["0", "1", "2", "3"] and not manifest.deaths and not manifest.silent_ranks
    with SessionFile(bundle.path / "session.sqlite") as file:
        rows, _ = file.rows()
        assert {rank_rows.rank: len(rank_rows.keys) for rank_rows in rows} == dict.fromkeys(range(WORLD), 50)
        assert {event.kind for event in file.events()[0]} >= {"oom"}
    assert bundle.files == {**manifest.files, "manifest.json": bundle.files["manifest.json"]}


def test_bundle_is_read_as_a_session_is(played: Played) -> None:
    played.play(20)
    send(played, 1, raised(played.clock.now, kind="oom"))
    (bundle,) = settled(played)
    answers = Answers(bundle.path, played.aggregator.settings.thresholds)
    summary = query.ask_one(answers.reply, query.GetSummary())
    text = answers.report_text()
    answers.close()
    assert summary.steps.count == 30
    third, *_, files = text.splitlines()[2:]
    assert third.startswith("bundle of 20") and "UTC: memory ran out on rank 1" in third
    assert files.split(" · ") == [f"{'':11}manifest.json", "session.sqlite"]


def test_bundle_has_the_minutes_before_each_ranks_own_end_and_no_more(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", WORLD, late=None)
    settings = msgspec.structs.replace(played.aggregator.settings, bundle_minutes=0.1)
    played.aggregator._bundling.settings = settings
    for second in range(30):
        sample = wire.ProcessSample(played.clock.now, 1.0, 1 << 20, 1, 0, 0)
        played.play(2, process=sample, silent=(3,) if second >= 10 else ())
    played.aggregator._bundling.requested("r")
    played.clock.tick(3)
    played.aggregator.judge()
    (bundle,) = bundles_of(played.folder)
    with SessionFile(bundle.path / "session.sqlite") as file:
        times = [sample.t_ns for _, sample in file.process_samples([1], 1000)]
        ended = [sample.t_ns for _, sample in file.process_samples([4], 1000)]
        rows, _ = file.rows()
    assert max(times) - min(times) == max(ended) - min(ended) == 6 * SECOND
    assert max(ended) < min(times)
    assert {rank_rows.rank: len(rank_rows.keys) for rank_rows in rows}[3] >= 12
    played.aggregator.close()


def test_peers_that_die_after_a_rank_are_in_its_bundle(played: Played) -> None:
    played.play(20)
    send(played, 1, raised(played.clock.now, "RuntimeError: boom"), final=True)
    (bundle,) = settled(played)
    assert (bundle.manifest.reason, bundle.manifest.rank) == ("exception", 1)
    played.clock.tick(10)
    for rank in (0, 2, 3):
        send(played, rank, raised(played.clock.now, "DistBackendError: connection closed"), final=True)
    played.clock.tick(60)
    played.aggregator.judge()
    (bundle,) = bundles_of(played.folder)
    manifest = bundle.manifest
    assert (manifest.reason, manifest.rank, manifest.why.partition(" ended")[0]) == (
        "exception",
        1,
        "rank 1 (host-0)",
    )
    assert sorted(death["rank"] for death in manifest.deaths) == [0, 1, 2, 3]
    assert manifest.deaths[0]["first"] and "boom" in (manifest.exception or "")


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (-9, "", "killed"),
        (1, "OSError: x", "exception"),
        (1, "MemoryError: ", "oom"),
        (3, "", "exception"),
    ],
)
def test_failure_that_the_launcher_reports_makes_a_bundle_at_the_end(
    played: Played, code: int, message: str, reason: str
) -> None:
    played.play(20)
    who = played.ranks[2].identity
    failure = wire.RankFailure(2, 2, who.pid, code, played.clock.now, message)
    finish(played, 1, failures=[failure])
    (bundle,) = bundles_of(played.folder)
    assert (bundle.manifest.reason, bundle.manifest.rank) == (reason, 2)
    assert bundle.manifest.ranks["2"]["exit_code"] == code
    assert bundle.path.name in (played.folder / "report.txt").read_text()


@pytest.mark.parametrize(
    ("code", "fields", "made"),
    [(0, {}, 0), (-15, {}, 1), (143, {}, 1), (-15, {"force": True}, 0), (-2, {}, 0)],
    ids=["finished", "SIGTERM", "SIGTERM of a command", "stop of the monitor", "Ctrl-C"],
)
def test_only_a_job_that_is_terminated_makes_a_bundle_of_its_end(
    played: Played, code: int, fields: dict[str, Any], made: int
) -> None:
    played.play(20)
    finish(played, code, **fields)
    assert [bundle.manifest.reason for bundle in bundles_of(played.folder)] == ["terminated"] * made
    ended = {-15: "stopped by SIGTERM", 143: "stopped by SIGTERM", -2: "stopped by SIGINT", 0: "finished"}[
        code
    ]
    assert (played.folder / "report.txt").read_text().splitlines()[2].startswith(f"{ended} ·")


def test_request_makes_a_bundle_with_the_stacks_of_all_ranks(played: Played) -> None:
    played.play(20)
    ask(played.aggregator, "dump", id="abc")
    played.aggregator.judge()
    reply = codec.decode(played.aggregator.ingest(played.relays[0].message()), wire.RelayReply)
    (command,) = reply.commands
    assert command.name == "dump"
    for rank in range(WORLD):
        text = f"thread main:\n  train.py:{rank} in step"
        event = wire.Event("stacks", played.clock.now, message=text, data={"dump": command.args["id"]})
        call = CallReport(0, 7, False, "barrier", [], [], [], [], rank > 0, 5, "f (train.py:3)")
        groups = [GroupReport("0", "default_pg", [(0, WORLD, 1)])]
        calls = CollectivesReport(played.clock.now, str(command.args["id"]), "recorder", groups, [call])
        send(played, rank, event, last_calls=[calls])
    (bundle,) = settled(played)
    dumps = read_dumps(dump_files([bundle.path]), refused := [])
    assert [(one.rank, one.calls[0].op, one.calls[0].done) for one in dumps] == [
        (rank, "barrier", rank > 0) for rank in range(WORLD)
    ]
    assert refused == []
    assert bundle.manifest.reason == "request" and bundle.manifest.causes[0].request == "abc"
    stacks = (bundle.path / "stacks.txt").read_text()
    assert [f"train.py:{rank} in step" in stacks for rank in range(WORLD)] == [True] * WORLD
    (info,) = ask(played.aggregator, "bundles")
    assert info.requests == ["abc"]
    finish(played, -15)
    names = [listed.name for listed in ask(played.aggregator, "bundles")]
    assert names[0] == info.name and names[1].endswith("-terminated")


def request(played: Played, name: str) -> None:
    ask(played.aggregator, "dump", id=name)


def requests(played: Played) -> list[list[str]]:
    return [info.requests for info in ask(played.aggregator, "bundles")]


def test_each_request_gets_a_bundle_and_those_that_come_quickly_share_one(played: Played) -> None:
    played.play(20)
    request(played, "a")
    settled(played)
    assert requests(played) == [["a"]]
    for name in "bcb":  # `b` asks again what became of it
        request(played, name)
        played.play(1)
    assert requests(played) == [["a"]], "there is one bundle every 5 s at most"
    settled(played, 2)
    assert requests(played) == [["a"], ["b", "c"]]
    request(played, "b")
    settled(played, 10)
    assert len(requests(played)) == 2, "a request is one, however often it is repeated"


def test_requests_that_never_stop_do_not_delay_each_other(played: Played) -> None:
    played.play(20)
    for second in range(30):
        request(played, f"{second}")
        played.play(1)
    settled(played, 8)
    made = requests(played)
    assert sorted(name for names in made for name in names) == sorted(map(str, range(30)))
    assert 5 <= len(made) <= 8


def test_request_while_a_bundle_is_written_is_in_the_next_one(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = played.aggregator._bundling._write

    def slowly(*args: Any) -> str:
        name = written(*args)
        request(played, "b")  # by another thread
        return name

    played.play(20)
    request(played, "a")
    monkeypatch.setattr(played.aggregator._bundling, "_write", slowly)
    settled(played)
    monkeypatch.undo()
    settled(played)
    assert ["a", "b"] in requests(played)


def test_request_late_in_an_incident_has_the_stacks_of_its_own_moment(played: Played) -> None:
    played.play(20)
    send(played, 1, raised(played.clock.now, kind="oom"))
    settled(played, 20)
    assert not played.aggregator._bundling.incidents.commands()
    request(played, "a")
    (command,) = played.aggregator._bundling.incidents.commands()
    data = {"dump": command.args["id"]}
    send(played, 0, wire.Event("stacks", played.clock.now, message="in step", data=data))
    (bundle,) = settled(played)
    assert "in step" in (bundle.path / "stacks.txt").read_text()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("no bundles", r"this session keeps no bundles \(bundles=0\)"),
        ("file in the way", "FileExistsError"),
        ("too large", "it is larger than bundle_bytes, and was removed"),
        ("full disk", "rows cannot be written to the session file"),
        ("too many", "64 others are in the same bundle"),
    ],
)
def test_request_that_gets_no_bundle_says_why(
    played: Played, how: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundling = played.aggregator._bundling
    played.play(20)
    if how == "file in the way":
        (played.folder / "bundles").write_text("")
    elif how == "full disk":
        monkeypatch.setattr(bundling, "commit", lambda: False)
    elif how == "too many":
        for number in range(64):
            request(played, f"{number}")
    else:
        changed = {"no bundles": {"bundles": 0}, "too large": {"bundle_bytes": 1000}}[how]
        bundling.settings = msgspec.structs.replace(bundling.settings, **changed)
    if how in ("no bundles", "too many"):  # that is known at once
        with pytest.raises(query.QueryError, match=f"no bundle: .*{why}"):
            request(played, "a")
        return
    request(played, "a")
    settled(played)
    with pytest.raises(query.QueryError, match=f"no bundle: .*{why}"):
        request(played, "a")
    monkeypatch.undo()


def test_command_says_why_there_is_no_bundle(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    bundling = played.aggregator._bundling
    bundling.settings = msgspec.structs.replace(bundling.settings, bundles=0)
    assert bundling.requested("of before") and played.aggregator.commit()

    def relay(_: Path, message: wire.ControlRequest, __: float) -> None:
        bundling.requested(message.request)
        played.aggregator.commit()

    monkeypatch.setattr(control, "request", relay)
    with pytest.raises(control.ControlError, match="'demo' has made no bundle: bundles=0"):
        control.dump(played.folder, 1e9)


def test_aggregator_that_was_restarted_makes_no_bundle_of_what_has_one(played: Played) -> None:
    played.play(20)
    send(played, 1, raised(played.clock.now), final=True)
    (bundle,) = settled(played)
    played.aggregator.close()
    played.clock.tick(100)
    played.aggregator = aggregation(played.folder, played.clock)
    for _ in range(3):
        played.clock.tick(2)
        played.aggregator.judge()
    assert played.aggregator.verdict is not None and played.aggregator.verdict.label == "oom"
    assert [stored.path for stored in bundles_of(played.folder)] == [bundle.path]


def test_record_of_the_allocator_is_in_the_bundle_or_it_says_where_it_is(played: Played) -> None:
    snapshots = played.folder / "snapshots"
    snapshots.mkdir()
    here, secret = snapshots / "allocator-1-77-1.pickle", played.folder / "session.sqlite"
    here.write_bytes(bytes(1000))
    played.play(20)
    for path in (here, Path("/data/allocator-2-78-1.pickle"), secret):
        about = {"path": str(path), "bytes": 1000, "host": "host-1"}
        send(played, 1, wire.Event("memory_snapshot", played.clock.now, data=about))
    send(played, 1, raised(played.clock.now, kind="oom"))
    settled(played, 70)  # it is written anew when the incident is over
    send(played, 1, final=True)
    finish(played, 1)
    (bundle,) = bundles_of(played.folder)
    assert bundle.manifest.files[here.name] == 1000 and not here.exists()
    assert bundle.manifest.left_out == {
        "allocator-2-78-1.pickle": "it is on host-1: /data/allocator-2-78-1.pickle",
        "session.sqlite": f"it is on host-1: {secret}",
    }


def test_what_comes_again_and_again_makes_few_bundles(played: Played) -> None:
    """A script that retries: memory runs out every two seconds for twenty minutes."""
    for _ in range(600):
        played.clock.tick(2)
        send(played, 0, raised(played.clock.now, kind="oom"))
    assert len(bundles_of(played.folder)) == 5
    assert played.aggregator.errors["no bundle, too soon after the last: oom"] > 400


def test_oldest_bundles_go_first(tmp_path: Path) -> None:
    made = []
    for second in range(6):
        made.append(new_name(tmp_path, (second + 1) * SECOND, "oom"))
        with making(tmp_path, made[-1]) as here:
            (here / "x").write_bytes(bytes(100))
    assert prune(tmp_path, 4, 1 << 20) == made[:2]
    assert prune(tmp_path, 4, 250) == made[2:4]
    assert names_of(tmp_path) == made[4:]


def test_bundle_that_fails_half_way_is_never_seen(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), making(tmp_path, "20260101T000000-oom") as here:
        (here / "session.sqlite").write_bytes(b"x")
        assert names_of(tmp_path) == []
        raise RuntimeError
    assert [*(tmp_path / "bundles").iterdir()] == []


@pytest.mark.parametrize("how", ["file in the way", "no bundles"])
def test_bundle_that_cannot_be_written_is_counted_and_changes_nothing(played: Played, how: str) -> None:
    if how == "no bundles":
        settings = msgspec.structs.replace(played.aggregator.settings, bundles=0)
        played.aggregator._bundling.settings = settings
    else:
        (played.folder / "bundles").write_text("")
    played.play(20)
    send(played, 1, raised(played.clock.now, kind="oom"))
    assert settled(played) == []
    finish(played)
    assert ask(played.aggregator, "status").status == "finished"
    errors = {name: n for name, n in played.aggregator.errors.items() if n}
    assert errors == ({} if how == "no bundles" else {"bundle: FileExistsError": 1})


def test_web_app_lists_downloads_and_requests_bundles(played: Played) -> None:
    played.play(20)
    send(played, 2, raised(played.clock.now, kind="oom", where="<b>"))
    (bundle,) = settled(played)
    pages = SessionPages(played.source, clock=played.clock)
    client = create_app(pages, token="secret", hosts=["localhost"]).server.test_client()
    pages.poll()
    for page in ("events", "memory"):
        for _ in range(2):  # what a page asks is there with the next poll
            bundles = look(pages, page)["bundles"]
            pages.poll()
        assert [entry.name for entry in bundles] == [bundle.path.name]
    path, token = f"/bundles/{bundle.path.name}.tar", {"Authorization": "Bearer secret"}
    assert client.get(path).status_code == client.post("/bundles").status_code == 401
    with tarfile.open(fileobj=io.BytesIO(client.get(path, headers=token).data)) as tar:
        files = {name: member.read() for name in tar.getnames() if (member := tar.extractfile(name))}
    assert files == {f"{bundle.path.name}/{file.name}": file.read_bytes() for file in bundle.path.iterdir()}
    for wrong in ("x", "..", f"{bundle.path.name}x"):
        assert client.get(f"/bundles/{wrong}.tar", headers=token).status_code == 404
    browser = {
        **token,
        "Accept": "text/html,image/avif,*/*;q=0.8",
        "Referer": "http://localhost//memory?session=demo",
    }
    back = client.post("/bundles", headers=browser)
    assert (back.status_code, back.headers["Location"]) == (303, "/memory?session=demo")
    asked = client.post("/bundles", headers=token)
    assert asked.status_code == 202
    played.clock.tick(60)
    played.aggregator.judge()
    assert asked.json["request"] in str(bundles_of(played.folder)[-1].manifest.causes)
