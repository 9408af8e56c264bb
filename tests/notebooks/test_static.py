"""Claims about every notebook and every solution, read off the files: no kernel is started."""

from __future__ import annotations

import ast
import json
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from mapl_core.jobs import notebook_parameters
from mapl_core.notebook import PARAMETER_NAME, cast_parameter

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
NAMES = {
    *("00_quickstart", "01_formulation", "02_preference_collection", "03_marlhf", "04_madpo", "05_tldr"),
    *("06_coophe", "07_bfcl", "08_travel", "09_baselines", "10_ablations", "11_tables_and_figures", "12_your_own_task"),
}
KINDS = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict}


def is_parametrised(notebook: Path) -> bool:
    return any("parameters" in cell["metadata"].get("tags", []) for cell in json.loads(notebook.read_text())["cells"])


every = pytest.mark.parametrize("notebook", NOTEBOOKS + SOLUTIONS, ids=lambda path: path.stem)
# A solution may do without parameters; what it has must be right.
parametrised = pytest.mark.parametrize(
    "notebook", NOTEBOOKS + [path for path in SOLUTIONS if is_parametrised(path)], ids=lambda path: path.stem
)
taught = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def load(notebook: Path) -> dict[str, Any]:
    return json.loads(notebook.read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code_cells(notebook: Path) -> list[str]:
    return [source(cell) for cell in load(notebook)["cells"] if cell["cell_type"] == "code"]


def markdown(notebook: Path) -> str:
    return "\n\n".join(source(cell) for cell in load(notebook)["cells"] if cell["cell_type"] == "markdown")


def trees(notebook: Path) -> Iterator[ast.AST]:
    for code in code_cells(notebook):
        yield from ast.walk(ast.parse(code))


def parameters_cell(notebook: Path) -> int:
    """Its place among the code cells."""
    cells = [cell for cell in load(notebook)["cells"] if cell["cell_type"] == "code"]
    (place,) = [place for place, cell in enumerate(cells) if "parameters" in cell["metadata"].get("tags", [])]
    return place


def test_there_are_notebooks_and_their_names_are_those_of_the_plan():
    assert NOTEBOOKS and {path.stem for path in NOTEBOOKS} <= NAMES


# -- files -------------------------------------------------------------------------------------------------------------


@every
def test_pm1_the_kernel_is_python3(notebook: Path):
    kernel = load(notebook)["metadata"]["kernelspec"]
    assert (kernel["name"], kernel["language"]) == ("python3", "python")


@every
def test_pm10_there_is_no_widget_metadata(notebook: Path):
    assert "widgets" not in load(notebook)["metadata"]


@every
def test_nb1_outputs_and_counts_are_stripped(notebook: Path):
    for place, cell in enumerate(load(notebook)["cells"], 1):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, f"cell {place} was saved after a run"


@every
def test_nb1_cells_have_unique_ids_in_the_current_format(notebook: Path):
    book = load(notebook)
    assert (book["nbformat"], book["nbformat_minor"]) >= (4, 5)
    names = [cell["id"] for cell in book["cells"]]
    assert len(set(names)) == len(names)


@every
def test_pm11_the_paired_text_file_agrees(notebook: Path):
    jupytext = pytest.importorskip("jupytext")
    paired = jupytext.read(notebook.with_suffix(".py"))
    for place, (ours, theirs) in enumerate(zip(load(notebook)["cells"], paired.cells, strict=False), 1):
        found = (theirs.cell_type, theirs.source.strip(), theirs.metadata.get("tags", []))
        expected = (ours["cell_type"], source(ours).strip(), ours["metadata"].get("tags", []))
        assert found == expected, f"cell {place}: run `jupytext --sync {notebook.name}`"
    assert len(load(notebook)["cells"]) == len(paired.cells), f"run `jupytext --sync {notebook.name}`"


@every
def test_nb1_every_cell_parses(notebook: Path):
    for place, code in enumerate(code_cells(notebook), 1):
        try:
            ast.parse(code)
        except SyntaxError as error:
            pytest.fail(f"code cell {place}: {error}")


@every
def test_nb1_there_are_no_paths_of_one_machine(notebook: Path):
    found = re.findall(
        r"(?<![\w/.])/(?:home|root|Users|tmp|work|mnt|content|opt)/[^\s\"')]*|[A-Z]:\\\\\w+", str(load(notebook))
    )
    assert found == []


@every
def test_nb1_links_lead_to_files_that_exist(notebook: Path):
    for target in re.findall(r"\]\(([^)#\s]+)\)", markdown(notebook)):
        inside = re.search(r"colab\.research\.google\.com/github/[^/]+/[^/]+/blob/[^/]+/(.*)", target)
        if inside:
            assert (ROOT / inside[1]).is_file(), target
        elif not re.match(r"[a-z]+:", target):
            assert (notebook.parent / target).exists(), target


@taught
def test_the_colab_badge_opens_this_notebook_at_the_one_address(notebook: Path):
    first = source(load(notebook)["cells"][0])
    address = "https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/"
    assert f"({address}{notebook.name})" in first


# -- parameters --------------------------------------------------------------------------------------------------------


@parametrised
def test_pm4_exactly_one_cell_is_tagged_parameters(notebook: Path):
    tagged = [cell for cell in load(notebook)["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0]["cell_type"] == "code"


@parametrised
def test_pm5_parameters_are_literals_one_a_line_commented_and_upper_case(notebook: Path):
    cell = code_cells(notebook)[parameters_cell(notebook)]
    statements = ast.parse(cell).body
    assert notebook_parameters(notebook)  # every right-hand side is a literal
    for statement in statements:
        assert isinstance(statement, ast.Assign), ast.unparse(statement)
        assert statement.targets[0].id.isupper(), statement.targets[0].id
        assert statement.lineno == statement.end_lineno, f"{statement.targets[0].id} spans several lines"
    lines = [statement.lineno for statement in statements]
    assert len(set(lines)) == len(lines)
    commented = {
        token.start[0] for token in tokenize.generate_tokens(StringIO(cell).readline) if token.type == tokenize.COMMENT
    }
    missing = [statement.targets[0].id for statement in statements if statement.lineno not in commented]
    assert missing == [], "parameters without a comment"


@parametrised
def test_pm5_floats_are_written_so_that_yaml_reads_a_float(notebook: Path):
    """YAML takes 1e-5 for text and 1.0e-5 for a number: readers copy what they see."""
    cell = code_cells(notebook)[parameters_cell(notebook)]
    numbers = [
        token.string for token in tokenize.generate_tokens(StringIO(cell).readline) if token.type == tokenize.NUMBER
    ]
    assert [number for number in numbers if "e" in number.lower() and "." not in number] == []


@parametrised
def test_pm3_the_next_cell_checks_every_parameter_and_nothing_else(notebook: Path):
    cell = code_cells(notebook)[parameters_cell(notebook) + 1]
    calls = [
        node for node in ast.walk(ast.parse(cell))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_parameters"
    ]  # fmt: skip
    assert len(calls) == 1, "the cell after the parameters calls check_parameters once"
    assert ast.unparse(calls[0].args[0]) == "globals()"
    checked = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    defaults = notebook_parameters(notebook)
    assert checked.keys() == defaults.keys()
    for name, kind in checked.items():
        cast_parameter(name, defaults[name], eval(ast.unparse(kind), {"__builtins__": {}}, KINDS))


@parametrised
def test_nb5_every_parameter_is_read(notebook: Path):
    read = {node.id for node in trees(notebook) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert sorted(notebook_parameters(notebook).keys() - read) == []


@parametrised
def test_nb5_no_import_looks_like_a_parameter(notebook: Path):
    """The check takes every UPPER_CASE value for a parameter: it would refuse an imported one."""
    for node in trees(notebook):
        if isinstance(node, ast.ImportFrom):
            assert [alias.name for alias in node.names if PARAMETER_NAME.fullmatch(alias.asname or alias.name)] == []


@parametrised
def test_nb5_no_parameter_is_bound_again_after_the_check(notebook: Path):
    names = notebook_parameters(notebook).keys()
    for code in code_cells(notebook)[parameters_cell(notebook) + 2 :]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                assert node.id not in names, f"{node.id} is bound again in `{code.splitlines()[0]}`"


@parametrised
def test_nb2_no_path_depends_on_the_scale(notebook: Path):
    """Smoke and full runs differ in numbers alone: nothing asks for SMOKE or for the profile's name."""
    for node in trees(notebook):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
            assert not names & {"SMOKE", "PROFILE"}, f"`if {ast.unparse(node.test)}`"


def test_pm2_the_job_notebook_takes_what_the_runner_gives():
    given = {"PROFILE", "METHOD", "PARADIGM", "SEED", "OUTPUT_DIR"}
    for name in ("05_tldr", "06_coophe", "07_bfcl", "08_travel", "09_baselines"):
        for notebook in NOTEBOOKS:
            if notebook.stem == name:
                wanted = given | ({"DOMAIN"} if name == "09_baselines" else set())
                assert wanted <= notebook_parameters(notebook).keys()


# -- code --------------------------------------------------------------------------------------------------------------


@every
def test_pm7_no_cell_can_end_the_notebook_early(notebook: Path):
    for node in trees(notebook):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("exit", "quit", "sys.exit", "os._exit"), ast.unparse(node)
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "SystemExit" not in ast.unparse(node.exc)


@every
def test_pm9_progress_bars_are_plain(notebook: Path):
    for node in trees(notebook):
        if isinstance(node, ast.ImportFrom | ast.Import):
            assert not re.search(r"tqdm\.(auto|notebook)", ast.unparse(node)), ast.unparse(node)


@every
def test_seed3_there_is_no_unseeded_randomness(notebook: Path):
    for node in trees(notebook):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert not re.fullmatch(r"random\.\w+|(np|numpy)\.random\.(?!default_rng|Generator|PCG64)\w+", name), name
            assert name != "torch.manual_seed", "draw from a generator of mapl_core.seeding instead"


@every
def test_env1_no_notebook_names_a_version_of_its_own(notebook: Path):
    text = "\n".join([*code_cells(notebook), markdown(notebook)])
    assert re.findall(r"[\w-]+==\d[\w.]*", text) == []


@parametrised
def test_env2_only_the_first_cell_installs_and_only_in_colab(notebook: Path):
    """By the one function that replaces nothing that is imported; what it decides is tested with it."""
    cells = code_cells(notebook)
    assert not [code for code in cells if re.search(r"\bpip\b|!\s*(apt|conda)", code)]
    installing = [place for place, code in enumerate(cells) if "set_up(" in code]
    assert installing in ([], [0])
    if installing:
        statements = ast.parse(cells[0]).body
        (guard,) = [node for node in statements if isinstance(node, ast.If)]
        assert ast.unparse(guard.test) == "'google.colab' in sys.modules" and not guard.orelse
        others = "".join(ast.unparse(node) for node in statements if node is not guard)
        assert "set_up" not in others and "subprocess." not in others


def test_env2_every_notebook_sets_up_colab_in_the_same_words():
    cells = {cell for notebook in NOTEBOOKS + SOLUTIONS for cell in code_cells(notebook)[:1] if "set_up(" in cell}
    assert len(cells) == 1
    assert all("set_up(" in code_cells(notebook)[0] for notebook in NOTEBOOKS)


@parametrised
def test_env3_nothing_heavy_is_imported_before_the_installation(notebook: Path):
    heavy = {"torch", "numpy", "transformers", "peft", "mapl_core", "pandas", "matplotlib"}
    light = {"mapl_core.colab"}  # imports the standard library alone, as its own test says
    for node in ast.walk(ast.parse(code_cells(notebook)[0])):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {module.split(".")[0] for module in modules if module not in light} & heavy, ast.unparse(node)


# -- for the reader ----------------------------------------------------------------------------------------------------


@taught
def test_the_first_cell_says_what_the_reader_will_be_able_to_do(notebook: Path):
    first = load(notebook)["cells"][0]
    text = source(first)
    assert first["cell_type"] == "markdown" and text.startswith(f"# {notebook.stem[:2]} ")
    assert re.search(r"after (it|this)", text, re.IGNORECASE) and re.search(r"needs", text, re.IGNORECASE)
    column = r"[^|\n]*\|"
    header = rf"\|\s*machine\s*\|(?:{column})*?\s*minutes\s*\|(?:{column})*?\s*memory\s*\|(?:{column})*?\s*date\s*\|"
    table = re.search(rf"{header}\n\|[-| ]+\|\n\|(.+)\|", text)
    assert table, "the first cell holds the runtime table"
    assert "not measured" in table[1] or re.search(r"\d", table[1])


@every
def test_cells_are_short_enough_to_read(notebook: Path):
    for code in code_cells(notebook):
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 35, f"{len(lines)} lines: `{code.splitlines()[0]}`"
        assert max((len(line) for line in lines), default=0) <= 88, max(lines, key=len)


@taught
def test_common_mistakes_and_exercises_with_solutions_are_there(notebook: Path):
    text = markdown(notebook)
    assert re.search(r"common mistake", text, re.IGNORECASE)
    assert re.search(r"^#+ .*exercises", text, re.IGNORECASE | re.MULTILINE)
    assert f"solutions/{notebook.stem}_solutions.ipynb" in text
    assert (notebook.parent / "solutions" / f"{notebook.stem}_solutions.ipynb").is_file()
