"""The state machines that draw programs of the random tester, and run each when it is complete."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from usage_net import PATH
from usage_program import PIPELINE, WHOLE, Action, Configuration, Program, action, covering


def nothing(program: Program) -> str | None:
    """Runs no program."""
    raise AssertionError("set usage_machines.RUN before a machine runs")


RUN: Callable[[Program], str | None] = nothing
"""Runs a program: what is wrong with it. Set by who runs a machine."""


def configurations(axes: Mapping[str, Sequence[Any]]) -> st.SearchStrategy[Configuration]:
    """Any, half of the time one of those that have every two values together."""
    every = st.tuples(*(st.sampled_from(values) for values in axes.values()))
    return st.sampled_from(covering(axes)) | every.map(lambda values: Configuration(*values))


LAYERS = st.sampled_from(PATH)
FLAG = st.sampled_from(["no", "yes"])
TAGS = st.sampled_from(["a", "b"])


class Usage(RuleBasedStateMachine):
    """What a script may do with any engine."""

    def __init__(self) -> None:
        super().__init__()
        self.configuration: Configuration | None = None
        self.actions: list[Action] = []
        self.saved: set[str] = set()

    def do(self, name: str, **settings: object) -> None:
        self.actions.append(action(name, **settings))

    def teardown(self) -> None:
        """Run the program, and raise AssertionError with what is wrong with it."""
        if sys.exc_info()[0] is not None or self.configuration is None:
            return  # hypothesis draws no further
        self.finish()
        program = Program(self.configuration, tuple(self.actions))
        fault = RUN(program)
        assert fault is None, f"{fault}\n\nThe program:\n{program}"

    def finish(self) -> None:
        """Train, so that all that was done shows."""
        raise NotImplementedError

    @rule(by=st.sampled_from(["no_grad", "inference_mode"]))
    def evaluate(self, by: str) -> None:
        self.do("evaluate", by=by)

    @rule(of=st.sampled_from(["engine", "module", "optimizer"]))
    def zero_grad(self, of: str) -> None:
        self.do("zero_grad", of=of)

    @rule(to=st.sampled_from(["train", "eval"]))
    def mode(self, to: str) -> None:
        self.do("mode", to=to)

    @rule(tag=TAGS)
    def save_checkpoint(self, tag: str) -> None:
        self.save(tag)

    def save(self, tag: str) -> None:
        self.do("save", **{"as": tag})
        self.saved.add(tag)

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), what=st.sampled_from(["all", "module", "without_optimizer"]))
    def load(self, data: st.DataObject, what: str) -> None:
        tag = data.draw(st.sampled_from(sorted(self.saved)))
        self.do("load", what=what, **{"as": tag})

    @rule(of=st.sampled_from(["first", "conv", "frozen"]), to=FLAG)
    def requires_grad(self, of: str, to: str) -> None:
        self.do("requires_grad", of=of, to=to)

    @precondition(lambda self: self.can_add_group())
    @rule()
    def add_group(self) -> None:
        self.do("add_group")

    def can_add_group(self) -> bool:
        """Once, and a second time, which is an error; of a pipeline that is one on some ranks alone."""
        assert self.configuration is not None
        return self.actions.count(action("add_group")) < (1 if self.configuration.pipeline else 2)

    @rule(to=st.sampled_from([2.0**-2, 2.0**-4]))
    def rate(self, to: float) -> None:
        self.do("rate", to=to)

    @rule(to=st.sampled_from([1, 2, 3]))
    def set_accumulate(self, to: int) -> None:
        self.do("set_accumulate", to=to)

    @rule(to=st.sampled_from([1, 2, 4]))
    def set_samples(self, to: int) -> None:
        self.do("set_samples", to=to)

    @rule(to=st.sampled_from(["float64", "half", "engine_float64", "channels_last", "contiguous_format"]))
    def move(self, to: str) -> None:
        self.do("move", to=to)

    @rule()
    def reload(self) -> None:
        self.do("reload")

    @rule()
    def read(self) -> None:
        self.do("read")


class WholeUsage(Usage):
    """With a model that runs as one."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = 0

    @initialize(configuration=configurations(WHOLE))
    def make(self, configuration: Configuration) -> None:
        self.configuration = configuration

    def finish(self) -> None:
        self.train_plainly(3)
        self.do("evaluate")

    @rule(times=st.integers(1, 3), side=FLAG, before_step=st.sampled_from(["", "forward", "evaluate", "read", "save"]))
    def train(self, times: int, side: str, before_step: str) -> None:
        for _ in range(times):
            self.do("forward", side=side)
            self.do("backward")
            if before_step == "save":
                self.save("a")
            elif before_step:
                self.do(before_step)
            self.do("step")
        self.losses += times * (before_step == "forward")

    @rule(side=FLAG)
    def forward(self, side: str) -> None:
        self.do("forward", side=side)
        self.losses += 1

    @precondition(lambda self: self.losses)
    @rule(retain=FLAG, no_sync=FLAG)
    def backward(self, retain: str, no_sync: str) -> None:
        self.do("backward", retain=retain, no_sync=no_sync)
        self.losses -= retain == "no"

    @rule()
    def step(self) -> None:
        self.do("step")

    @precondition(lambda self: self.losses)
    @rule()
    def discard(self) -> None:
        self.do("discard")
        self.losses = 0

    @rule()
    def train_batch(self) -> None:
        self.do("train_batch")

    @rule()
    def train_batch_without_enough_data(self) -> None:
        self.do("train_batch", data="short")

    @rule(layer=LAYERS, clears=FLAG, then=st.integers(0, 3))
    def forward_fails(self, layer: str, clears: str, then: int) -> None:
        self.do("forward", fails=layer)
        self.go_on(clears, then)

    @rule(layer=LAYERS, clears=FLAG, then=st.integers(0, 3))
    def backward_fails(self, layer: str, clears: str, then: int) -> None:
        self.do("forward")
        self.do("backward", fails=layer)
        self.go_on(clears, then)

    def go_on(self, clears: str, then: int) -> None:
        """After an error that the script has caught: clear the gradients perhaps, and train."""
        if clears == "yes":
            self.do("zero_grad")
        if then:
            self.train_plainly(then)

    def train_plainly(self, times: int) -> None:
        for _ in range(times):
            self.do("forward")
            self.do("backward")
            self.do("step")

    @rule(at=st.integers(1, 4))
    def step_fails(self, at: int) -> None:
        self.do("forward")
        self.do("backward")
        self.do("step", fails=at)

    @rule(of=st.sampled_from(["second", "head"]))
    def negate(self, of: str) -> None:
        self.do("negate", of=of)


class PipelineUsage(Usage):
    """With a pipeline of two stages."""

    @initialize(configuration=configurations(PIPELINE))
    def make(self, configuration: Configuration) -> None:
        self.configuration = configuration

    def finish(self) -> None:
        self.do("train_batch")
        self.do("evaluate")

    @rule(times=st.integers(1, 3))
    def train_batch(self, times: int) -> None:
        for _ in range(times):
            self.do("train_batch")

    @rule()
    def train_batch_without_enough_data(self) -> None:
        self.do("train_batch", data="short")

    @rule(when=st.sampled_from(["forward", "backward"]), layer=LAYERS, replica=st.sampled_from(["both", "0"]))
    def train_batch_fails(self, when: str, layer: str, replica: str) -> None:
        self.do("train_batch", **{when: layer}, **({"replica": replica} if replica == "0" else {}))

    @rule()
    def optimizer_fails(self) -> None:
        self.do("train_batch", optimizer=1)

    @rule()
    def loss_fails(self) -> None:
        self.do("train_batch", loss="loss")

    @rule(name=st.sampled_from(["forward", "backward", "step"]))
    def not_of_pipelines(self, name: str) -> None:
        self.do(name)
