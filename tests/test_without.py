"""`--without`: collectors that are left out, by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from armed import captured, train

from dsprof.collectors.catalogue import COLLECTORS, without
from dsprof.settings import SettingsError, load

JOB = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(float(sum(p.detach().sum() for p in model.parameters())) != 0)
"""


def test_names() -> None:
    assert without("") == frozenset()
    assert without(" nvml, host-sync,") == {"nvml", "host-sync"}
    assert without(",".join(COLLECTORS)) == set(COLLECTORS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nvlm", "'nvlm' is no collector; did you mean nvml?"),
        ("host,host_sync", "'host_sync' is no collector; did you mean host-sync?"),
        ("qqq", f"'qqq' is no collector; there are {', '.join(sorted(COLLECTORS))}"),
    ],
)
def test_a_name_that_is_none(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no collector") as raised:
        without(text)
    assert str(raised.value) == says
    with pytest.raises(SettingsError) as refused:
        load({"without": text}, {}, tmp_path)
    assert str(refused.value) == f"--without: {says}"
    with pytest.raises(SettingsError) as refused:
        load({}, {"DSPROF_WITHOUT": text}, tmp_path)
    assert str(refused.value) == f"DSPROF_WITHOUT: {says}"


def test_where_it_is_set(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.dsprof]\nwithout = "flops"\n')
    assert load({}, {}, tmp_path).without == "flops"
    assert load({}, {"DSPROF_WITHOUT": "nvml"}, tmp_path).without == "nvml"
    assert load({"without": "host"}, {"DSPROF_WITHOUT": "nvml"}, tmp_path).without == "host"


def test_it_is_not_installed(tmp_path: Path) -> None:
    done = train(tmp_path, JOB, native="0", DSPROF_WITHOUT="modules,host-load")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    found = captured(tmp_path)
    assert found.of("without") == [{"collectors": ["host-load", "modules"]}]
    assert found.phases("forward") == []
    assert len(found.phases("backward")) == len(found.phases("optimizer")) == 2


def test_nothing_at_all(tmp_path: Path) -> None:
    """A capture of nothing harms nobody."""
    done = train(tmp_path, JOB, native="0", DSPROF_WITHOUT=",".join(COLLECTORS))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert captured(tmp_path).rows == []


def test_without_our_launcher_a_wrong_name_is_told_in_the_run_folder(tmp_path: Path) -> None:
    done = train(tmp_path, JOB, native="0", DSPROF_WITHOUT="nvlm")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert not (tmp_path / "run" / "capture").exists()
    (left,) = (tmp_path / "run").glob("error.*.txt")
    assert set(left.read_text().splitlines()) == {
        "starting the capture: ValueError: 'nvlm' is no collector; did you mean nvml?"
    }
