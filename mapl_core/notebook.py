"""What every notebook's validation cell needs: parameters cast once, checked once, before anything runs.

papermill hands over what a command line gave it: `-p SMOKE true` arrives as the text "true", a YAML `1e-5` as the text
"1e-5", and a misspelt name arrives as one more variable that nobody reads. `check_parameters` turns the first two into
what was meant and stops at the third, in whatever case it is written.
"""

from __future__ import annotations

import ast
import json
import math
import re
import types
from collections.abc import Mapping, MutableMapping
from typing import Any, Union, get_args, get_origin

PARAMETER_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
INJECTED = "# Parameters\n"  # first line of the cell that papermill puts in


class ParameterError(ValueError):
    """A notebook parameter is unknown or has a value of the wrong kind; the message says which are valid."""


def check_parameters(namespace: MutableMapping[str, Any], **kinds: Any) -> dict[str, Any]:
    """Cast the notebook's parameters in place and refuse what it does not know.

    Write it in the cell after the parameters::

        check_parameters(globals(), PROFILE=str, SEED=int, LEARNING_RATE=float | None, SEEDS=list[int])

    Args:
        namespace: the notebook's `globals()`; each named parameter is replaced by its cast value.
        kinds: the kind of each parameter: bool, int, float, str, `list[kind]`, `dict`, or `kind | None`.

    Returns:
        The cast parameters, for printing.

    Raises:
        ParameterError: for a value that is not of its kind, or a value that was set from outside (`-p NAME value`) and
            is no parameter: a misspelt name, or one in another case.
    """
    unknown = sorted(_set_from_outside(namespace) - kinds.keys())
    if unknown:
        given = ", ".join(f"{name} = {namespace[name]!r}" for name in unknown)
        raise ParameterError(f"unknown parameter {given}; the parameters are {', '.join(sorted(kinds))}")
    missing = [name for name in kinds if name not in namespace]
    if missing:
        raise ParameterError(f"{', '.join(missing)} not set: run the cell tagged `parameters` first")
    checked = {name: cast_parameter(name, namespace[name], kind) for name, kind in kinds.items()}
    namespace.update(checked)
    return checked


def _set_from_outside(namespace: Mapping[str, Any]) -> set[str]:
    """Names of plain values that no cell of the notebook's own has set.

    IPython keeps the cells that ran in `In`; among them the one that papermill put in is known by its first line. What
    that cell sets comes from outside in any case; what other cells set does not, so that a reader may run this check
    again after later cells. Outside IPython nothing tells the two apart, and every public plain value counts.
    """
    plain = (bool, int, float, str, list, dict, types.NoneType)
    public = {name for name, value in namespace.items() if type(value) in plain and not name.startswith("_")}
    if "In" not in namespace:
        return public
    injected = [cell for cell in namespace["In"] if cell.startswith(INJECTED)][-1:]  # a reader may have corrected it
    stored = {
        node.id
        for cell in injected
        for node in ast.walk(ast.parse(cell))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    # An UPPER_CASE value looks like a parameter, whichever cell has set it.
    return stored & namespace.keys() | {name for name in public if PARAMETER_NAME.fullmatch(name)}


def cast_parameter(name: str, value: Any, kind: Any) -> Any:
    """The value as `kind`, if it can only mean that: "true", "1e-5", "[1,2]" and "null" are understood.

    Raises:
        ParameterError: naming the parameter, the value received and what was expected.
    """
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if types.NoneType in options and (value is None or value in ("null", "None", "none")):
        return None
    for option in options:
        try:
            if option is not types.NoneType:
                return _cast(value, option)
        except (ValueError, TypeError):
            continue
    wanted = " or ".join(_describe(option) for option in options)
    raise ParameterError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")


def _cast(value: Any, kind: Any) -> Any:
    container = get_origin(kind) or kind
    if container in (list, dict):
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, container):
            raise TypeError(kind)
        items = get_args(kind)
        return [_cast(item, items[0]) for item in value] if container is list and items else value
    if kind is bool:
        if isinstance(value, str):
            value = {"true": True, "false": False}[value.lower()] if value.lower() in ("true", "false") else value
        if not isinstance(value, bool):
            raise TypeError(kind)
        return value
    if isinstance(value, bool):  # a truth value is an int to Python, and never what a number or a name means
        raise TypeError(kind)
    if kind is int:
        if isinstance(value, float) and not value.is_integer():
            raise ValueError(value)
        return int(value)
    if kind is float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(value)
        return number
    if kind is str and isinstance(value, str):
        return value
    raise TypeError(kind)


def _describe(kind: Any) -> str:
    container = get_origin(kind) or kind
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", dict: "a mapping"}
    if kind is types.NoneType:
        return "null"
    if container is list:
        return "a list" + (f" of {getattr(get_args(kind)[0], '__name__', get_args(kind)[0])}" if get_args(kind) else "")
    return names.get(kind, str(kind))


def show_figure(figure: Any, name: str, alt: str, folder: str = "") -> None:
    """Show a matplotlib figure with its alt text under any backend, and save it where `folder` is given.

    Args:
        figure: the figure; it is closed afterwards.
        name: file name without ending, for `folder/name.png`.
        alt: what someone who cannot see the figure needs to know.
        folder: where to save; empty for nowhere.
    """
    import io
    from pathlib import Path

    import matplotlib.pyplot as plt
    from IPython.display import Image, display

    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(image.getvalue())
    display(Image(image.getvalue(), alt=alt))
