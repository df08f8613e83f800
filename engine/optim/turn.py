"""When an optimizer may step."""

from __future__ import annotations

from torch.optim import Optimizer


class Turn:
    """Lets an optimizer step while the engine has it do so, and not when the script calls it: its masters have no
    gradients then, and new weights would reach no rank."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._now = False
        self._handle = optimizer.register_step_pre_hook(self._check)

    def __enter__(self) -> None:
        self._now = True

    def __exit__(self, *_: object) -> None:
        self._now = False

    def end(self) -> None:
        """The optimizer is the script's."""
        self._handle.remove()

    def _check(self, *_: object) -> None:
        if not self._now:
            raise RuntimeError(
                "optimizer.step: the engine steps the optimizer: write engine.backward(loss) and engine.step() in the "
                "place of loss.backward(), optimizer.step() and optimizer.zero_grad()"
            )
