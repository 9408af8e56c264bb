"""Claims about the validation cell: what a command line or YAML hands over means one thing, or is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from mapl_core.notebook import ParameterError, cast_parameter, check_parameters


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("true", bool, True),
        ("False", bool, False),
        (True, bool, True),
        ("1e-5", float, 1.0e-5),
        (3, float, 3.0),
        ("3", int, 3),
        (3.0, int, 3),
        ("[1,2]", list[int], [1, 2]),
        (["1", 2.0], list[int], [1, 2]),
        ('["a", "b"]', list[str], ["a", "b"]),
        ("null", float | None, None),
        ("None", str | None, None),
        (None, int | None, None),
        ("0.5", float | None, 0.5),
        ("null", str, "null"),
        ('{"num_agents": 3}', dict, {"num_agents": 3}),
        ("pocket", str, "pocket"),
    ],
)
def test_pm3_what_can_only_mean_one_thing_is_cast(value: Any, kind: Any, expected: Any):
    found = cast_parameter("NAME", value, kind)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        ("yes", bool, "true or false"),
        (1, bool, "true or false"),
        ("1e3x", float, "a finite number"),
        ("nan", float, "a finite number"),
        (float("inf"), float, "a finite number"),
        ("3.5", int, "a whole number"),
        (3.5, int, "a whole number"),
        (True, int, "a whole number"),
        (True, float, "a finite number"),
        ("null", int, "a whole number"),
        (None, str, "text"),
        (3, str, "text"),
        ("[1,", list[int], "a list of int"),
        ("[1, 2.5]", list[int], "a list of int"),
        ("3", list[int], "a list of int"),
        ("[1]", dict, "a mapping"),
        ("x", int | None, "a whole number or null"),
    ],
)
def test_pm3_anything_else_is_an_error_with_name_value_and_kind(value: Any, kind: Any, wanted: str):
    with pytest.raises(ParameterError) as caught:
        cast_parameter("STEPS", value, kind)
    assert str(caught.value).startswith(f"STEPS must be {wanted}, got {value!r}")


def test_pm3_the_values_of_a_yaml_file_are_cast_like_those_of_a_command_line():
    """YAML reads 1e-5 as text: the cast turns it into the number it means."""
    from_yaml = yaml.safe_load("{SMOKE: true, LR: 1e-5, SEEDS: [1, 2], LIMIT: null}")
    from_command_line = {"SMOKE": "true", "LR": "1e-5", "SEEDS": "[1, 2]", "LIMIT": "null"}
    kinds = {"SMOKE": bool, "LR": float, "SEEDS": list[int], "LIMIT": int | None}
    expected = {"SMOKE": True, "LR": 1.0e-5, "SEEDS": [1, 2], "LIMIT": None}
    assert check_parameters(from_yaml, **kinds) == check_parameters(from_command_line, **kinds) == expected
    assert from_yaml == from_command_line == expected  # cast in place


def test_pm2_a_misspelt_parameter_is_refused_with_the_valid_ones():
    """papermill sets STEPZ beside STEPS and goes on; the notebook must not."""
    with pytest.raises(ParameterError, match="unknown parameter STEPZ = 3; the parameters are SEED, STEPS"):
        check_parameters({"STEPS": 5, "SEED": 0, "STEPZ": 3}, STEPS=int, SEED=int)


@pytest.mark.parametrize("name, value", [("steps", 3), ("Seed", 7), ("stepz", None), ("profile", "small")])
def test_pm2_a_parameter_in_another_case_is_refused_too(name: str, value: Any):
    """papermill -p steps 3 leaves STEPS at its default, and nobody reads `steps`."""
    message = f"unknown parameter {name} = {value!r}; the parameters are SEED, STEPS"
    with pytest.raises(ParameterError, match=message):
        check_parameters({"STEPS": 5, "SEED": 0, name: value}, STEPS=int, SEED=int)
    injected = f"# Parameters\n{name} = {value!r}\n"
    with pytest.raises(ParameterError, match=message):
        check_parameters({"In": ["", injected], "STEPS": 5, "SEED": 0, name: value}, STEPS=int, SEED=int)


def test_pm2_the_check_may_be_run_again_after_later_cells():
    """A reader changes SEED and runs from there; what the notebook's own cells have set meanwhile is no parameter."""
    cells = ["", "SEED = 0", "# Parameters\nSEED = 1\n", "check_parameters(globals(), SEED=int)", "seed, rows = 3, [1]"]
    namespace = {"In": cells, "SEED": 2, "seed": 3, "rows": [1]}
    assert check_parameters(namespace, SEED=int) == {"SEED": 2}
    corrected = {"In": ["", "# Parameters\nsede = 1\n", "# Parameters\nSEED = 1\n"], "SEED": 1, "sede": 1}
    assert check_parameters(corrected, SEED=int) == {"SEED": 1}


@pytest.mark.slow
@pytest.mark.parametrize("given", [["steps", "3"], ["STEPZ", "3"], ["Steps", "null"]])
def test_pm2_papermill_stops_at_an_unknown_name_before_anything_runs(tmp_path: Path, given: list[str]):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    book.cells = [
        nbformat.v4.new_code_cell("address = 'set up'\nfrom mapl_core.notebook import check_parameters"),
        nbformat.v4.new_code_cell("STEPS = 5  # number", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("check_parameters(globals(), STEPS=int)"),
        nbformat.v4.new_code_cell("open('worked', 'w').close()"),
    ]
    nbformat.write(book, tmp_path / "in.ipynb")

    def run(*parameter: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "-k", "python3", "-p", *parameter]
        root = str(Path(__file__).resolve().parent.parent)
        environment = os.environ | {"PYTHONPATH": root, "JUPYTER_PREFER_ENV_PATH": "1"}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    refused = run(*given)
    assert refused.returncode == 1 and not (tmp_path / "worked").exists()
    assert f"ParameterError: unknown parameter {given[0]} = " in refused.stderr
    assert "the parameters are STEPS" in refused.stderr
    assert run("STEPS", "3").returncode == 0 and (tmp_path / "worked").exists()


def test_what_a_notebook_imports_is_not_taken_for_a_parameter():
    namespace = {"STEPS": "5", "F": pytest, "In": [], "_": 1, "lower": 2, "Path": str, "STYLES": object()}
    check_parameters(namespace, STEPS=int)
    assert namespace["STEPS"] == 5


def test_a_parameter_that_is_not_set_is_named():
    with pytest.raises(ParameterError, match="SEED not set: run the cell tagged `parameters` first"):
        check_parameters({"STEPS": 5}, STEPS=int, SEED=int)
