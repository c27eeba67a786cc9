"""What the scripts share: flags, small data made here, the planted fault, and a record of every loss."""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

BATCH = 4
LENGTH = 16
VOCABULARY = 64
EVERY = 20
"""Steps between two validations, or two checkpoints."""
FEATURES = ("accumulate", "adapter", "bf16", "checkpoint", "compile", "dispatch", "validate", "workers")


class Arguments(argparse.Namespace):
    """The flags of a script; each feature is an attribute too."""

    steps: int
    out: Path
    late: str
    late_rank: int
    late_ms: float
    work_ms: float
    monitor: bool
    features: list[str]

    def __getattr__(self, name: str) -> bool:
        if name not in FEATURES:
            raise AttributeError(name)
        return name in self.features

    @property
    def micro(self) -> int:
        """Micro-batches in a step."""
        return 2 if self.accumulate else 1


def arguments() -> Arguments:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--steps", type=int, default=80, help="optimizer steps")
    add("--out", type=Path, required=True, help="folder for losses and checkpoints")
    add("--late", choices=("none", "data", "forward", "between"), default="none", help="where a rank is late")
    add("--late-rank", type=int, default=0)
    add("--late-ms", type=float, default=50.0)
    add("--work-ms", type=float, default=15.0, help="time that every rank spends in each forward")
    add("--zero", type=int, default=0, help="DeepSpeed's ZeRO stage")
    add("--local_rank", type=int, help="given by DeepSpeed's launcher")
    add("--no-monitor", dest="monitor", action="store_false", help="for scripts that start it themselves")
    add("features", nargs="*", metavar=f"{{{','.join(FEATURES)}}}")
    args = parser.parse_args(namespace=Arguments())
    args.out = args.out.absolute()
    faulthandler.dump_traceback_later(100)  # of a run that hangs, into its log
    return args


class Planted:
    """Puts one rank to sleep in one place, from the 11th step on."""

    FIRST = 10

    def __init__(self, args: Arguments) -> None:
        self.args, self.calls = args, 0

    @torch.compiler.disable
    def sleep(self, where: str, times_per_step: int = 1) -> None:
        """Sleep if this is the place, a `times_per_step`-th of the whole time at each call."""
        args = self.args
        if where == args.late and int(os.environ.get("RANK", 0)) == args.late_rank:
            self.calls += 1
            if self.calls > self.FIRST * times_per_step:
                time.sleep(args.late_ms / 1e3 / times_per_step)

    def in_forward(self, module: nn.Module) -> None:
        """Make the forward of `module` take its time, and longer on the late rank."""
        work_s = self.args.work_ms / 1e3

        @torch.compiler.disable
        def work(*_: object) -> None:
            if torch.is_grad_enabled():
                time.sleep(work_s)
                self.sleep("forward")

        module.register_forward_pre_hook(work)


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences, each by its own seed: those of the even ranks' batches are no others."""

    def __init__(self, args: Arguments, length: int) -> None:
        self.planted, self.length = Planted(args), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.planted.sleep("data", times_per_step=BATCH)
        seeded = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=seeded)
        return {"input_ids": tokens, "labels": tokens}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same sequences, one after the other: what a streamed data set is."""

    def __init__(self, args: Arguments, length: int) -> None:
        self.tokens = Tokens(args, length)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.tokens[index] for index in range(len(self.tokens)))


def data(args: Arguments, ranks: int = 2) -> Dataset[dict[str, Tensor]]:
    """Return enough training data for one epoch of `args.steps` steps."""
    length = args.steps * args.micro * BATCH * ranks
    return Stream(args, length) if args.dispatch else Tokens(args, length)


def held_out(args: Arguments) -> Dataset[dict[str, Tensor]]:
    """Return validation data: a few batches for each rank."""
    quick = Arguments(**{**vars(args), "late": "none"})
    return Tokens(quick, 4 * BATCH)


class Model(nn.Module):
    """A small network over tokens; gives logits, or with `labels` the loss."""

    def __init__(self, planted: Planted, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, VOCABULARY)
        planted.in_forward(self.inner)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return (batch, time, vocabulary), or a scalar."""
        hidden = self.embed(input_ids)
        logits: Tensor = self.head(hidden + self.inner(hidden))
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Losses:
    """Every loss of this rank to the last bit, and a digest of the weights at the end."""

    def __init__(self, args: Arguments) -> None:
        self.args, self.values = args, list[str]()

    def add(self, loss: Tensor) -> None:
        """Take one loss down."""
        self.values.append(float(loss.detach()).hex())

    def of(self, module: nn.Module) -> None:
        """Take down what `module` returns as `.loss` whenever it trains."""

        @torch.compiler.disable
        def seen(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self.add(output.loss)

        module.register_forward_hook(seen)

    def write(self, model: nn.Module) -> None:
        """Write them to a file of this rank."""
        digest = hashlib.sha256()
        for value in model.parameters():
            local = getattr(value, "to_local", lambda v=value: v)()
            digest.update(local.detach().float().contiguous().numpy().tobytes())
        result = {"losses": self.values, "weights": digest.hexdigest()}
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / f"losses-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))
        # torch 2.13 can hang, monitored or not, where a gloo group is destroyed in the first milliseconds
        # after a collective: its destructor holds the GIL, and waits for a thread that needs it.
        time.sleep(0.1)


def tiny_llama(planted: Planted) -> Any:
    """Return a causal language model of Hugging Face with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))
    planted.in_forward(model.model.layers[0])
    return model
