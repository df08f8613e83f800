"""Train the example's GPT with dsprof's engine, as a DeepSpeed script would: its configuration is a JSON file.

dsprof run --nproc-per-node 2 examples/train_engine.py --deepspeed_config examples/zero2.json
"""

import argparse

import torch
from train_gpt import GPT, StandardLibrary

from dsprof import engine as deepspeed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--context", type=int, default=128)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(256, args.context, args.width, 4, args.layers)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=StandardLibrary(args.context)
    )
    batches = iter(loader)
    while engine.global_steps < args.steps:
        inputs, targets = (part.to(engine.device) for part in next(batches))
        logits = engine(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and engine.was_step_applied() and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps} loss {loss.item():.4f} lr {engine.get_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
