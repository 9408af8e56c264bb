"""What decides a run's numbers besides its parameters: code, tasks and weights, each as a digest.

Manifests and checkpoints hold this record, so that work made from something else is recognised instead of reused. Only
what can change a number counts. Comments, docstrings and layout of the code do not, nor do modules that check, count or
write; a module counts for a run only if its program or its domain imports it.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mapl_core.profiles import RunConfig

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "mapl_core.train"
# What is in these cannot change a number; so they are neither compared nor followed further.
NO_INFLUENCE = frozenset(
    f"mapl_core.{name}"
    for name in (
        *("domains", "model_names", "notebook"),  # look names up, check and cast
        *("inputs", "results", "runs", "memory", "wheels"),  # record, write, read, free and fetch
        # make tasks and weights that are compared themselves
        *("pocket", "pocket.common", "pocket.build", "pocket.pretrain", "pocket.measure", "pocket.travel_mixture"),
    )
)
STARTED_BY_NAME = {"mapl_core.sandbox": "mapl_core/sandbox_process"}  # folders whose modules no import leads to
ENDS = 2**20  # bytes at each end of a weight file that are read: other weights differ there too
NOT_RECORDED = "made by a version that did not record code, tasks and weights"


class Inputs:
    """Takes the record of runs. What several runs share is read once; take a new one to see later changes.

    Args:
        root: the folder that holds the package `mapl_core`.
    """

    def __init__(self, root: Path = ROOT):
        self.root = root
        self._known: dict[Any, Any] = {}

    def of(self, config: RunConfig, program: str = PROGRAM) -> dict[str, Any]:
        """The record of a run: `program`, `code` (module -> digest), `tasks` (split -> digest), `weights` (by name).

        What cannot be looked at without a download or without building it is left out, and is then not compared: tasks
        of the source "paper", models of the hub. The converted SmolLM2 is pinned by a checksum in its module.

        Args:
            config: the run's configuration.
            program: the module that trains and evaluates.
        """
        roots = (program, _domain_module(config.domain))
        code = self._once(("code", roots), lambda: self._code(roots))
        looked_at = {name: self._weights(name) for name in config.model_names}
        weights = {name: digest for name, digest in looked_at.items() if digest}
        return {"program": program, "code": code, "tasks": self._tasks(config), "weights": weights}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    # -- code --------------------------------------------------------------------------------------------------------

    def _code(self, roots: tuple[str, ...]) -> dict[str, str]:
        return {name: self._digest_of(name) for name in sorted(self.modules_behind(*roots))}

    def _digest_of(self, module: str) -> str:
        return self._once(("digest", module), lambda: _code_digest(self._tree(module)))

    def modules_behind(self, *roots: str) -> set[str]:
        """The modules of this package that the roots import, directly or not, and that can change a number."""
        found: set[str] = set()
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            if name in found or name in NO_INFLUENCE or not self._file(name):
                continue
            found.add(name)
            waiting += self._once(("imports", name), lambda name=name: list(self._imports(self._tree(name))))
            folder = self.root / STARTED_BY_NAME.get(name, "no such folder")
            waiting += [".".join(file.relative_to(self.root).with_suffix("").parts) for file in folder.glob("[!_]*.py")]
        return found

    def _imports(self, tree: ast.Module) -> Iterator[str]:
        for node in _statements(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mapl_core"):
                yield from (self._home(node.module, alias.name) for alias in node.names)

    def _home(self, module: str, name: str) -> str:
        """The module that `from module import name` is about; a package's re-exports are looked through."""
        if self._file(f"{module}.{name}"):
            return f"{module}.{name}"
        file = self._file(module)
        if file and file.name == "__init__.py":
            for node in self._tree(module).body:
                names = {alias.asname or alias.name for alias in getattr(node, "names", ())}
                if isinstance(node, ast.ImportFrom) and name in names:
                    return self._home(node.module, name)
        return module

    def _file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split("."))
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

    def _tree(self, module: str) -> ast.Module:
        return self._once(("tree", module), lambda: ast.parse(self._file(module).read_bytes()))

    # -- tasks and weights -------------------------------------------------------------------------------------------

    def _tasks(self, config: RunConfig) -> dict[str, str]:
        if config.source == "paper":
            return {}
        counts = {"train": config.train_tasks, "eval": config.eval_tasks}
        if not config.trains:
            del counts["train"]
        options = json.dumps(config.domain_options, sort_keys=True, default=str)
        digests = {
            split: self._once(
                ("tasks", config.domain, options, config.source, split, count),
                lambda split=split, count=count: _tasks_digest(config, split, count),
            )
            for split, count in counts.items()
        }
        return {split: digest for split, digest in digests.items() if digest}

    def _weights(self, model: str) -> str | None:
        """Digest of a model folder, or of the code that builds a pocket model which is not shipped; None for others."""
        folder = Path(model).expanduser()
        if model.startswith("pocket:"):
            _, domain, size = model.split(":")
            folder = self.root / "mapl_core/pocket/weights" / f"{domain}-{size}"
            if not folder.is_dir():
                makers = ("common", "build", "pretrain", "travel_mixture", domain)
                return _digest(self._digest_of(f"mapl_core.pocket.{maker}") for maker in makers)
        return self._once(("weights", model), lambda: _folder_digest(folder)) if folder.is_dir() else None


def _domain_module(domain: str) -> str:
    from mapl_core.domains import DOMAINS

    build = DOMAINS[domain]
    return build[0] if isinstance(build, tuple) else getattr(build, "__module__", "")


def _tasks_digest(config: RunConfig, split: str, count: int) -> str | None:
    from mapl_core.domains import get_domain

    with suppress(OSError, TypeError, ValueError):  # data that is gone, or not plain: not compared
        tasks = get_domain(config.domain, **config.domain_options).load_tasks(split, config.source, count)
        return _digest(json.dumps([task.id, dict(task.fields)], sort_keys=True) for task in tasks)
    return None


def _code_digest(tree: ast.Module) -> str:
    """Equal for two sources that do the same: without comments, layout, docstrings and other bare texts."""
    for node in _statements(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return _digest([ast.dump(tree)])


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module, its statements and all that stand in them; expressions, by far the most of a tree, are passed over."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            waiting += inner if isinstance(inner, list) else []


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _folder_digest(folder: Path) -> str:
    return _digest(part for file in sorted(folder.iterdir()) if file.is_file() for part in _file_parts(file))


def _file_parts(file: Path) -> Iterator[str | bytes]:
    size = file.stat().st_size
    yield f"{file.name} {size}"
    with open(file, "rb") as content:
        yield content.read(ENDS)
        content.seek(max(ENDS, size - ENDS))
        yield content.read()


def _digest(parts: Iterator[str | bytes] | list[str]) -> str:
    """Sixteen hexadecimal digits for a sequence of texts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Then and now
# ---------------------------------------------------------------------------------------------------------------------


def changed_parameters(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Every parameter that differs, in words: "train_tasks was 4, is 6"."""
    names = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    return [f"{name} was {then.get(name)!r}, is {now.get(name)!r}" for name in names]


def changed_inputs(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """What differs between two records, in words: which modules, which split of the tasks, which weights.

    Tasks and weights that only one of them could look at are not compared.
    """
    if not then or not all(kind in then for kind in ("code", "tasks", "weights")):
        return [NOT_RECORDED]
    changes = []
    modules = sorted(
        name for name in now["code"].keys() | then["code"].keys() if now["code"].get(name) != then["code"].get(name)
    )
    if modules:
        named = ", ".join(name.removeprefix("mapl_core.") for name in modules[:4])
        more = f" and {len(modules) - 4} more modules" if len(modules) > 4 else ""
        changes.append(f"the code of {named}{more} has changed")
    for kind, words in (("tasks", "the {} tasks have changed"), ("weights", "the weights of {} have changed")):
        both = sorted(then[kind].keys() & now[kind].keys())
        changes += [words.format(name) for name in both if then[kind][name] != now[kind][name]]
    return changes
