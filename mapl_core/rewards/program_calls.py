"""Does the main function really use its helper, and does it do anything besides? (CoopHE, domains 3.6)

Both are asked of the *live code*: what is left of a body without statements that cannot run or whose result nobody
reads. Text does not count: a call in a comment, a string or dead code is none.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from mapl_core.rewards.python_source import Function

FEEDING = ("map", "filter", "reduce")
JUMPS = (ast.Break, ast.Continue)
LEAVING = (ast.Return, ast.Raise)
# Nodes that are work of their own wherever they stand in live code; operators and calls are looked at more closely.
OWN_WORK = (
    ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Attribute, ast.JoinedStr, ast.List, ast.Tuple,
    ast.Set, ast.Dict, ast.Starred, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
    ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try,
    ast.TryStar, ast.Match, ast.Raise, ast.Assert, ast.AugAssign, ast.NamedExpr, ast.Delete, ast.Yield, ast.YieldFrom,
    ast.Await,
)  # fmt: skip


def really_calls(main: ast.FunctionDef, helper: str) -> bool:
    """Whether live code of `main` calls the helper and uses the result, or hands it to map, filter, reduce or `key=`.

    Nothing counts if `main` binds the helper's name itself: then it is another function, or none.
    """
    if helper in _bound_names(main):
        return False
    live = live_code(main)
    ignored = {id(node.value) for node in _walk(live) if isinstance(node, ast.Expr) and not _sorts_in_place(node.value)}
    return any(isinstance(node, ast.Call) and id(node) not in ignored and _uses(node, helper) for node in _walk(live))


def is_mere_wrapper(main: ast.FunctionDef, helper: str) -> bool:
    """Whether `main` really calls the helper and its live code shows no work of its own."""
    return really_calls(main, helper) and not any(_is_own_work(node, helper) for node in _walk(live_code(main)))


def live_code(main: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of a body that can run and matter.

    Left out are the docstring, `pass`, imports, bare expressions other than calls and yields, what follows a jump in
    the same block, and definitions and assignments of names that nothing else reads. An `if` or `while` with a constant
    condition is replaced by the body that runs, once.
    """
    body = main.body[1:] if ast.get_docstring(main, clean=False) is not None else main.body
    live = _live_block(body)
    while True:
        reads = _reads(live)
        before = reads.total()
        live = _without_unread(live, reads)
        if reads.total() == before:  # nothing was taken out that read a name, so nothing more has become unread
            return live


def _live_block(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    live: list[ast.stmt] = []
    for statement in body:
        for kept in _live_statement(statement):
            live.append(kept)
            if isinstance(kept, LEAVING + JUMPS):
                return live
    return live


def _live_statement(statement: ast.stmt) -> list[ast.stmt]:
    if isinstance(statement, ast.Pass | ast.Import | ast.ImportFrom):
        return []
    if isinstance(statement, ast.Expr):
        return [statement] if isinstance(statement.value, ast.Call | ast.Yield | ast.YieldFrom) else []
    if isinstance(statement, ast.If | ast.While) and (condition := _constant(statement.test)) is not None:
        block = _live_block(statement.body if condition[0] else statement.orelse)
        # The loop itself is gone, so what leaves it goes, too.
        return block[:-1] if isinstance(statement, ast.While) and block and isinstance(block[-1], JUMPS) else block
    return [_with_blocks(statement, _live_block)]


def _with_blocks(statement: ast.stmt, change) -> ast.stmt:
    """A copy of a statement with every block inside it changed; the statement itself if it has none."""
    changed = {}
    for name, value in ast.iter_fields(statement):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            changed[name] = change(value)
        elif isinstance(value, list) and value and isinstance(value[0], ast.ExceptHandler | ast.match_case):
            changed[name] = [_with_blocks(part, change) for part in value]
    if not changed:
        return statement
    return type(statement)(**{**dict(ast.iter_fields(statement)), **changed})


def _constant(test: ast.expr) -> tuple[bool] | None:
    """Whether a condition that does not depend on anything holds; None if it does depend on something."""
    try:
        return (bool(ast.literal_eval(test)),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _without_unread(block: Sequence[ast.stmt], reads: Counter[str]) -> list[ast.stmt]:
    """A block without assignments to plain names, functions and classes whose names nothing else reads.

    Args:
        block: statements of live code.
        reads: how often each name is read in all of it; what is taken out is subtracted.
    """
    kept = []
    for statement in reversed(block):  # from the last one on: what only a removed statement reads goes with it
        names, own = _plain_names(statement), _reads([statement])
        if names and all(reads[name] == own[name] for name in names):
            reads.subtract(own)
        else:
            kept.append(_with_blocks(statement, lambda inner: _without_unread(inner, reads)))
    return kept[::-1]


def _plain_names(statement: ast.stmt) -> set[str]:
    """The names a statement does nothing but bind; empty if it does anything else."""
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    targets = {
        ast.Assign: lambda: statement.targets,
        ast.AnnAssign: lambda: [statement.target],
        ast.AugAssign: lambda: [statement.target],
    }.get(type(statement), list)()
    return {target.id for target in targets} if all(isinstance(target, ast.Name) for target in targets) else set()


def _reads(nodes: Iterable[ast.AST]) -> Counter[str]:
    """How often each name is read below these nodes; an augmented assignment reads what it changes."""
    found: Counter[str] = Counter()
    for node in _walk(nodes):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] += 1
    return found


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes below these but annotations, which do not run."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            parts = value if isinstance(value, list) else [value]
            waiting.extend(part for part in parts if isinstance(part, ast.AST))


def _uses(call: ast.Call, helper: str) -> bool:
    """Whether a call is one of the helper, or one that is handed the helper to call it."""
    if _is_name(call.func, helper):
        return True
    if any(keyword.arg == "key" and _is_name(keyword.value, helper) for keyword in call.keywords):
        return True
    feeding = call.func.id if isinstance(call.func, ast.Name) else None
    if isinstance(call.func, ast.Attribute) and _is_name(call.func.value, "functools"):
        feeding = call.func.attr
    return feeding in FEEDING and bool(call.args) and _is_name(call.args[0], helper)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _sorts_in_place(node: ast.expr) -> bool:
    """`rows.sort(key=...)` is a bare statement whose effect stays."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sort"


def _is_own_work(node: ast.AST, helper: str) -> bool:
    if isinstance(node, ast.UnaryOp):
        signed = isinstance(node.op, ast.USub | ast.UAdd) and isinstance(node.operand, ast.Constant)
        return not signed
    if isinstance(node, ast.Call):
        return not _is_name(node.func, helper)
    return isinstance(node, OWN_WORK)


def _bound_names(main: ast.FunctionDef) -> set[str]:
    """Every name that a function or anything inside it binds."""
    names = set()
    for node in ast.walk(main):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, Function | ast.ClassDef) and node is not main:
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
    return names
