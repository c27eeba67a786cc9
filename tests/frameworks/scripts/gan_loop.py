"""A GAN as torch's tutorial has it: of each batch the discriminator's step, then the generator's."""

import torch
import torch.distributed as dist
from common import BATCH, EVERY, LENGTH, VOCABULARY, Arguments, Losses, Planted, arguments, data, held_out
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

NOISE, WIDTH = 8, 32


def main() -> None:
    """Train; torch may hang where two models of DDP live longer than their process group."""
    args = arguments()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


def train(args: Arguments) -> None:
    """Train both networks."""
    torch.manual_seed(0)
    planted, losses = Planted(args), Losses(args)
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, LENGTH), nn.Tanh())
    judge = nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    planted.in_forward(generator)
    makes, judges = DistributedDataParallel(generator), DistributedDataParallel(judge)
    optimizers = [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (makes, judges)]
    tokens, criterion = data(args), nn.BCEWithLogitsLoss()
    loader = DataLoader(
        tokens, BATCH, sampler=DistributedSampler(tokens), num_workers=1 if args.workers else 0
    )
    validation = DataLoader(held_out(args), BATCH)
    for number, batch in enumerate(loader):
        real = batch["input_ids"].float() / VOCABULARY * 2 - 1
        yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        judges.zero_grad()
        with judges.no_sync():
            real_loss = criterion(judges(real), yes)
            real_loss.backward()
        fake = makes(torch.randn(len(real), NOISE))
        fake_loss = criterion(judges(fake.detach()), no)
        fake_loss.backward()
        optimizers[1].step()
        makes.zero_grad()
        judge.requires_grad_(False)
        loss = criterion(judge(fake), yes)
        loss.backward()
        judge.requires_grad_(True)
        optimizers[0].step()
        losses.add(real_loss + fake_loss + loss)
        planted.sleep("between")
        if args.validate and (number + 1) % EVERY == 0:
            with torch.no_grad():
                for held in validation:
                    judge(held["input_ids"].float())
    losses.write(nn.ModuleList([generator, judge]))


if __name__ == "__main__":
    main()
