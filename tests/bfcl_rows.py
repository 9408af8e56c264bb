"""Real BFCL rows and the syntaxes in which models write calls, for the tests of parser and oracle."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from mapl_core.domains.base import Task
from mapl_core.domains.bfcl import task_of_row
from mapl_core.domains.bfcl_data import accepted_rows, package_rows

GoldCall = tuple[str, dict[str, Any]]


@cache
def _tasks() -> tuple[list[Task], str]:
    try:
        rows = package_rows()
    except FileNotFoundError as error:
        return [], str(error)
    accepted, refused = accepted_rows(rows, str)
    assert not refused
    return [task_of_row(row, "small", "eval") for row in accepted], ""


def all_tasks() -> list[Task]:
    """All 400 rows of the package as tasks; the test that asks is skipped if the package cannot be had."""
    tasks, reason = _tasks()
    if not tasks:
        pytest.skip(reason)
    return tasks


def reference_calls(task: Task) -> list[GoldCall]:
    """The gold calls with their first accepted values, optional arguments left out."""
    return [
        (name, {argument: _first(accepted) for argument, accepted in arguments.items() if "" not in accepted})
        for gold in task.fields["ground_truth"]
        for name, arguments in gold.items()
    ]


def _first(accepted: list[Any]) -> Any:
    value = accepted[0]
    if isinstance(value, dict):  # an accepted dict holds alternatives again
        return {key: inner[0] for key, inner in value.items() if "" not in inner}
    return value


def python_call(call: GoldCall) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{argument}={value!r}' for argument, value in arguments.items())})"


def double_quoted(call: GoldCall) -> str:
    """With JSON literals for values, which Python syntax can hold: "text", true, null."""
    name, arguments = call
    return f"{name}( {' , '.join(f'{argument} = {json.dumps(value)}' for argument, value in arguments.items())} )"


def json_call(call: GoldCall, key: str = "arguments") -> dict[str, Any]:
    return {"name": call[0], key: call[1]}


def _lines(calls: list[GoldCall]) -> str:
    return "\n".join(map(python_call, calls)) or "[]"


def _bullets(calls: list[GoldCall]) -> str:
    lines = [
        f"{number}. The user's wish (no. {number}):\n   - `{python_call(call)}`" for number, call in enumerate(calls)
    ]
    return "\n".join(["Sure, I'll make these calls:", *lines, "That's all (I think)."])


def _over_lines(calls: list[GoldCall]) -> str:
    return "\n\n".join(
        f"result = {name}(\n"
        + "".join(f"    {key}={value!r},  # it's {key}\n" for key, value in arguments.items())
        + ")"
        for name, arguments in calls
    )


# One agent's calls -> its response, in every syntax that is supported.
SYNTAXES = {
    "a line each": _lines,
    "a list": lambda calls: f"[{', '.join(map(python_call, calls))}]",
    "on one line": lambda calls: " ".join(map(python_call, calls)),
    "a list over lines": lambda calls: "[\n    " + ",\n    ".join(map(python_call, calls)) + "\n]",
    "JSON literals": lambda calls: "\n".join(map(double_quoted, calls)),
    "arguments over lines": _over_lines,
    "bullets and prose": _bullets,
    "printed": lambda calls: "\n".join(f"print({python_call(call)})" for call in calls),
    "underscores": lambda calls: "\n".join(python_call((name.replace(".", "_"), args)) for name, args in calls),
    "two stars": lambda calls: "\n".join(f"{name}(**{arguments!r})" for name, arguments in calls),
    "a fence": lambda calls: f"Here you are:\n```python\n{_lines(calls)}\n```\nIt's done.",
    "cut off": lambda calls: _lines([*calls, *calls[:1]])[:-1] if calls else "",
    "a JSON list": lambda calls: json.dumps([json_call(call) for call in calls]),
    "JSON lines": lambda calls: "\n".join(json.dumps(json_call(call, "parameters")) for call in calls),
    "a JSON list in a fence": lambda calls: (
        f"```json\n{json.dumps([json_call(call) for call in calls], indent=2)}\n```"
    ),
    "JSON with text arguments": lambda calls: json.dumps(
        [{"type": "function", "function": {"name": name, "arguments": json.dumps(args)}} for name, args in calls]
    ),
    "JSON with names as keys": lambda calls: json.dumps([{name: args} for name, args in calls], ensure_ascii=False),
    "JSON with the name as function": lambda calls: json.dumps(
        [{"function": name, "arguments": args} for name, args in calls]
    ),
    "tags": lambda calls: "\n".join(f"<tool_call>\n{json.dumps(json_call(call))}\n</tool_call>" for call in calls),
    "a JSON list cut off": lambda calls: json.dumps([json_call(call) for call in [*calls, *calls[:1]]])[:-5],
}
