"""A loop over Accelerate, as its documentation has it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import BATCH, EVERY, Losses, Model, Planted, arguments, data, held_out
from torch.utils.data import DataLoader


def main() -> None:
    """Train."""
    args = arguments()
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.micro,
        mixed_precision="bf16" if args.bf16 else "no",
        dynamo_backend="inductor" if args.compile else None,
    )
    planted, losses = Planted(args), Losses(args)
    model = Model(planted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data(args), batch_size=BATCH, num_workers=1 if args.workers else 0)
    validation = DataLoader(held_out(args), batch_size=BATCH)
    model, optimizer, loader, validation = accelerator.prepare(model, optimizer, loader, validation)
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)
            losses.add(loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        planted.sleep("between")
        if args.validate and step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                for batch in validation:
                    accelerator.gather_for_metrics(model(**batch))
            model.train()
        if args.checkpoint and step % EVERY == 0:
            accelerator.save_state(str(args.out / "state"))
    losses.write(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
