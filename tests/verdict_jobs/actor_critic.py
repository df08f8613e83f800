"""An actor and a critic in the manner of torch's reinforcement learning example: the world answers between forwards."""

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, work
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self, forward_ms):
        super().__init__()
        self.body = mlp(16, 1, forward_ms)
        self.action_head, self.value_head = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, state):
        x = self.body(state)
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


class World:
    """Takes its time, and pays for one of the two actions."""

    def __init__(self, seed, step_ms):
        self.draw = torch.Generator().manual_seed(seed)
        self.step_ms = step_ms

    def reset(self):
        return torch.randn(16, generator=self.draw)

    def step(self, action):
        work(self.step_ms, "world")
        return self.reset(), float(action)


def finish_episode(optimizer, kept, rewards):
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    losses = []
    for (log_probability, value), total in zip(kept, torch.tensor(returns), strict=True):
        advantage = total - value.item()
        losses.append(-log_probability * advantage + F.smooth_l1_loss(value, total.reshape(1)))
    optimizer.zero_grad()
    loss = torch.stack(losses).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    parser = arguments(__doc__, steps=45)
    parser.add_argument("--episode", type=int, default=12, help="steps of an episode")
    parser.add_argument("--forward-ms", type=float, default=1.0)
    parser.add_argument("--world-ms", type=float, default=3.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    log = Log(args)

    model, world = Policy(args.forward_ms), World(args.seed, args.world_ms)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(args.steps):
        state = world.reset()
        kept, rewards = [], []
        for _ in range(args.episode):
            probabilities, value = model(state)
            choice = Categorical(probabilities)
            action = choice.sample()
            kept.append((choice.log_prob(action), value))
            state, reward = world.step(action.item())
            rewards.append(reward)
        log.step(finish_episode(optimizer, kept, rewards))
    finish(log)


if __name__ == "__main__":
    main()
