"""timm's models, optimizer, scheduler and weight averaging, in the loop of its train.py."""

import importlib.util
import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from common import BATCH, EVERY, Losses, Planted, arguments, data
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# timm imports torchvision for images, of which there are none here. So it is kept in a folder of its own,
# where its absence disturbs no other framework.
sys.path.append(f"{sys.prefix}/timm")
if importlib.util.find_spec("torchvision") is None:
    modules = ("transforms", "transforms.functional", "datasets", "datasets.folder", "ops", "ops.misc")
    modules += ("models", "models.feature_extraction", "utils")
    sys.modules |= {"torchvision": MagicMock(), **{f"torchvision.{name}": MagicMock() for name in modules}}
import timm.optim
import timm.scheduler
import timm.utils


def main() -> None:
    """Train."""
    args = arguments()
    dist.init_process_group("gloo")
    timm.utils.random_seed(0, 0)
    planted, losses = Planted(args), Losses(args)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    net = timm.create_model("vit_tiny_patch16_224", **sizes)
    planted.in_forward(net.blocks[0])
    optimizer = timm.optim.create_optimizer_v2(net, opt="adamw", lr=1e-3)
    scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=args.steps)
    average = timm.utils.ModelEmaV3(net)
    model = DistributedDataParallel(torch.compile(net) if args.compile else net)
    tokens = data(args)
    loader = DataLoader(
        tokens, BATCH, sampler=DistributedSampler(tokens), num_workers=1 if args.workers else 0
    )
    criterion = torch.nn.CrossEntropyLoss()
    for number, batch in enumerate(loader):
        seeded = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
        images, classes = torch.rand(BATCH, 3, 32, 32, generator=seeded), batch["labels"][:, 0] % 10
        last = (number + 1) % args.micro == 0
        model.require_backward_grad_sync = last
        with torch.autocast("cpu", enabled=args.bf16):
            loss = criterion(model(images), classes)
        losses.add(loss)
        (loss / args.micro).backward()
        if not last:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(net)
        step = (number + 1) // args.micro
        scheduler.step(step)
        planted.sleep("between")
        if args.validate and step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                timm.utils.reduce_tensor(criterion(model(images), classes), 2)
            model.train()
        if args.checkpoint and step % EVERY == 0 and dist.get_rank() == 0:
            torch.save(net.state_dict(), args.out / "last.pt")
    losses.write(net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
