"""PyTorch-Ignite's Engine, as its examples have it."""

from typing import Any

import ignite.distributed as idist
import torch
from common import BATCH, EVERY, Losses, Model, Planted, arguments, data, held_out
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import Tensor


def training(_rank: int) -> None:
    """Train on one rank."""
    args = arguments()
    torch.manual_seed(0)
    planted, losses = Planted(args), Losses(args)
    model = idist.auto_model(Model(planted))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = idist.auto_dataloader(data(args), batch_size=BATCH * 2, shuffle=False)
    validation = idist.auto_dataloader(held_out(args), batch_size=BATCH * 2)

    def update(engine: Engine, batch: dict[str, Tensor]) -> float:
        model.train()
        loss = model(**batch)
        losses.add(loss)
        (loss / args.micro).backward()
        if engine.state.iteration % args.micro == 0:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    def evaluate(_engine: Engine, batch: dict[str, Tensor]) -> Any:
        model.eval()
        with torch.no_grad():
            return model(**batch)

    trainer, evaluator = Engine(update), Engine(evaluate)
    every = Events.ITERATION_COMPLETED(every=EVERY)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: planted.sleep("between"))
    if args.validate:
        trainer.add_event_handler(every, lambda: evaluator.run(validation))
    if args.checkpoint:
        saver = Checkpoint(
            {"model": model, "trainer": trainer}, DiskSaver(str(args.out), require_empty=False)
        )
        trainer.add_event_handler(every, saver)
    trainer.run(loader, max_epochs=1)
    losses.write(model)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
