"""torchtitan's chunked loss over FSDP2: a backward for each chunk of the sequence, then that of the model."""

import torch
import torch.distributed as dist
from common import BATCH, EVERY, LENGTH, Losses, Model, Planted, arguments, data
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchtitan.components.loss import ChunkedLossWrapper


class Decoder(Model):
    """Gives the hidden states: the loss calls the head itself."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return (batch, time, width)."""
        hidden: torch.Tensor = self.embed(input_ids)
        return hidden + self.inner(hidden)


def main() -> None:
    """Train."""
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    planted, losses = Planted(args), Losses(args)
    model = Decoder(planted)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    chunked = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=8))
    chunked.set_lm_head(model.head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = data(args)
    loader = DataLoader(
        tokens, BATCH, sampler=DistributedSampler(tokens), num_workers=1 if args.workers else 0
    )
    batches = iter(loader)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for _ in range(args.micro):
            batch = next(batches)
            valid = torch.tensor(BATCH * LENGTH * dist.get_world_size() * args.micro)
            loss, _ = chunked(model(batch["input_ids"]), batch["labels"], valid)
            loss.backward()
            losses.add(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        planted.sleep("between")
        if args.checkpoint and step % EVERY == 0:
            torch.save(model.state_dict(), args.out / f"{dist.get_rank()}.pt")
    losses.write(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
