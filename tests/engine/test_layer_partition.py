"""How layers are divided among stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsprof.engine.partition import balance, partition, read_costs

GPT = ["Embedding", "GPTBlock", "GPTBlock", "GPTBlock", "GPTBlock", "LayerNorm", "Linear"]


def brute_force(weights: Sequence[float], parts: int) -> list[int]:
    """The division of all that is best by the rules of engine/partition.py's docstring."""

    def merit(bounds: tuple[int, ...]) -> tuple[Fraction, Fraction, list[int]]:
        sums = [sum(map(Fraction, weights[start:stop]), Fraction()) for start, stop in pairwise(bounds)]
        return max(sums), sum((each * each for each in sums), Fraction()), [-bound for bound in bounds]

    cuts = combinations(range(1, len(weights)), parts - 1)
    best: tuple[int, ...] = min(((0, *inner, len(weights)) for inner in cuts), key=merit)
    return list(best)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.lists(st.integers(0, 6), min_size=1, max_size=9),
        st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=9),
    ),
    st.integers(1, 9),
)
def test_the_division_is_the_best_there_is(weights: list[float], parts: int) -> None:
    parts = min(parts, len(weights))
    assert balance(weights, parts) == brute_force(weights, parts)


@pytest.mark.parametrize(
    ("layers", "parts", "bounds"),
    [(8, 4, [0, 2, 4, 6, 8]), (10, 4, [0, 3, 6, 8, 10]), (7, 2, [0, 4, 7]), (3, 3, [0, 1, 2, 3]), (5, 1, [0, 5])],
)
def test_uniform_gives_the_first_stages_one_layer_more(layers: int, parts: int, bounds: list[int]) -> None:
    assert partition("uniform", parts, ["Linear"] * layers) == bounds


def test_parameter_counts_are_balanced() -> None:
    # 50 | 10 10 10 10 2 | 40: as good as with the 2 in the last part, and with the later cut.
    counts = [50, 10, 10, 10, 10, 2, 40]
    assert partition("parameters", 3, GPT, parameters=counts) == [0, 1, 6, 7]
    assert partition("parameters", 2, GPT, parameters=counts) == [0, 3, 7]  # 70 | 62


def test_layers_without_parameters_stay_with_the_one_before() -> None:
    classes = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert partition("parameters", 3, classes, parameters=[6, 0, 6, 0, 6]) == [0, 2, 4, 5]
    assert partition("parameters", 2, classes, parameters=[0, 0, 6, 0, 0]) == [0, 4, 5]


def test_without_any_parameters_every_layer_weighs_the_same() -> None:
    assert partition("parameters", 2, ["ReLU"] * 4, parameters=[0, 0, 0, 0]) == [0, 2, 4]


@pytest.mark.parametrize("regex", ["GPTBlock", "gptblock", "block$", "^GPT", "block|nothing"])
def test_type_counts_the_layers_whose_class_matches(regex: str) -> None:
    assert partition(f"type:{regex}", 2, GPT) == [0, 3, 7]
    assert partition(f"Type:{regex}", 4, GPT) == [0, 2, 3, 4, 7]


def test_measured_costs_are_balanced() -> None:
    costs = [0.1, 0.2, 0.1, 0.1, 0.2, 0.1]
    assert partition("measured", 2, ["Linear"] * 6, costs=costs) == [0, 3, 6]
    assert partition("measured", 3, ["Linear"] * 4, costs=[0.5, 1e-9, 0.25, 0.25]) == [0, 1, 3, 4]


@pytest.mark.parametrize("method", ["Uniform", "PARAMETERS", "Measured"])
def test_methods_may_be_in_capitals(method: str) -> None:
    assert partition(method, 2, ["Linear"] * 4, parameters=[1, 1, 1, 1], costs=[1, 1, 1, 1]) == [0, 2, 4]


def test_explicit_boundaries() -> None:
    assert partition([0, 1, 6, 7], 3, GPT) == [0, 1, 6, 7]
    assert partition((0, 7), 1, GPT) == [0, 7]


@pytest.mark.parametrize(
    "bounds", [[1, 6], [0, 6], [0, 1, 6], [1, 1, 6, 7], [0, 6, 6, 7], [0, 6, 1, 7], [0, 1, 2, 7, 7], [], ["0", 1, 6, 7]]
)
def test_wrong_boundaries_are_refused(bounds: list[Any]) -> None:
    with pytest.raises(ValueError, match="write 4 rising numbers, the first 0 and the last 7"):
        partition(bounds, 3, GPT)


def message(method: str | Sequence[int], parts: int, **arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        partition(method, parts, GPT, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:Block", "measured", [0, 7]])
def test_more_stages_than_layers_are_refused(method: str | list[int]) -> None:
    assert message(method, 8) == "8 stages for 7 layers; each needs one, so write at most 7 stages"


def test_zero_stages_are_refused() -> None:
    assert message("uniform", 0) == "a pipeline of 0 stages; it needs at least 1"


def test_a_regex_that_matches_too_few_layers_is_refused() -> None:
    classes = "the classes of layers are Embedding (1), GPTBlock (4), LayerNorm (1), Linear (1)"
    assert message("type:Llama", 2) == f'partition method "type:Llama": matches 0 layers for 2 stages; {classes}'
    assert message("type:gpt", 5) == f'partition method "type:gpt": matches 4 layers for 5 stages; {classes}'


def test_an_invalid_regex_is_refused() -> None:
    assert 'partition method "type:(": not a regular expression: missing )' in message("type:(", 2)


def test_unknown_methods_are_refused() -> None:
    known = "write one of parameters, uniform, type:REGEX, measured, or a list of 3 boundaries"
    assert message("parameter", 2) == f"there is no partition method \"parameter\"; {known}; did you mean 'parameters'?"
    assert message("type:", 2).endswith(f"{known}; did you mean 'type:REGEX'?")
    assert message("best", 2) == f'there is no partition method "best"; {known}'
    assert message("profile", 2) == 'partition method "profile": DeepSpeed has only the name; write "measured"'


def test_missing_or_wrong_weights_are_refused() -> None:
    assert (
        message("parameters", 2)
        == 'partition method "parameters" needs parameter counts of the layers, and there are none'
    )
    assert (
        message("measured", 2) == 'partition method "measured" needs measured costs of the layers, and there are none'
    )
    short = message("measured", 2, costs=[1.0, 2.0])
    assert short == 'partition method "measured": 2 measured costs for 7 layers; give one for each'
    for wrong in (-1.0, float("nan"), float("inf")):
        says = message("measured", 2, costs=[1.0, wrong, 1, 1, 1, 1, 1])
        assert says == f'partition method "measured": layer 1 has {wrong}; measured costs are at least 0'
    assert "all costs are 0" in message("measured", 2, costs=[0.0] * 7)


# --- a file of costs ----------------------------------------------------------------------------


def written(folder: Path, content: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_costs_as_a_list(tmp_path: Path) -> None:
    assert read_costs(written(tmp_path, [0.5, 1, 0])) == [0.5, 1.0, 0.0]
    assert read_costs(written(tmp_path, [0.5, 1]), names=["a", "b"]) == [0.5, 1.0]


def test_costs_as_a_profile_writes_them(tmp_path: Path) -> None:
    layers = [
        {"name": "embed", "forward_s": 0.25, "backward_s": 0.5},
        {"forward_s": 1, "backward_s": 2, "class": "Linear"},
    ]
    path = written(tmp_path, {"layers": layers, "device": "cpu"})
    assert read_costs(path) == [0.75, 3.0]
    assert read_costs(str(path), names=["embed", "head"]) == [0.75, 3.0]


def refused(path: Path, names: list[str] | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_costs(path, names)
    return str(caught.value).replace(str(path), "FILE")


def test_costs_of_another_model_are_refused(tmp_path: Path) -> None:
    layer = {"forward_s": 1, "backward_s": 2}
    path = written(tmp_path, {"layers": [{"name": "a", **layer}, {"name": "b", **layer}]})
    assert refused(path, ["a"]) == "costs of layers: FILE has 2 layers, and the model 1; measure again"
    assert refused(path, ["a", "c"]) == 'costs of layers: FILE has "b" as layer 1, the model "c"; measure again'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "costs of layers: cannot read FILE: "),
        ("3", 'costs of layers: FILE has neither a list of seconds nor {"layers": [{"name": ...'),
        ('{"layers": 3}', "has neither a list of seconds nor"),
        ('[1, "2"]', 'layer 1 in FILE is "2"; write seconds, or forward_s and backward_s in seconds'),
        ("[true]", "layer 0 in FILE is true"),
        ("[NaN]", "layer 0 in FILE is NaN"),
        ("[1, -1]", "layer 1 in FILE is -1"),
        ('{"layers": [{"forward_s": 1}]}', 'layer 0 in FILE is {"forward_s": 1}; write seconds, or forward_s and'),
    ],
)
def test_files_that_hold_no_costs_are_refused(tmp_path: Path, content: str, says: str) -> None:
    assert says in refused(written(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot read FILE: [Errno 2] No such file or directory" in refused(tmp_path / "none.json")
