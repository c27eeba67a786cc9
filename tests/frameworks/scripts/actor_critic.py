"""Actor and critic of offline reinforcement learning: of each batch the critic's step, then the actor's."""

import torch
import torch.distributed as dist
from common import BATCH, EVERY, LENGTH, VOCABULARY, Arguments, Losses, Planted, arguments, data
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ACTIONS, WIDTH = 4, 32


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


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
    actor, critic = network(LENGTH // 2, ACTIONS), network(LENGTH // 2 + ACTIONS, 1)
    planted.in_forward(actor)
    acts, rates = DistributedDataParallel(actor), DistributedDataParallel(critic)
    of_actor, of_critic = (torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (acts, rates))
    tokens = data(args)
    loader = DataLoader(
        tokens, BATCH, sampler=DistributedSampler(tokens), num_workers=1 if args.workers else 0
    )
    for number, batch in enumerate(loader):
        numbers = batch["input_ids"].float() / VOCABULARY
        state, after = numbers.chunk(2, dim=1)
        taken, reward = numbers[:, :ACTIONS], numbers[:, -1:]
        with torch.no_grad():
            target = reward + 0.9 * critic(torch.cat([after, actor(after).softmax(1)], 1))
        value = rates(torch.cat([state, taken], 1))
        critic_loss = nn.functional.mse_loss(value, target)
        of_critic.zero_grad()
        critic_loss.backward()
        of_critic.step()
        critic.requires_grad_(False)
        policy = acts(state).softmax(1)
        actor_loss = -critic(torch.cat([state, policy], 1)).mean()
        of_actor.zero_grad()
        actor_loss.backward()
        of_actor.step()
        critic.requires_grad_(True)
        losses.add(critic_loss + actor_loss)
        planted.sleep("between")
        if args.checkpoint and (number + 1) % EVERY == 0 and dist.get_rank() == 0:
            torch.save(actor.state_dict(), args.out / "last.pt")
    losses.write(nn.ModuleList([actor, critic]))


if __name__ == "__main__":
    main()
