"""
Writes from the sources what people call (`docs/api.md`: signatures, docstrings), the shapes of what they get
(`docs/data.md`: answers, records, labels of a verdict), and the table of labels of docs/concepts/verdicts.md.

    python docs/api_page.py docs/api.md docs/data.md docs/concepts/verdicts.md

The package is not imported, so that the pages are the same whatever is installed.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECTIONS = {
    "In a training script": {
        "traceml_ray/api.py": (
            *("attach", "detach", "trace_step", "stage", "count", "log", "capture_oom", "watch"),
            *("watch_router", "profile"),
        ),
        "traceml_ray/adapters/huggingface.py": ("TraceMLTrainerCallback",),
        "traceml_ray/adapters/lightning.py": ("TraceMLCallback",),
    },
    "Over files": {
        "traceml_ray/reports/analyze.py": ("analyze", "AnalyzeError"),
        "traceml_ray/reports/comparison.py": ("compare",),
        "traceml_ray/interactive/stored.py": ("open", "StoredSession"),
    },
    "In a driver of Ray": {
        "traceml_ray/driver.py": ("start",),
        "traceml_ray/live_session.py": ("Session", "StartError"),
        "traceml_ray/store/summary_shape.py": ("to_builtins",),
        "launchers/train_callback.py": ("TraceMLTrainCallback",),
    },
}
ERRORS = {
    "traceml_ray/settings.py": ("SettingError",),
    "traceml_ray/identity.py": ("IdentityError",),
}
RESULTS = ("traceml_ray/store/results.py", "traceml_ray/store/summary_shape.py")
PARTS = {
    "traceml_ray/analysis/verdict.py": ("Suspect", "Stack"),
    "traceml_ray/analysis/verdict_shapes.py": ("VerdictInfo", "TimedEpisode"),
    "traceml_ray/analysis/uneven_work.py": ("Reason", "ExpertLoad"),
    "traceml_ray/analysis/anomalies.py": ("Anomaly",),
    "traceml_ray/analysis/roles.py": ("RoleShare",),
    "traceml_ray/analysis/track.py": ("Episode",),
    "traceml_ray/analysis/episodes.py": ("Brief",),
    "traceml_ray/analysis/step_stats.py": ("FirstSteps",),
    "traceml_ray/signals/throughput/judge.py": ("ThroughputNumbers", "Throughput", "ThroughputStatistics"),
    "traceml_ray/signals/goodput/answer.py": ("Goodput", "AttemptGoodput", "RankGoodput", "Stretch"),
    "traceml_ray/signals/collectives/judge.py": ("CollectiveTimes", "CollectiveKind", "GroupTimes"),
    "traceml_ray/signals/collectives/match.py": ("Mismatch",),
    "traceml_ray/signals/logged/judge.py": ("LoggedMetric", "NotFinite", "LoggedNumbers"),
    "traceml_ray/signals/sharding/judge.py": (
        *("ShardingInfo", "ShardsOfRank", "ModelShards", "Uneven", "Imbalance"),
    ),
    "traceml_ray/signals/output/last_lines.py": ("LastOutput", "OutputLine"),
    "traceml_ray/signals/layers/judge.py": ("Layers", "Layer", "LayerFinding"),
}
"""Structs of other modules that answers are made of."""
TABLES = {
    "traceml_ray/interactive/rows.py": ("RowList",),
    "traceml_ray/interactive/steps.py": ("StepTable",),
}
FINDINGS = {"traceml_ray/signals/finding.py": ("Finding",)}
MEMORY = {
    "traceml_ray/reports/analyze.py": ("Analysis", "AnalyzedFile", "Refused"),
    "traceml_ray/signals/memory/view.py": ("RunMemory",),
    "traceml_ray/signals/memory/shapes.py": (
        *("Memory", "FirstCause", "CollectiveOnset", "MemoryFinding", "Attribution", "Incident"),
        *("RankMemory", "MemoryOfRank", "MemoryNumbers"),
    ),
}
COMPARISON = {
    "traceml_ray/reports/comparison.py": ("Comparison", "Side"),
    "traceml_ray/analysis/comparison.py": ("NumberChange", "RankChange"),
    "traceml_ray/reports/overlay.py": ("RunTable", "RunRow"),
}
PROFILES = {"traceml_ray/store/profiles.py": ("ProfileInfo", "Profile", "RankProfile", "ProfileStep")}
LABELS = runpy.run_path(str(ROOT / "traceml_ray" / "analysis" / "labels.py"))["LABELS"]
METHODS_OF = {
    "Session": (("traceml_ray/interactive/questions.py", "SessionQuestions"),),
    "StoredSession": (),
}
"""Of other classes the methods are for frameworks, not for people. With whose methods theirs are listed."""
INTERNAL = {"request_profile"}
"""Methods of it that other parts of the package call, and no person."""
INTRO = """# API

What a person calls. The shapes of what is returned: [data](data.md).

Made by `make api` from the sources. What is private (`_name`) or not on this page may change at any time.
Every call in a training script does nothing in a process that is not watched, and raises nothing of ours into
training.
"""


DATA_INTRO = """# Data

Made by `make api` from the sources: the shapes of what the [API](api.md) returns and of what files hold.
"""


def page() -> str:
    """Return the page of what people call."""
    parts = [INTRO]
    for title, files in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [entry(node) for path, names in files.items() for node in shapes_of(path, names)]
    parts.append("## Errors\n")
    parts += [entry(node) for path, names in ERRORS.items() for node in shapes_of(path, names)]
    (settings,) = shapes_of("traceml_ray/settings.py", ("Settings",))
    parts.append(f"## Settings\n\n{text_of(settings)}\nEach field: [settings](reference/settings.md).\n")
    return "\n".join(parts)


def data_page() -> str:
    """Return the page of the shapes of answers and records."""
    parts = [DATA_INTRO]
    parts.append("## Labels of a verdict\n\nWhat each means: [verdicts](concepts/verdicts.md).\n")
    columns = ("kind", "severity", "names", "next")
    parts.append(
        table(("label", *columns), ((f"`{n}`", *(getattr(m, c) for c in columns)) for n, m in LABELS.items()))
    )
    parts.append("## What a session answers\n")
    for path in RESULTS:
        shapes = ast.parse((ROOT / path).read_text())
        parts += [text_of(shapes), *(shape(node) for node in shapes.body if isinstance(node, ast.ClassDef))]
    parts += [shape(node) for path, names in PARTS.items() for node in shapes_of(path, names)]
    parts.append("## Tables\n")
    parts += [shape(node) for path, names in TABLES.items() for node in shapes_of(path, names)]
    parts.append("## What is found\n")
    parts += [shape(node) for path, names in FINDINGS.items() for node in shapes_of(path, names)]
    parts.append("## What files say about memory\n")
    parts += [shape(node, default=False) for path, names in MEMORY.items() for node in shapes_of(path, names)]
    parts.append("## How sessions differ\n")
    parts += [
        shape(node, default=False) for path, names in COMPARISON.items() for node in shapes_of(path, names)
    ]
    parts.append("## What became of a profile\n")
    parts += [
        shape(node, default=False) for path, names in PROFILES.items() for node in shapes_of(path, names)
    ]
    return "\n".join(parts)


def shapes_of(path: str, names: tuple[str, ...]) -> list[ast.ClassDef | ast.FunctionDef]:
    """Return the definitions of `names` in a file, in that order. Raises KeyError for a missing one."""
    body = ast.parse((ROOT / path).read_text()).body
    definitions = {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return [definitions[name] for name in names]


def entry(node: ast.ClassDef | ast.FunctionDef, title: str = "### ") -> str:
    """Return the entry of a function, or of a class with its methods."""
    text = f"{title}{node.name}\n\n```python\n{signature(node)}\n```\n\n{text_of(node)}"
    if not isinstance(node, ast.ClassDef) or node.name not in METHODS_OF:
        return text
    public = [
        method
        for shown in (*inherited(node), node)
        for method in methods(shown)
        if not method.name.startswith("_") and method.name not in INTERNAL
    ]
    return "\n".join([text, *(entry(method, f"#### {node.name}.") for method in public)])


def inherited(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield the classes whose methods are listed with those of a class, without those that it has anew."""
    names = {method.name for method in methods(node)}
    for path, name in METHODS_OF[node.name]:
        for base in shapes_of(path, (name,)):
            base.body = [member for member in base.body if getattr(member, "name", "") not in names]
            yield base


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a class."""
    yield from (member for member in node.body if isinstance(member, ast.FunctionDef))


def signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return how it is called, one keyword a line where that is long."""
    if isinstance(node, ast.ClassDef):
        init = next((method for method in methods(node) if method.name == "__init__"), None)
        if init is None or node.name in METHODS_OF or node.name.endswith("Error"):
            return f"class {node.name}"
        arguments, returns = arguments_of(init), ""
    else:
        arguments = arguments_of(node)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return f"{node.name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"


def arguments_of(node: ast.FunctionDef) -> list[str]:
    """Return the arguments of a function as they are written."""
    shown, args = [], node.args
    taken = [*args.posonlyargs, *args.args]
    positional = [None] * (len(taken) - len(args.defaults)) + [*args.defaults]
    for argument, default in zip(taken, positional, strict=True):
        if argument.arg != "self":
            shown.append(one_argument(argument, default))
        shown += ["/"] * (argument is (args.posonlyargs or [None])[-1])
    shown += [f"**{one_argument(args.kwarg, None)}"] if args.kwarg else []
    shown += ["*"] if args.kwonlyargs else []
    shown += [one_argument(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return shown + ([f"**{one_argument(args.kwarg, None)}"] if args.kwarg else [])


def one_argument(argument: ast.arg, default: ast.expr | None) -> str:
    """Return an argument with its type and default."""
    text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    return text if default is None else f"{text} = {ast.unparse(default)}"


def text_of(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    """Return a docstring as Markdown: what stands indented under `Args:` and the like becomes a list."""
    lines: list[str] = []
    listed = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if re.fullmatch(r"(Args|Raises):", line):
            listed = True
            lines += [f"**{line[:-1]}**", ""]
        elif listed and (item := re.match(r"    (\w+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif listed and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            listed = listed and not line
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def shape(node: ast.ClassDef, default: bool = False) -> str:
    """Return the entry of a class of fields: a table of types, defaults and what is written under each."""
    columns = ["field", "type", *(["default"] if default else []), "meaning"]
    rows: list[Sequence[str]] = []
    base = ast.unparse(node.bases[0]) if node.bases else "_"
    if base not in ("msgspec.Struct", "list[T]") and not base.startswith("_"):
        rows.append([f"all of `{base}`", "", "the same fields with the same meaning"])
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            values = [field.target, type_of(field), *([field.value] if default else [])]
            text = f"{meaning(below)} {allowed(field)}".strip()
            rows.append([*(f"`{ast.unparse(value)}`" if value else "" for value in values), text])
    return f"### {node.name}\n\n{text_of(node)}" + (f"\n{table(columns, rows)}" if rows else "")


def notes_of(field: ast.AnnAssign) -> list[ast.expr]:
    """Return a type and what `Annotated` says beside it."""
    annotation = field.annotation
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        return annotation.slice.elts
    return [annotation]


def type_of(field: ast.AnnAssign) -> ast.expr:
    """Return the type of a field without what `Annotated` says beside it."""
    return notes_of(field)[0]


def allowed(field: ast.AnnAssign) -> str:
    """Return the range of a setting, and who has it, as sentences."""
    texts = []
    for note in notes_of(field)[1:]:
        if isinstance(note, ast.Call) and ast.unparse(note.func) == "Bounds":
            low, high = (ast.unparse(end).replace("_", "") for end in note.args)
            texts.append(f"From {low} to {high}.")
        elif ast.unparse(note) == "OF_LAUNCHERS":
            texts.append("Only for launchers.")
    return " ".join(texts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def with_labels(text: str) -> str:
    """Return the page of verdicts with its table of labels as it is now."""
    now = table(("verdict", "it means"), ((f"`{name}`", label.means) for name, label in LABELS.items()))
    return re.sub(r"\| verdict \| it means \|\n(\|.*\n)+", lambda _: now, text)


def meaning_of_docstring(docstring: str) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def meaning(node: ast.stmt | None) -> str:
    """Return the text that stands under a field, as one line."""
    text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
    return " ".join(str(text).split())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
    Path(sys.argv[2]).write_text(data_page())
    Path(sys.argv[3]).write_text(with_labels(Path(sys.argv[3]).read_text()))
