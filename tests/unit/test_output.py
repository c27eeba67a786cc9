"""What ranks print: seen without a change of their streams, kept as the last lines, without secrets."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from played import Played, look
from plotly.io.json import to_json_plotly
from ray_cluster import until
from sessions import Clock, Rank, Relay, aggregation, ask

from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.document.text import WIDTH, laid_out
from traceml_ray.errors import Errors
from traceml_ray.launchers.arguments import command_text
from traceml_ray.monitor.output_files import OutputFiles
from traceml_ray.signals.kinds import encoded
from traceml_ray.signals.output.last_lines import (
    LINE_CHARS,
    MOST_BYTES,
    LastLines,
    LastOutput,
    OutputLine,
    joined,
)
from traceml_ray.signals.output.records import OUTPUT, Output
from traceml_ray.signals.output.tap import _PIECE_CHARS, _PIECES, OutputTap
from traceml_ray.signals.output.view import OutputView, lines_of
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.text import masked, masked_text


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("loss 0.25, 8,192 tokens/s, lr=3e-4", None),
        ("missing key: model.layers.0.weight", None),
        ("KeyError: 'loss'", None),
        ("WANDB_API_KEY=abc123 next", "WANDB_API_KEY=*** next"),
        ('{"token": "abc 123", "lr": 1}', '{"token": ***, "lr": 1}'),
        ("password: hunter2", "password: ***"),
        ("run --hf-token abc --lr 1", "run --hf-token *** --lr 1"),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: ***"),
        ("login with hf_abcdefghijklmnopqrst done", "login with *** done"),
        ("pulling from https://me:pass@host/x", "pulling from https://***@host/x"),
        ("postgres://me:p@ss@host/x", "postgres://***@host/x"),
        ("forward_pass: 3 ms, hf_token=None, primary key: 3", None),
        ("Authorization: Token 0123abcd", "Authorization: ***"),
        ("{b'authorization': b'Bearer abc def'}", "{b'authorization': ***}"),
        ("login --password 'two words' --lr 1", "login --password *** --lr 1"),
        (r'"{\"api_key\": \"a b\", \"lr\": 1}"', r'"{\"api_key\": ***, \"lr\": 1}"'),
        (r'token="a\"b c", lr=1', "token=***, lr=1"),
        ("{'tokens': 3, 'token': ['abc', 'def']}", "{'tokens': 3, 'token': ***}"),
        ("DB_PASS=a,b;c)d MODE=x", "DB_PASS=*** MODE=x"),
        ("f(api_key=abc,lr=1)", "f(api_key=***,lr=1)"),
        ("using API key: 0123abcd", "using API key: ***"),
        ("GET https://x/y?sv=1&sig=ab%3D&n=2", "GET https://x/y?sv=1&sig=***&n=2"),
        ("pad_token=</s>", None),
        ("max_token: 3", None),
        ("bos_token: <s>, eos_token='</s>', unk_token=\"<unk>\"", None),
        ("monkey: 3", None),
        ("turkey=4 keyboard: us", None),
        ("secretary: Ann, passed: 12, bypass=yes compass: north", None),
        ("num_tokens=512 tokens_per_second: 8192 max_new_tokens=64", None),
        ("image_token_id=32000 image_token='<image>' image_tokens: 5", None),
        ("key: value", None),
        ("{'key': 'value', 'keys': 3}", None),
        ("sort_key=loss group_key: rank", None),
        ("time_per_token=0.25 ms", None),
        ("'mask_token': '[MASK]', 'sep_token': '[SEP]', 'cls_token': '[CLS]'", None),
        ("--pad-token </s> --max-token 3 --sort-key loss", None),
        ("-p 8080 --port 80", None),
        ("docker run -p 80:80 -u 1000:1000 img", None),
        ("mkdir -p /a/b", None),
        ("asian_languages_dataset_v2 loaded", None),
        ("hf_trainer_callback_handler on", None),
        ("npm_config_registry_url set", None),
        ("sk-learn-contrib-package", None),
        ("PWD=/home/me", None),
        ("cache_key=step_12", None),
        ("author: Ann, authority=x", None),
        ("use_auth_token=True", None),
        ("--use-auth-token train.py", None),
        ("tokenizer: gpt2 token_type_ids", None),
        ("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", None),
        ("auth: enabled", None),
        ("Bearer authentication is used", None),
        ("next_token: hello", None),
        ("('loss', '0.25')", None),
        ("['token', 'loss']", None),
        ("pass: 3 of 4", None),
        ("passes=3", None),
        ("unexpected key(s): encoder.layer_0_attention", None),
        ("cookiecutter: 3", None),
        ("--auth hunter2 x", "--auth *** x"),
        ("('api_key', 's3cr3t')", "('api_key', ***)"),
        ("Cookie: a=b; session=xyz", "Cookie: ***"),
        ("Set-Cookie: sid=31d4; Path=/", "Set-Cookie: ***"),
        ("Proxy-Authorization: Basic dXNlcjpw", "Proxy-Authorization: ***"),
        ("--password=hunter2", "--password=***"),
        ("mysql -u root -phunter2 db", "mysql -u root -p*** db"),
        ("curl -u me:hunter2 https://x", "curl -u me:*** https://x"),
        ("curl --user 'me:hunter2' u", "curl --user 'me:***' u"),
        ("sshpass -p hunter2 ssh x", "sshpass -p *** ssh x"),
        ("docker login -u me -p hunter2 reg", "docker login -u me -p *** reg"),
        ("redis-cli -h x -a hunter2 ping", "redis-cli -h x -a *** ping"),
        ("['train.py', '--api-key', 'abc']", "['train.py', '--api-key', ***]"),
        ("aws_secret_access_key = wJalrXUt/K7", "aws_secret_access_key = ***"),
        ("using AKIAIOSFODNN7EXAMPLE now", "using *** now"),
        ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc-1 x", "jwt *** x"),
        ("sk-proj-abcd1234efgh5678 x", "*** x"),
        ("xoxb-123-456-abcdefgh", "***"),
        ("ghp_abcdefghijklmnop1234", "***"),
        ("github_pat_11ABCDEFG0_abcdefghijk", "***"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/services/***"),
        ("apiKey: 'abc'", "apiKey: ***"),
        ("OPENAI_KEY=abc", "OPENAI_KEY=***"),
        ("db_pass=abc", "db_pass=***"),
        ("access_token=abc", "access_token=***"),
        ("X-Api-Key: abc", "X-Api-Key: ***"),
        ("Uid=me;Pwd=hunter2;x=1", "Uid=me;Pwd=***;x=1"),
        ("auth=hunter2", "auth=***"),
        ("key=4f3a9b2c1d5e6f7081920304 x", "key=*** x"),
        ('-H "Cookie: a=b; c=d" url', '-H "Cookie: ***" url'),
        ("{'Cookie': 'a=b; c=d', 'x': 1}", "{'Cookie': ***, 'x': 1}"),
        ("client_secret: abc, x", "client_secret: ***, x"),
        ("bot_token=abc", "bot_token=***"),
        ('Authorization: Digest username="me", response="abc"', "Authorization: ***"),
    ],
)
def test_secrets_in_lines_are_hidden(line: str, shown: str | None) -> None:
    assert masked(line) == (shown or line)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--auth hush --lr 3e-4 -p hush", "--auth '***' --lr 3e-4 -p '***'"),
        ("-p 8080 -p 80:80 -p ./conf -p /a/b", None),
        ("--pad-token '</s>' --max-token 3 --sort-key loss --use-auth-token data", None),
        ("curl -u me:hush https://me:hush@x/", "curl -u me:*** 'https://***@x/'"),
        ("mysql -phush -P 3306", "mysql -p*** -P 3306"),
        (
            "run db.password=hush auth.api_key=hush opt.key=loss",
            "run 'db.password=***' 'auth.api_key=***' opt.key=loss",
        ),
    ],
)
def test_secrets_in_a_command_are_hidden(words: str, shown: str | None) -> None:
    assert command_text(shlex.split(words)) == (shown or words)


def test_private_key_in_a_message_is_hidden() -> None:
    begins, ends = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
    message = ["cannot use", begins, "Proc-Type: 4,ENCRYPTED", "", "b3BlbnNzaC1rZXk", "AA==", ends, "of me"]
    hidden = ["cannot use", begins, "***", "", "***", "***", "***", "of me"]
    assert masked_text("\n".join(message)).split("\n") == hidden
    assert masked(rf'"{begins}\nMIIEabc\n{ends}", x') == f'"{begins}***{ends}", x'
    body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
    assert masked(body) == "***", "its first line is lost"
    assert masked(body.lower()) == body.lower()


def lines(*pieces: str, most: int = 5) -> Output | None:
    made = LastLines(1, most)
    for piece in pieces:
        made.feed(piece)
    return made.drain(7)


@pytest.mark.parametrize(
    ("pieces", "ended", "unfinished"),
    [
        (["one\ntw", "o\n", "\n", "thr"], ["one", "two"], "thr"),
        (["\r 10%|#", "\r 20%|##"], [], " 20%|##"),
        (["\r 10%|#", "\r 20%|##\n"], [" 20%|##"], ""),
        (["windows\r", "\nends\r\n"], ["windows", "ends"], ""),
        (["\x1b[31mred\x1b[0m\tx\x07\n"], ["red x"], ""),
        (["TOK", "EN=abc\n"], ["TOKEN=***"], ""),
        (
            [
                "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
                "abc\nAA==\n-----END RSA ",
                "PRIVATE KEY-----\nafter\n",
            ],
            ["-----BEGIN RSA PRIVATE KEY-----", "***", "***", "***", "after"],
            "",
        ),
        (["-----BEGIN PRIVATE KEY-----\nMIIEabc"], ["-----BEGIN PRIVATE KEY-----"], "***"),
        (
            ["no -----BEGIN PRIVATE KEY-----\nin this file\n"],
            ["no -----BEGIN PRIVATE KEY-----", "in this file"],
            "",
        ),
        (["half \ud800 of a character\n"], ["half  of a character"], ""),
        (["x" * 5000 + "\n"], ["x" * (LINE_CHARS - 1) + "…"], ""),
    ],
)
def test_lines_are_what_a_terminal_shows(pieces: list[str], ended: list[str], unfinished: str) -> None:
    assert lines(*pieces) == Output(1, 7, ended, unfinished)


def test_newest_lines_are_kept_and_others_counted() -> None:
    few = lines(*(f"{n}\n" for n in range(12)))
    assert few == Output(1, 7, ["7", "8", "9", "10", "11"], skipped=7)
    long = lines(*("ü" * LINE_CHARS + "\n" for _ in range(100)), most=100)
    assert long is not None
    assert sum(len(line.encode()) for line in long.lines) <= MOST_BYTES
    assert long.skipped + len(long.lines) == 100


def test_only_what_is_new_is_taken() -> None:
    made = LastLines(2, 5)
    made.feed("a\n50%")
    assert made.drain(1) == Output(2, 1, ["a"], "50%")
    assert made.drain(2) is None
    made.feed("\r    \r")  # a bar that is taken away
    assert made.drain(3) == Output(2, 3, [], "")
    made.feed("lost ")
    made.lose()
    made.feed("the end of a line\nwhole\n")
    assert made.drain(4) == Output(2, 4, ["whole"], skipped=1)


class Streams:
    """Stdout and stderr that go to files, and a tap on them; no fixture: pytest sets its own for a test."""

    def __init__(self, folder: Path) -> None:
        self.paths = {name: folder / name for name in ("stdout", "stderr")}
        self.errors, self.missing = Errors(), dict[str, str]()
        self.tap = OutputTap(40, self.errors, self.missing)

    def __enter__(self) -> Streams:
        self._before = sys.stdout, sys.stderr
        self._own = self.paths["stdout"].open("w"), self.paths["stderr"].open("w", buffering=1)
        sys.stdout, sys.stderr = self._own
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before
        for stream in self._own:
            stream.close()

    def taken(self) -> list[tuple[int, list[str], str]]:
        return [(output.stream, output.lines, output.unfinished) for output in self.tap.drain(1)]


def facts(stream: Any) -> list[Any]:
    """What a script may ask of a stream."""
    return [
        type(stream), stream.isatty(), stream.fileno(), stream.line_buffering, stream.write_through,
        stream.encoding, stream.errors, stream.buffer,
    ]  # fmt: skip


def test_whoever_holds_a_stream_is_seen_and_the_stream_stays_as_it_was(tmp_path: Path) -> None:
    with Streams(tmp_path) as streams:
        handler, before = logging.StreamHandler(), sys.stdout
        was = [facts(sys.stdout), facts(sys.stderr)]
        streams.tap.install()
        assert sys.stdout is before and [facts(sys.stdout), facts(sys.stderr)] == was
        print("printed", 1)
        sys.stdout.writelines(["a\n", "b"])
        handler.emit(logging.makeLogRecord({"msg": "logged"}))
        assert streams.paths["stdout"].read_text() == ""  # as ever, it is in the buffer
        assert streams.paths["stderr"].read_text() == "logged\n"
        assert streams.taken() == [(1, ["printed 1", "a"], "b"), (2, ["logged"], "")]
        streams.tap.remove()
        assert "write" not in vars(sys.stdout) and "write" not in vars(sys.stderr)
        sys.stdout.flush()
        assert streams.paths["stdout"].read_text() == "printed 1\na\nb"


def test_a_write_that_fails_fails_as_ever_and_is_not_noted(tmp_path: Path) -> None:
    with Streams(tmp_path) as streams:
        streams.tap.install()
        with pytest.raises(TypeError, match="must be str"):
            sys.stdout.write(b"x")  # type: ignore[arg-type]

        class Loud(str):
            def __len__(self) -> int:
                raise RuntimeError("never asked")

        assert sys.stdout.write(Loud("loud\n")) == 5
        sys.stdout.close()
        with pytest.raises(ValueError, match="closed file"):
            print("x")
        assert streams.taken() == [(1, ["loud"], "")]
        assert streams.errors == {}


def test_a_stream_of_the_scripts_own_is_called_as_the_script_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        written = ""

        def write(self, message: str, *, twice: bool = False) -> int:
            self.written += message * (1 + twice)
            return 3

    stream, errors = Own(), Errors()
    monkeypatch.setattr(sys, "stdout", stream)
    tap = OutputTap(40, errors, {})
    tap.install()
    assert [stream.write(message="a\n"), stream.write("b\n", twice=True)] == [3, 3]
    (output, *_) = tap.drain(1)
    tap.remove()
    assert (stream.written, output.lines, errors) == ("a\nb\nb\n", ["a", "b"], {})


def test_a_flood_is_bounded(tmp_path: Path) -> None:
    with Streams(tmp_path) as streams:
        streams.tap.install()
        for n in range(_PIECES):
            print(f"line {n}")
        print("x\n" * _PIECE_CHARS + "end")
        [output] = streams.tap.drain(1)
        assert output.lines[-1] == "end" and len(output.lines) == 40
        assert output.skipped + len(output.lines) == _PIECES + _PIECE_CHARS + 1
        assert sum(len(tapped._pieces) for tapped in streams.tap._tapped) == 0


def test_what_another_puts_around_the_stream_stays(tmp_path: Path) -> None:
    with Streams(tmp_path) as streams:
        streams.tap.install()
        ours, heard = sys.stdout.write, list[str]()

        def theirs(text: str) -> int:
            heard.append(text)
            return ours(text)

        sys.stdout.write = theirs  # type: ignore[method-assign]
        streams.tap.remove()
        print("x")
        assert heard == ["x", "\n"] and sys.stdout.write is theirs


def test_streams_that_cannot_be_seen_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Streams(tmp_path) as streams:

        class Slotted:
            __slots__ = ()

            def write(self, text: str) -> int:
                return len(text)

        monkeypatch.setattr(sys, "stdout", Slotted())
        monkeypatch.setattr(sys, "stderr", None)
        streams.tap.install()
        assert list(streams.missing) == ["last lines of stdout"]
        off = OutputTap(0, streams.errors, {})
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        off.install()
        assert off.drain(1) == []


class Writer:
    """A process of its own that writes what it is told, as C does."""

    def __init__(self, stdout: Path | int, code: str = "", **options: Any) -> None:
        code = code or "import os, sys\nfor line in sys.stdin: os.write(1, eval(line))"
        command = [sys.executable, "-S", "-c", code]
        out = stdout.open("ab") if isinstance(stdout, Path) else stdout
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL, **options
        )
        self.path = stdout

    def write(self, text: bytes) -> None:
        assert self.process.stdin is not None and isinstance(self.path, Path)
        due = self.path.stat().st_size + len(text)
        self.process.stdin.write(repr(text).encode() + b"\n")
        self.process.stdin.flush()
        until(lambda: self.path.stat().st_size >= due, "the text")  # type: ignore[union-attr]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def taken(files: OutputFiles) -> dict[str, list[str]]:
    files.poll()
    return {
        name: [line for entry in entries for line in entry.lines] for name, entries in files.drain().items()
    }


def test_a_file_of_a_ranks_own_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"of an earlier life\n")
    os.utime(tmp_path / "out", (1e9, 1e9))
    rank, files = Writer(tmp_path / "out"), OutputFiles(40)
    files.follow("r", rank.process.pid)
    assert taken(files) == {}
    rank.write(b":job_id:01000000\nhello \xc3")
    rank.write(b"\xbc\n")
    assert taken(files) == {"r": ["hello ü"]}
    rank.write(b"Fatal Python error: Segmentation fault\n")
    os.truncate(tmp_path / "out", 0)
    rank.write(b"last\n")
    rank.end()
    files.ended("r")
    assert taken(files) == {"r": ["last"]}
    files.poll()
    assert not files.waiting and files._processes == {} and files.errors == {}


def test_a_rank_that_lives_for_less_than_a_look_is_read(tmp_path: Path) -> None:
    rank, files = Writer(tmp_path / "out"), OutputFiles(40, interval=600)
    files.start()
    files.read_once_more(60)
    files.follow("r", rank.process.pid)
    until(lambda: files._processes["r"].files, "its file is open")
    rank.write(b"last\n")
    rank.end()
    files.ended("r")
    until(lambda: files.waiting, "its last line")
    assert [entry.lines for entry in files.drain()["r"]] == [["last"]]
    files.close()


def test_a_file_that_several_write_into_is_nobodys(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "own"
    ranks, files = [Writer(shared), Writer(shared), Writer(private)], OutputFiles(40)
    for number, rank in enumerate(ranks):
        files.follow(str(number), rank.process.pid)
        rank.write(b"x\n")
    assert taken(files) == {"2": ["x"]}
    nested = "import os, subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {!r}])"
    inner = "import os, time; os.write(1, b'of parent and child\\n'); time.sleep(60)"
    parent = Writer(tmp_path / "parents", nested.format(inner))
    until(lambda: (tmp_path / "parents").stat().st_size, "the text")
    (child,) = Path(f"/proc/{parent.process.pid}/task/{parent.process.pid}/children").read_text().split()
    files.follow("child", int(child))
    assert taken(files) == {}
    os.kill(int(child), signal.SIGKILL)
    for rank in [*ranks, parent]:
        rank.end()
    files.close()


def at(t_ns: int, *texts: str, unfinished: bool = False) -> list[OutputLine]:
    return [OutputLine("stdout", t_ns, text, unfinished, 0) for text in texts]


@pytest.mark.parametrize(
    ("in_file", "seen", "both"),
    [
        (at(1, "a", "c warning"), [], at(1, "a", "c warning")),
        (at(1, "a", "c warning"), at(2, "a", "b"), at(1, "a", "c warning") + at(2, "b")),
        (at(1, "nccl"), at(2, "still in the buffer"), at(1, "nccl") + at(2, "still in the buffer")),
        (at(9, "flood", "of C"), at(2, "a"), at(2, "a") + at(9, "flood", "of C")),
        (at(3, "52%", unfinished=True), at(2, "50%", unfinished=True), at(3, "52%", unfinished=True)),
    ],
)
def test_lines_of_both_ways_are_joined(
    in_file: list[OutputLine], seen: list[OutputLine], both: list[OutputLine]
) -> None:
    assert joined(in_file, seen) == both


def answered(aggregator: Any, rank: int, **asked: Any) -> list[tuple[str, str, bool, int]]:
    (answer,) = ask(aggregator, "output", rank=rank, **asked)
    return [(line.stream, line.text, line.unfinished, line.skipped) for line in answer.lines]


def test_the_last_lines_of_a_rank_are_answered_in_order(tmp_path: Path) -> None:
    played = Played(tmp_path, 2, per_node=2, late=None)
    played.play(output=[Output(1, played.clock(), ["epoch 1"], "1%"), Output(2, played.clock(), ["w"])])
    played.play(output=[Output(1, played.clock(), ["epoch 2", "epoch 3"], "7%", 4)])
    played.play(silent=(0,), output=[Output(1, played.clock(), [], "9%")])
    first = [("stdout", "epoch 1", False, 0), ("stderr", "w", False, 0)]
    last = [("stdout", "epoch 2", False, 4), ("stdout", "epoch 3", False, 0)]
    assert answered(played.aggregator, 0) == [*first, *last, ("stdout", "7%", True, 0)]
    assert answered(played.aggregator, 1, most=2) == [first[1], last[1], ("stdout", "9%", True, 0)]
    assert ask(played.aggregator, "output", rank=7)[0].missing == "the rank has not reported"


def test_lines_of_the_relay_are_those_of_the_process(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path, Clock()), Relay(), Rank(0)
    aggregator.ingest(relay.message(rank.batch(output=[Output(2, 1, ["seen"])])))
    of_file = [Output(2, 2, ["seen", "Segmentation fault"], by_relay=True)]
    aggregator.ingest(
        relay.message(of_ranks={rank.process_id: encoded(of_file), "unknown": encoded(of_file)})
    )
    aggregator.commit()
    assert [text for _, text, _, _ in answered(aggregator, 0)] == ["seen", "Segmentation fault"]
    assert dict(aggregator.errors) == {"lines of output": 2}  # of a process that is not known


def test_few_entries_stay_and_last_lines_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceml_ray.store.retention._FEW", 50)
    writer = SessionWriter(tmp_path / "s.sqlite", output_lines=3)
    quiet, loud = writer.process("a", 1), writer.process("b", 1)
    writer.add_record(OUTPUT, quiet.id, Output(1, 1, ["said once"]))
    for n in range(100):
        writer.add_record(OUTPUT, quiet.id, Output(1, 1, [], f"{n}%"))
        writer.add_record(OUTPUT, loud.id, Output(1, 1, [f"line {n}"]))
        writer.commit()
        writer.fold()
    with writer.reader() as file:
        lines = lines_of(file, [quiet.id, loud.id], 3)
        assert [line.text for line in lines[quiet.id]] == ["said once", "99%"]
        assert [line.text for line in lines[loud.id]] == ["line 97", "line 98", "line 99"]
        ((entries,),) = file._all("SELECT count(*) FROM output")
    assert entries < 60
    writer.close()


def test_last_lines_stand_beside_a_death_in_report_bundle_and_page(tmp_path: Path) -> None:
    played = Played(tmp_path, 2, per_node=2, late=None)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    printed = [Output(2, played.clock(), ["Fatal error", "no room"], skipped=7)]
    for fields in ({"output": printed}, {}, {}):
        played.play(5, **fields)
    played.dies(1, -9)
    pages.poll()
    look(pages, "rank", rank=1)  # the first look asks
    assert [line.text for line in look(pages, "rank", rank=1)["output"].lines] == printed[0].lines
    page = to_json_plotly(Refresher(pages).refresh("/rank/1", "", {}))
    assert page.index("Last output") < page.index("Stages, against") and "7 more lines" in page
    played.end(1)
    (last,) = ask(played.aggregator, "summary")["output"]
    assert (last["rank"], [line["text"] for line in last["lines"]]) == (1, printed[0].lines)
    report = (tmp_path / "report.txt").read_text()
    assert (
        "Last output of rank 1\n          … 7 more lines\n  stderr  Fatal error\n  stderr  no room\n"
        in report
    )
    (bundle,) = (tmp_path / "bundles").iterdir()
    assert json.loads((bundle / "manifest.json").read_text())["output"] == [last]
    with SessionFile(bundle / "session.sqlite") as file:
        assert len(lines_of(file, [1, 2], 9)) == 2


def test_a_block_is_shown_as_its_answer() -> None:
    view = OutputView()
    line = OutputLine(stream="stderr", t_ns=1, text="x" * 200, unfinished=False, skipped=2)
    answer = [LastOutput(rank=3, lines=[line], missing=None)]
    (section,) = view.sections(view.of_block(view.block(answer)))
    (lines,) = map(laid_out, section.blocks)
    assert lines[:2] == ["Last output of rank 3", "          … 2 more lines"]
    assert lines[2].startswith("  stderr  xxx") and len(lines[2]) == WIDTH and lines[2].endswith("x…")
