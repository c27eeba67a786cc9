"""Ray Train with a loop of one's own, fed by Ray Data's iter_torch_batches."""

import driven
import torch
from common import EVERY, Arguments, Losses, Model, Planted
from ray.train.torch import prepare_model


def train_loop(args: Arguments) -> None:
    """Train on one worker."""
    torch.manual_seed(0)
    planted, losses = Planted(args), Losses(args)
    model = prepare_model(Model(planted))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(driven.batches("train", args), 1):
        loss = model(**batch)
        losses.add(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        planted.sleep("between")
        if args.validate and step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                for held_out in driven.batches("validation", args):
                    model(**held_out)
            model.train()
    losses.write(model)


if __name__ == "__main__":
    driven.main(train_loop)
