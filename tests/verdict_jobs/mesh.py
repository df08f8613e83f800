"""A mesh of parallelisms: torch's own examples of tensor parallelism, and the usual ones by hand, on sleeping layers.

`--slow-rank` takes longer for its own work, whatever it shares with the others. units-tp: many small units in the
data-parallel dimension, and an all-reduce of the tensor-parallel one after every fifth.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Layer, Log, arguments, finish, start, work
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """Two layers of which tensor parallelism makes a column and a row, and one that sleeps."""

    def __init__(self, width, forward_ms):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.forward_ms = forward_ms

    def forward(self, x):
        return self.down(Sleep.apply(F.relu(self.up(x)), self.forward_ms))


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_ms):
        ctx.forward_ms = forward_ms
        work(forward_ms)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        work(2 * ctx.forward_ms)
        return gradient, None


class Model(nn.Module):
    def __init__(self, args, forward_ms):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(args.width, forward_ms / args.blocks) for _ in range(args.blocks)))

    def forward(self, x):
        return self.blocks(x)


def in_parallel(model, mesh, sequence):
    """torch's plan for the two layers of a block: tensor-parallel, or sequence-parallel as in its examples."""
    up = ColwiseParallel(input_layouts=Shard(0)) if sequence else ColwiseParallel()
    down = RowwiseParallel(output_layouts=Shard(0)) if sequence else RowwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": up, "down": down})
    return model


class Reduced(torch.autograd.Function):
    """What a row-parallel layer ends with, by hand: summed over the group in forward, and in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y / dist.get_world_size(group)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient / dist.get_world_size(ctx.group), None


class Exchanged(torch.autograd.Function):
    """Rows to the ranks that own them, [sum(counts), width], and their gradients back."""

    @staticmethod
    def forward(ctx, x, group, send, receive):
        ctx.group, ctx.send, ctx.receive = group, send, receive
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        back = gradient.new_empty((sum(ctx.send), *gradient.shape[1:]))
        dist.all_to_all_single(back, gradient.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return back, None, None, None


class SmallUnits(nn.Module):
    """Many small layers, and an all-reduce of the tensor-parallel group after every few."""

    def __init__(self, args, forward_ms, group):
        super().__init__()
        self.layers = nn.ModuleList(Layer(args.width, forward_ms / args.units) for _ in range(args.units))
        self.every, self.group = args.every, group

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if (i + 1) % self.every == 0:
                x = Reduced.apply(x, self.group)
        return x


class Experts(nn.Module):
    """A dense layer and one expert a rank: tokens go to their experts and come back."""

    def __init__(self, args, forward_ms, group):
        super().__init__()
        self.dense, self.expert = nn.Linear(args.width, args.width), nn.Linear(args.width, args.width)
        self.group, self.args, self.forward_ms = group, args, forward_ms

    def shares(self, tokens):
        """How many tokens each rank of the group gets from each: the first gets more if they are skewed."""
        size = dist.get_world_size(self.group)
        counts = [tokens // size] * size
        moved = int(self.args.skew * (tokens // size))
        for other in range(1, size):
            counts[0] += moved
            counts[other] -= moved
        return counts

    def forward(self, x):
        x = Sleep.apply(torch.tanh(self.dense(x)), self.forward_ms / 2)
        send = self.shares(len(x))
        size, mine = dist.get_world_size(self.group), dist.get_rank(self.group)
        receive = [send[mine]] * size
        y = Exchanged.apply(x, self.group, send, receive)
        share = sum(receive) / len(x)
        y = Sleep.apply(torch.tanh(self.expert(y)), self.forward_ms / 2 * share)
        return Exchanged.apply(y, self.group, receive, send)


class Ulysses(nn.Module):
    """Attention over a sequence that the ranks of a group share: heads for positions, and back."""

    def __init__(self, args, forward_ms, group):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(args.width, args.width) for _ in range(args.blocks))
        self.group, self.forward_ms = group, forward_ms / args.blocks

    def forward(self, x):
        even = [len(x) // dist.get_world_size(self.group)] * dist.get_world_size(self.group)
        for block in self.blocks:
            y = Exchanged.apply(block(x), self.group, even, even)
            y = Sleep.apply(torch.tanh(y), self.forward_ms)
            x = x + Exchanged.apply(y, self.group, even, even)
        return x


def reduce_gradients(parameters, group, one_by_one):
    """Their mean over a group, together or one at a time, as scripts do it by hand."""
    gradients = [parameter.grad for parameter in parameters]
    whole = gradients if one_by_one else [torch.cat([gradient.flatten() for gradient in gradients])]
    for tensor in whole:
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size(group)
    if not one_by_one:
        for gradient, mean in zip(gradients, whole[0].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def main():
    parser = arguments(__doc__, steps=30)
    parser.add_argument("kind", choices=["tp", "sp", "fsdp-tp", "units-tp", "hsdp", "pp-dp", "dp-ep", "ulysses"])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--units", type=int, default=30)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=20, help="of one step")
    parser.add_argument("--skew", type=float, default=0.0, help="of tokens that go to the first expert instead")
    parser.add_argument("--one-by-one", action="store_true", help="gradients that are reduced by hand")
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=1.5)
    args = parser.parse_args()
    rank, ranks = start(args.seed)
    log = Log(args)
    forward_ms = args.forward_ms * (args.slow_by if rank == args.slow_rank else 1.0)

    shape = {"tp": (ranks,), "sp": (ranks,)}.get(args.kind, (2, ranks // 2))
    names = {
        "fsdp-tp": ("dp", "tp"), "units-tp": ("dp", "tp"), "hsdp": ("replicate", "shard"), "pp-dp": ("pp", "dp"),
        "dp-ep": ("dp", "ep"), "ulysses": ("dp", "cp"),
    }.get(args.kind)  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    replica = 0 if args.kind in ("tp", "sp") else mesh.get_local_rank(1 if args.kind == "pp-dp" else 0)
    own_batch = rank if args.kind in ("sp", "hsdp", "dp-ep", "ulysses") else replica
    reduced = None
    schedule = None
    if args.kind in ("tp", "sp"):
        model = in_parallel(Model(args, forward_ms), mesh, args.kind == "sp")
    elif args.kind == "fsdp-tp":
        model = in_parallel(Model(args, forward_ms), mesh["tp"], sequence=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif args.kind == "units-tp":
        model = SmallUnits(args, forward_ms, mesh["tp"].get_group())
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif args.kind == "hsdp":
        model = Model(args, forward_ms)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif args.kind == "pp-dp":
        stages = mesh["pp"].size()
        part = nn.Sequential(*(Layer(args.width, forward_ms / args.micro_batches / 2) for _ in range(2)))
        stage = PipelineStage(
            part, mesh["pp"].get_local_rank(), stages, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=F.mse_loss)
        model, reduced = stage.submod, [(list(stage.submod.parameters()), mesh["dp"].get_group())]
    elif args.kind == "dp-ep":
        model = Experts(args, forward_ms, mesh["ep"].get_group())
        reduced = [(list(model.dense.parameters()), dist.group.WORLD)]
        reduced.append((list(model.expert.parameters()), mesh["dp"].get_group()))
    else:
        model = Ulysses(args, forward_ms, mesh["cp"].get_group())
        reduced = [(list(model.parameters()), dist.group.WORLD)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = torch.Generator().manual_seed(args.seed + own_batch)
    for _ in range(args.steps):
        if schedule is not None:
            inputs = torch.randn(args.micro_batches * args.batch_size, args.width, generator=batches)
            losses = []
            if stage.is_first:
                schedule.step(inputs)
            elif stage.is_last:
                schedule.step(target=inputs.flip(1), losses=losses)
            else:
                schedule.step()
            loss = torch.stack(losses).mean() if losses else torch.zeros(())
        else:
            inputs = torch.randn(args.batch_size, args.width, generator=batches)
            output = model(inputs)
            loss = (output**2).mean()
            loss.backward()
        for parameters, group in reduced or ():
            reduce_gradients(parameters, group, args.one_by_one)
        optimizer.step()
        optimizer.zero_grad()
        log.step(float(loss))
    finish(log)


if __name__ == "__main__":
    main()
