"""What `--help` ends with: the two ways to start a job and the exit codes; of a subcommand, examples."""

from __future__ import annotations

import argparse
import textwrap

STARTING = (
    "To start a job: `python -m traceml_ray.launch` takes the place of torchrun and has its options. "
    "`traceml-ray run -- COMMAND` is for every other launcher (accelerate, deepspeed, mpirun, srun) and for "
    "scripts that start their ranks themselves."
)
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 bad input (with one line on stderr; analyze: also if only some of the "
    "files can be used); 3 a finding you asked for exists (analyze --fail-on, compare --fail-on-regression, "
    "collectives, check). `run` exits with the command's own code."
)
EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "traceml-ray run -- accelerate launch train.py",
        "traceml-ray run --session lr3 -- mpirun -np 4 python train.py",
    ),
    "report": (
        "traceml-ray report",
        "traceml-ray report lr3 --json | jq .verdict",
        "traceml-ray report lr3 --html -o lr3.html",
    ),
    "status": ("traceml-ray status lr3", "traceml-ray status --json | jq .ledger"),
    "top": ("traceml-ray top", "traceml-ray top lr3 --once"),
    "dashboard": ("traceml-ray dashboard", "traceml-ray dashboard lr3 --port 0"),
    "bundles": ("traceml-ray bundles lr3",),
    "dump": ("traceml-ray dump",),
    "profile": (
        "traceml-ray profile --ranks 0,5 --steps 3",
        "traceml-ray profile --diff 5,median --stage forward",
    ),
    "layers": ("traceml-ray layers lr3", "traceml-ray layers --steps 20"),
    "stop": ("traceml-ray stop lr3",),
    "analyze": (
        "traceml-ray analyze lr3",
        "traceml-ray analyze rank*.json --fail-on critical",
    ),
    "collectives": (
        "traceml-ray collectives /tmp/nccl_trace_rank_*",
        "traceml-ray collectives dumps --hang --json | jq .mismatch",
        "traceml-ray collectives lr3",
    ),
    "check": ("traceml-ray check --path /data", "traceml-ray check --seconds 60 --json | jq .slow"),
    "compare": (
        "traceml-ray compare before after",
        "traceml-ray compare lr1 lr2 lr3 --html runs.html",
        "traceml-ray compare good --fail-on-regression 5%",
    ),
    "sessions": ("traceml-ray sessions", "traceml-ray sessions --prune --older-than 30d --keep 20"),
    "export": (
        "traceml-ray export lr3 --format parquet -o tables",
        "traceml-ray export lr3 --format perfetto --steps 100-200",
    ),
    "alerts": ("traceml-ray alerts test alerts.toml", "traceml-ray alerts check alerts.toml"),
    "mcp": ("traceml-ray mcp --sessions /data/traceml-sessions", "traceml-ray mcp --read-only"),
    "completion": ('eval "$(traceml-ray completion bash)"', "traceml-ray completion fish | source"),
}
"""Examples, by subcommand."""


class Formatter(argparse.HelpFormatter):
    """Wraps paragraphs. Lines that begin with a space are examples and are left unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (
            part if part.startswith(" ") else textwrap.fill(part, width, break_on_hyphens=False)
            for part in text.split("\n")
        )
        return "\n".join(parts)


def examples(name: str) -> str:
    """Return the examples at the end of a subcommand's help."""
    lines = EXAMPLES.get(name, ())
    title = "Examples:" if len(lines) > 1 else "Example:"
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""
