"""Trials of a pipeline: each stage on what the one before returned, wherever that is.

Sent from one stage to the next is the form of it (tree.form_of), and of its tensors their shapes and types; numbers
that are whole (token ids, masks, positions) are sent as they are, and others are made up anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.consensus import gather_objects
from ..pipe.module import PipelineModule
from ..tree import filled, form_of
from .dependence import Flow
from .example_inputs import Inputs, guesses, made_up
from .tracer import Trial, brief, observe

_LARGE: Final = 1 << 20
"""Elements of a tensor at most that is sent as it is."""


@dataclass(frozen=True)
class _SentActivation:
    """A tensor that a stage returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fixed: bool
    """Whether in training no gradient will flow to it: it is computed of buffers, say."""
    value: Tensor | None

    def made(self) -> Tensor:
        if self.value is not None:
            return self.value
        return made_up(*self.shape).to(self.dtype) if self.dtype.is_floating_point else torch.ones(
            self.shape, dtype=self.dtype
        )  # fmt: skip


@dataclass(frozen=True)
class _StageOutput:
    """What a stage returned."""

    form: str
    tensors: tuple[_SentActivation, ...]

    def inputs(self) -> Inputs:
        """Of the stage after it."""
        fixed = frozenset(at for at, sent in enumerate(self.tensors) if sent.fixed)
        return Inputs((filled(self.form, [sent.made() for sent in self.tensors]),), fixed=fixed)


def try_stages(model: PipelineModule, tokens: int, example: Any, everyone: Comm | None = None) -> list[Trial] | str:
    """Try the stages one after the other, on all ranks of `everyone`, which have them all; without it, those here.

    The first is tried on `example`, its layer's one argument; if that is None, on what is made up, as is a stage that
    what it is passed does not fit. Returns the trials of the stages here, or why one of them, or one before, failed.
    """
    trials: list[Trial] = []
    failed = ""
    output: _StageOutput | str | None = None
    for stage in range(model.placement.last_stage + 1):
        mine: _StageOutput | str | None = None
        if stage in model.placement.stages:
            choices: list[Inputs] = []
            if isinstance(output, _StageOutput):
                choices = [output.inputs()]
            elif stage == 0 and example is not None:
                choices = _examples(example)
            guessing = example is None or (stage > 0 and output is None)
            made = guesses(model, tokens) if guessing else ()
            found = output if isinstance(output, str) and not guessing else _first(model, stage, choices, made)
            if isinstance(found, Trial):
                trials.append(found)
                mine = _returned(model, stage, found)
            else:
                mine = found
                failed = failed or found
        output = mine if everyone is None else next((x for x in gather_objects(mine, everyone) if x is not None), None)
    return failed or trials


def _examples(example: Any) -> list[Inputs]:
    """What `example` may mean: a tuple of one may be that of the arguments, as other models take them."""
    if isinstance(example, Inputs):
        return [example]
    alone = [Inputs((example[0],))] if isinstance(example, tuple | list) and len(example) == 1 else []
    return [*alone, Inputs((example,))]


def _first(model: PipelineModule, stage: int, choices: Sequence[Inputs], made: Iterable[Inputs]) -> Trial | str:
    """A trial on the first that the stage takes, or why it does not take the first."""
    why = ""
    for at, inputs in enumerate([*choices, *made]):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of inputs that are not the right ones
                return observe("", model, Inputs(inputs.args, {**inputs.kwargs, "stage": stage}, inputs.fixed))
        except Exception as error:
            given = "what is made up"
            if at < len(choices):
                given = f"what stage {stage - 1} returns" if stage else "the example"
            why = why or f"stage {stage} of the pipeline does not take {given}: {brief(error)}"
    return why or f"nothing could be made up for stage {stage} of the pipeline"


def _returned(model: PipelineModule, stage: int, trial: Trial) -> _StageOutput | str:
    try:
        made, tensors = form_of(trial.returned)
    except TypeError as error:
        return f"{model.end_of(stage)} returns {error}"
    flow = Flow(trial)
    sent = []
    for x in tensors:
        fixed = x.is_floating_point() and all(source.kind == "buffer" for source in flow.sources(x))
        as_is = not x.is_floating_point() and x.numel() <= _LARGE
        sent.append(_SentActivation(tuple(x.shape), x.dtype, fixed, x.detach().clone() if as_is else None))
    return _StageOutput(made, tuple(sent))
