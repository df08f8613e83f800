"""A GAN: every iteration trains the critic so many times, then the generator once."""

import torch
from common import Log, arguments, finish, mlp, start
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = arguments(__doc__, steps=50)
    parser.add_argument("--critic-steps", type=int, default=1)
    parser.add_argument("--forward-ms", type=float, default=3.0, help="of either network")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--through-ddp", action="store_true", help="the generator is trained through the critic's DDP")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.ddp:
        start(args.seed)
    log = Log(args)

    generator, critic = mlp(16, 2, args.forward_ms), mlp(16, 2, args.forward_ms)
    judge = critic  # of the generator: DDP has no gradients to reduce there
    if args.ddp:
        generator, critic = DistributedDataParallel(generator), DistributedDataParallel(critic)
    if args.through_ddp:
        judge = critic
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    noise = torch.Generator().manual_seed(args.seed + log.rank)
    for _ in range(args.steps):
        for _ in range(args.critic_steps):
            real = torch.randn(8, 16, generator=noise) + 1
            with torch.no_grad():
                fake = generator(torch.randn(8, 16, generator=noise))
            judged = critic(torch.cat([fake, real]))
            critic_loss = judged[:8].mean() - judged[8:].mean()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
        judge.requires_grad_(args.through_ddp)  # a DDP waits for the gradients of all that it was made with
        generator_loss = -judge(generator(torch.randn(8, 16, generator=noise))).mean()
        judge.requires_grad_(True)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        log.step(critic_loss.item() + generator_loss.item())
    finish(log)


if __name__ == "__main__":
    main()
