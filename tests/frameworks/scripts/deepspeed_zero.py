"""DeepSpeed's engine: forward, backward and step, with ZeRO 0, 1 or 2."""

import deepspeed
import torch
from common import BATCH, EVERY, Losses, Model, Planted, arguments, data
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train."""
    args = arguments()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first: a minute
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    planted, losses = Planted(args), Losses(args)
    net = Model(planted)
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": args.micro,
            "zero_optimization": {"stage": args.zero},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": args.bf16},
            "steps_per_print": 10**9,
        },
    )
    tokens = data(args)
    loader = DataLoader(
        tokens, BATCH, sampler=DistributedSampler(tokens), num_workers=1 if args.workers else 0
    )
    for number, batch in enumerate(loader, 1):
        loss = engine(**batch)
        losses.add(loss)
        engine.backward(loss)
        engine.step()
        if number % args.micro:
            continue
        planted.sleep("between")
        if args.checkpoint and number // args.micro % EVERY == 0:
            engine.save_checkpoint(str(args.out / "checkpoint"))
    losses.write(net)


if __name__ == "__main__":
    main()
