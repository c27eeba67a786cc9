"""
A small byte-level GPT that learns to write Python, in plain PyTorch.

The text is on every machine already: the standard library's own sources. One process, or DDP on
CPU (gloo) or CUDA (NCCL; gloo where ranks share a device, which NCCL refuses); nothing to download, and
nothing here knows that it may be watched.

    python examples/train_gpt.py
    torchrun --nproc-per-node 4 examples/train_gpt.py
    python -m traceml_ray.launch --nproc-per-node 4 examples/train_gpt.py --slow data:2:40

The last line trains under the monitor and plants a fault for it to find: rank 2 gets every batch
40 ms late. With two or more ranks on a machine of few cores, set OMP_NUM_THREADS=1.

--lengths gives every window a length of its own, from an eighth of the context to all of it; a batch is
padded to its longest. No rank is slower than another, but in each step some rank has most to do, and the
others wait for it.

--slow STAGE:RANK:MS[@STEP] puts a rank to sleep for MS milliseconds (from step STEP on) in

    data       the wait for a batch              optimizer  inside optimizer.step()
    prepare    between batch and forward         log        where the loss is logged
    forward    in the middle of the model        eval       in each evaluation
    backward   in the middle of the model

in every step (steps count from 1; with --accumulate, the four on the left sleep in every micro-batch).
Sleeping changes no number: --loss-log FILE writes every loss to the last bit, so that two runs of the
same seed can be compared.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

VOCABULARY = 256  # one token per byte
CORPUS_BYTES = 2_000_000
VALIDATION_SHARE = 0.1
LENGTHS, SHORTEST = 10_007, 8
"""So many lengths are drawn, the shortest this part of the context."""
IGNORED = -100  # by cross_entropy
STAGES = ("data", "prepare", "forward", "backward", "optimizer", "log", "eval")


# --- the model ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        change: Tensor = self.mlp(self.mlp_norm(x))
        return x + change


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (batch, time) to logits of the byte that follows (batch, time, 256)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# --- the text ----------------------------------------------------------------------------------


def read_corpus() -> Tensor:
    """Return the first 2 MB of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if not text:
        raise FileNotFoundError(f"no .py files in {folder}: this Python ships without its sources")
    return torch.frombuffer(text, dtype=torch.uint8)[:CORPUS_BYTES]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """
    Item i is the i-th stretch of `context` bytes, and the same stretch one byte later; with `lengths`, the
    beginning of it.
    """

    def __init__(self, text: Tensor, context: int, lengths: Tensor | None = None) -> None:
        self.text, self.context, self.lengths = text, context, lengths

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        length = self.context if self.lengths is None else int(self.lengths[index % len(self.lengths)])
        piece = self.text[start : start + length + 1].long()
        return piece[:-1], piece[1:]


def drawn_lengths(context: int, seed: int) -> Tensor:
    """Return lengths of windows, evenly spread on a logarithmic scale: few are long, as texts are."""
    spread = torch.rand(LENGTHS, generator=torch.Generator().manual_seed(seed))
    shortest = max(1, context // SHORTEST)
    return (shortest * (context / shortest) ** spread).round().long()


def padded(windows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return a batch (tokens, targets) that is as long as its longest window; no loss is of the padding."""
    tokens, targets = zip(*windows, strict=True)
    return [
        nn.utils.rnn.pad_sequence(list(tokens), batch_first=True),
        nn.utils.rnn.pad_sequence(list(targets), batch_first=True, padding_value=IGNORED),
    ]


class EndlessBatches(Sampler[list[int]]):
    """
    Batches of this rank's share of the data, shuffled anew every epoch, without end.

    The `data` fault sleeps here because a sampler runs in the training process, inside `next(batches)`,
    with any number of workers. A sleep in the dataset would be slept by a worker, ahead of time:
    prefetching would hide it.
    """

    def __init__(self, shares: DistributedSampler[Any], batch_size: int, faults: Faults) -> None:
        self.shares, self.faults = shares, faults
        self.batches = BatchSampler(shares, batch_size, drop_last=True)
        if not len(self.batches):
            raise ValueError(f"{len(shares)} windows a rank do not fill a batch of {batch_size}")

    def __iter__(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            self.shares.set_epoch(epoch)
            for batch in self.batches:
                self.faults.sleep("data")
                yield batch


# --- planted faults ----------------------------------------------------------------------------


class Slow(NamedTuple):
    """One --slow: sleep for `seconds` in `stage` on `rank`, in every step from `start` on."""

    stage: str
    rank: int
    seconds: float
    start: int


def parse_slow(text: str) -> Slow:
    """Read STAGE:RANK:MS[@STEP]."""
    try:
        fault, _, start = text.partition("@")
        stage, rank, ms = fault.split(":")
        slow = Slow(stage, int(rank), float(ms) / 1000, int(start or 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE:RANK:MS or STAGE:RANK:MS@STEP") from None
    if stage not in STAGES:
        raise argparse.ArgumentTypeError(f"{text!r}: the stages are {', '.join(STAGES)}")
    if slow.start < 1 or not 0 < slow.seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text!r}: MS is above 0 and up to 60000, STEP 1 or more")
    return slow


def parse_fail(text: str) -> tuple[int, int]:
    """Read RANK:STEP."""
    try:
        rank, step = text.split(":")
        return int(rank), int(step)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK:STEP") from None


class Faults:
    """What goes wrong on this rank, and when."""

    def __init__(self, slow: list[Slow], fail: tuple[int, int] | None, rank: int) -> None:
        self.slow = [fault for fault in slow if fault.rank == rank]
        self.fail_step = fail[1] if fail and fail[0] == rank else None
        self.step = 0  # before the first step nothing is slow

    def begin(self, step: int) -> None:
        """Enter `step`; raise RuntimeError if this rank is to fail there."""
        self.step = step
        if step == self.fail_step:
            raise RuntimeError(f"planted by --fail at step {step}")

    def sleep(self, stage: str) -> None:
        """Be late, if that is planned for this stage and step."""
        for fault in self.slow:
            if fault.stage == stage and self.step >= fault.start:
                time.sleep(fault.seconds)

    def plant(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        """Arrange for the sleeps inside the model and the optimizer, if this rank has any."""
        sleep = torch.compiler.disable(self.sleep)  # type: ignore[no-untyped-call]
        middle = model.blocks[len(model.blocks) // 2]
        stages = {fault.stage for fault in self.slow}
        if "forward" in stages:
            middle.register_forward_pre_hook(lambda *_: sleep("forward") if model.training else None)
        if "backward" in stages:
            middle.register_full_backward_pre_hook(lambda *_: sleep("backward"))
        if "optimizer" in stages:
            optimizer.register_step_pre_hook(lambda *_: sleep("optimizer"))


# --- training ----------------------------------------------------------------------------------


class Process(NamedTuple):
    """Which of the processes that train together this one is."""

    rank: int
    world_size: int
    device: torch.device


def this_process(device: str) -> Process:
    """Read what torchrun put into the environment; without it, the process is alone."""
    rank, local_rank, world_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
    )
    if device != "cuda":
        return Process(rank, world_size, torch.device(device))
    return Process(rank, world_size, torch.device("cuda", local_rank % max(1, torch.cuda.device_count())))


def backend_of(me: Process) -> str:
    """Return how ranks exchange gradients: NCCL has one rank a device, gloo takes CUDA tensors of any."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if me.device.type == "cuda" and ranks_here <= torch.cuda.device_count() else "gloo"


def loaders(args: argparse.Namespace, me: Process, faults: Faults) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return this rank's training batches, which do not end, and its share of the validation text."""
    text = read_corpus()
    split = int(len(text) * (1 - VALIDATION_SHARE))
    lengths = drawn_lengths(args.context, args.seed) if args.lengths else None
    train, val = Windows(text[:split], args.context, lengths), Windows(text[split:], args.context)
    train_share: DistributedSampler[Any] = DistributedSampler(train, me.world_size, me.rank, seed=args.seed)
    val_share: DistributedSampler[Any] = DistributedSampler(val, me.world_size, me.rank, shuffle=False)
    pin = me.device.type == "cuda"
    batches = EndlessBatches(train_share, args.batch_size, faults)
    return (
        DataLoader(
            train,
            batch_sampler=batches,
            num_workers=args.workers,
            pin_memory=pin,
            collate_fn=padded if args.lengths else None,
        ),
        # A few batches now and then are not worth a process.
        DataLoader(val, args.batch_size, sampler=val_share, pin_memory=pin),
    )


def loss_of(model: nn.Module, batch: list[Tensor], args: argparse.Namespace) -> Tensor:
    """Return the mean cross-entropy of the next byte in nats; `batch` is (tokens, targets)."""
    tokens, targets = batch
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.amp):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def on(device: torch.device, batch: list[Tensor]) -> list[Tensor]:
    """Return `batch` on `device`."""
    return [tensor.to(device, non_blocking=True) for tensor in batch]


@torch.no_grad()
def evaluate(
    model: nn.Module, val: DataLoader[Any], args: argparse.Namespace, me: Process, faults: Faults
) -> float:
    """Return the mean loss over the first validation batches of every rank."""
    model.eval()
    faults.sleep("eval")
    batches = itertools.islice(val, args.eval_batches)
    loss = torch.stack([loss_of(model, on(me.device, batch), args) for batch in batches]).mean()
    if me.world_size > 1:
        dist.all_reduce(loss)
    model.train()
    return loss.item() / me.world_size


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write `folder`/step-N.pt: whoever looks finds the whole file or none."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"step-{step}.partial"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(partial.with_suffix(".pt"))


def train(args: argparse.Namespace, me: Process, exact: TextIO) -> None:
    """Train for `args.steps` steps; write each loss into `exact` to the last bit."""
    torch.manual_seed(args.seed)
    faults = Faults(args.slow, args.fail, me.rank)
    train_loader, val_loader = loaders(args, me, faults)
    gpt = GPT(args.layers, args.heads, args.width, args.context).to(me.device)
    model = DistributedDataParallel(gpt) if me.world_size > 1 else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    faults.plant(gpt, optimizer)
    if args.compile:
        model.compile()
    batches = iter(train_loader)
    since = time.perf_counter()

    for step in range(1, args.steps + 1):
        faults.begin(step)
        total = 0.0
        for left in reversed(range(args.accumulate)):
            batch = on(me.device, next(batches))
            faults.sleep("prepare")
            # Only the last micro-batch exchanges gradients; those before it add up on the rank.
            with model.no_sync() if left and isinstance(model, DistributedDataParallel) else nullcontext():
                loss = loss_of(model, batch, args) / args.accumulate
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        faults.sleep("log")
        exact.write(f"{step} train {total.hex()}\n")
        if step % args.log_every == 0 and me.rank == 0:
            pace = 1000 * (time.perf_counter() - since) / args.log_every
            since = time.perf_counter()
            print(f"step {step:5d}  loss {total:.4f}  {pace:6.1f} ms/step", flush=True)
        if step % args.eval_every == 0 or step == args.steps:
            val_loss = evaluate(model, val_loader, args, me, faults)
            exact.write(f"{step} val {val_loss.hex()}\n")
            if me.rank == 0:
                print(f"step {step:5d}  validation loss {val_loss:.4f}", flush=True)
        if args.checkpoint_dir and me.rank == 0 and step % args.checkpoint_every == 0:
            save(args.checkpoint_dir, step, gpt, optimizer)


# --- command line ------------------------------------------------------------------------------


def count(text: str) -> int:
    """Read a number of things, at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; its defaults train a small model."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=count, default=200)
    add("--batch-size", type=count, default=4, help="windows a rank and micro-batch")
    add("--accumulate", type=count, default=1, help="micro-batches a step")
    add("--context", type=count, default=64, help="bytes in a window")
    add("--lengths", action="store_true", help="windows of different lengths")
    add("--layers", type=count, default=3)
    add("--heads", type=count, default=4)
    add("--width", type=count, default=96)
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=1, help="DataLoader workers a rank")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    add("--compile", action="store_true")
    add("--log-every", type=count, default=10)
    add("--eval-every", type=count, default=100)
    add("--eval-batches", type=count, default=4)
    add("--checkpoint-dir", type=Path, help="where rank 0 saves its state; without it, nowhere")
    add("--checkpoint-every", type=count, default=100)
    add("--loss-log", default=os.devnull, metavar="FILE", help="exact losses; rank N > 0: FILE.rankN")
    add("--slow", type=parse_slow, action="append", default=[], metavar="STAGE:RANK:MS[@STEP]")
    add("--fail", type=parse_fail, metavar="RANK:STEP", help="raise RuntimeError on that rank at that step")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, Process]:
    """Read the command line; what cannot be done ends the process with one line that says so."""
    parser = argument_parser()
    args = parser.parse_args()
    me = this_process(args.device)
    for rank in [slow.rank for slow in args.slow] + ([args.fail[0]] if args.fail else []):
        if not 0 <= rank < me.world_size:
            parser.error(f"a fault on rank {rank}: this run has ranks 0 to {me.world_size - 1}")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be divided among --heads {args.heads}")
    return args, me


def main() -> None:
    """Train, alone or as one of torchrun's processes."""
    args, me = parse_arguments()
    cuda = me.device.type == "cuda"
    backend = backend_of(me)
    if cuda:
        torch.cuda.set_device(me.device)
    if cuda and me.rank == 0:
        devices, name = torch.cuda.device_count(), torch.cuda.get_device_name(me.device)
        print(f"{me.world_size} ranks, {devices} CUDA devices a machine ({name}), {backend}", flush=True)
    if me.world_size > 1:
        dist.init_process_group(backend, device_id=me.device if backend == "nccl" else None)
    separate = me.rank > 0 and args.loss_log != os.devnull
    with Path(f"{args.loss_log}.rank{me.rank}" if separate else args.loss_log).open(
        "w", buffering=1
    ) as exact:
        train(args, me, exact)
    if me.world_size > 1:
        # A gloo thread may still hold the tensor of the last all_reduce, and abort a process that ends before
        # it lets go: the wait in a barrier gives it the time.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
