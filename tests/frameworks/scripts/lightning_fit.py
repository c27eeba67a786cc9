"""Lightning's Trainer.fit, automatic optimization, as its documentation has it."""

from typing import Any

import lightning
import torch
from common import BATCH, EVERY, Arguments, Losses, Model, Planted, arguments, data, held_out
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import Tensor
from torch.utils.data import DataLoader


class Lit(lightning.LightningModule):
    """The module."""

    def __init__(self, args: Arguments, planted: Planted, losses: Losses) -> None:
        super().__init__()
        self.args, self.losses = args, losses
        net = Model(planted)
        # Not the module itself: there Dynamo of torch 2.13 fails, with and without a monitor.
        self.net = torch.compile(net) if args.compile else net

    def training_step(self, batch: dict[str, Tensor], _number: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(**batch)
        self.losses.add(loss)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _number: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.net(**batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class AfterStep(Callback):
    """What a user does between two steps."""

    def __init__(self, args: Arguments, planted: Planted) -> None:
        self.args, self.planted = args, planted

    def on_train_batch_end(self, *_args: Any, **_keywords: Any) -> None:
        """Take time, if that is planted."""
        self.planted.sleep("between", times_per_step=self.args.micro)


def fit(args: Arguments, environment: Any, **keywords: Any) -> None:
    """Train."""
    lightning.seed_everything(0)
    planted, losses = Planted(args), Losses(args)
    lit = Lit(args, planted, losses)
    workers = {"num_workers": 1, "persistent_workers": True} if args.workers else {}
    loader = DataLoader(data(args), batch_size=BATCH, **workers)
    validation = DataLoader(held_out(args), batch_size=BATCH) if args.validate else None
    callbacks: list[Callback] = [AfterStep(args, planted)]
    if args.checkpoint:
        callbacks.append(ModelCheckpoint(args.out / "checkpoints", every_n_train_steps=EVERY))
    if args.adapter:
        import traceml_ray

        callbacks.append(traceml_ray.TraceMLCallback())
    keywords = {"devices": 2, "strategy": "ddp", "plugins": [environment], **keywords}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=args.steps,
        accumulate_grad_batches=args.micro,
        precision="bf16-mixed" if args.bf16 else "32-true",
        val_check_interval=EVERY * args.micro if args.validate else None,
        enable_checkpointing=args.checkpoint,
        logger=CSVLogger(args.out),
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **keywords,
    )
    trainer.fit(lit, loader, validation)
    losses.write(lit)


if __name__ == "__main__":
    elastic = TorchElasticEnvironment
    fit(arguments(), elastic() if elastic.detect() else LightningEnvironment())
