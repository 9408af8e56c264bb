"""Python found in a model's answer: definitions and imports, whatever stands around them (CoopHE, domains 3.4).

An answer may hold prose, fences, several versions of a function, a tail that was cut off. Where a definition ends is
not guessed from its looks but confirmed by the parser.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mapl_core.rewards.text import clean_response

FENCE = "```"
STARTS_DEFINITION = re.compile(r"\s*(?:(async)\s+)?(def|class)\b\s*(\w*)")
STARTS_IMPORT = re.compile(r"\s*(?:import|from)\s")
RETURNS_VALUE = re.compile(r"\s*return\b\s*[^\s#;]")
# Characters handed to the parser in the search for the ends of one answer's definitions; after that a definition counts
# as broken. Answers of some hundred tokens need less than a tenth.
PARSER_BUDGET = 4_000_000
LONGEST_IMPORT = 50  # lines

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef | ast.Lambda


@dataclass(frozen=True)
class Definition:
    """One `def`, `async def` or `class` with its decorators.

    Attributes:
        name: its name.
        kind: "def", "async def" or "class".
        text: its lines, moved to the left margin.
        header: position of the `def` line among them; decorators stand above.
        node: its syntax tree, None if it is broken.
    """

    name: str
    kind: str
    text: str
    header: int
    node: Function | ast.ClassDef | None

    @cached_property
    def signature(self) -> ast.arguments | None:
        """The parameters of a function, also of one whose body is broken; None if they do not parse either."""
        if isinstance(self.node, Function):
            return self.node.args
        if self.node is not None or self.kind == "class":
            return None
        lines = self.text.split("\n")[self.header :]
        header = _until_colon("\n".join(lines))
        function = sole_statement(f"{header} pass") if header else None
        return function.args if isinstance(function, Function) else None

    @cached_property
    def returns_value(self) -> bool:
        """Whether it is a plain function that can give something back: "defined with a return"."""
        if isinstance(self.node, ast.FunctionDef):
            return any(isinstance(part, ast.Return) and part.value is not None for part in own_nodes(self.node.body))
        if self.node is not None or self.kind != "def" or self.signature is None:
            return False
        return any(RETURNS_VALUE.match(line) for line in self.text.split("\n")[self.header + 1 :])

    def takes(self, count: int) -> bool:
        """Whether it can be called with exactly `count` positional arguments."""
        if self.signature is None:
            return False
        positional = len(self.signature.posonlyargs) + len(self.signature.args)
        required = positional - len(self.signature.defaults)
        return (
            required <= count
            and (count <= positional or self.signature.vararg is not None)
            and all(default is not None for default in self.signature.kw_defaults)
        )


@dataclass(frozen=True)
class Answer:
    """What is kept of one response: all its definitions, and the imports outside of them."""

    definitions: tuple[Definition, ...]
    imports: tuple[str, ...]

    def function(self, name: str) -> Definition | None:
        """The function of exactly this name: of several the last that parses, else the last."""
        found = [entry for entry in self.definitions if entry.name == name and entry.kind != "class"]
        whole = [entry for entry in found if entry.node is not None]
        return (whole or found or [None])[-1]


def parse(text: str) -> ast.Module | None:
    """The syntax tree of a text, or None if it is no Python; never an exception, never a warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape sequence is a model's business
            return ast.parse(text)
    # ValueError: a null character or half of a surrogate pair; the last two: nested too deeply for the parser.
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def sole_statement(text: str) -> ast.stmt | None:
    """The statement that the text consists of, or None if it is not exactly one."""
    module = parse(text)
    return module.body[0] if module is not None and len(module.body) == 1 else None


def read_answer(response: str | None) -> Answer:
    """Find the definitions and top-level imports of a response."""
    reader = _Reader(code_lines(response))
    definitions: list[Definition] = []
    imports: list[str] = []
    at = 0
    while at < len(reader.lines):
        header = reader.definition_header(at)
        if header is not None:
            definition, at = reader.read_definition(at, header)
            definitions.append(definition)
        else:
            statements, at = reader.read_imports(at)
            imports += statements
    return Answer(tuple(definitions), tuple(dict.fromkeys(imports)))


def code_lines(response: str | None) -> list[str]:
    """The lines of a response without code fences, be they closed or not, on lines of their own or behind code."""
    lines = clean_response(response).split("\n")
    ends = (line.rstrip() for line in lines)
    bare = [end[: -len(FENCE)] if end.endswith(FENCE) else line for line, end in zip(lines, ends, strict=True)]
    return [line for line, whole in zip(bare, lines, strict=True) if not whole.lstrip().startswith(FENCE)]


def own_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All nodes below these, themselves included, but not what lies inside nested functions, classes and lambdas."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Scope):
            waiting.extend(ast.iter_child_nodes(node))


class _Reader:
    """Reads the lines of one answer; what it hands to the parser is bounded, however hostile the text."""

    def __init__(self, lines: Sequence[str]):
        self.lines = lines
        self.budget = PARSER_BUDGET

    def statement(self, start: int, end: int, more: str = "") -> tuple[ast.stmt | None, str]:
        """The sole statement on these lines, if they hold exactly one, and their text at the left margin."""
        text = _dedent([*self.lines[start:end], *([_indent_of(self.lines[start]) + more] if more else [])])
        self.budget -= len(text)
        return (sole_statement(text) if self.budget >= 0 else None), text

    def definition_header(self, at: int) -> int | None:
        """Where the `def` or `class` line is of a definition that starts here, decorators included; None if none."""
        if STARTS_DEFINITION.match(self.lines[at]):
            return at
        if not self.lines[at].lstrip().startswith("@"):
            return None
        for header in range(at + 1, len(self.lines)):
            if STARTS_DEFINITION.match(self.lines[header]):
                decorated, _ = self.statement(at, header, "def _(): pass")
                return header if isinstance(decorated, ast.FunctionDef) else None
            if not self.lines[header].strip():
                return None  # directly above, without a gap
        return None

    def read_definition(self, start: int, header: int) -> tuple[Definition, int]:
        """The definition that starts at a line, and the line after it.

        It ends at the first later line that is not blank, not a comment and not indented deeper (or at the end) such
        that the lines up to there parse as one definition. If there is none, it is broken and ends at the first such
        line.
        """
        match = STARTS_DEFINITION.match(self.lines[header])
        name, kind = match.group(3), f"async {match.group(2)}" if match.group(1) else match.group(2)
        margin = _width(self.lines[header])
        broken_end = None
        for end in range(header + 1, len(self.lines) + 1):
            if end < len(self.lines) and not _may_end(self.lines[end], margin):
                continue
            broken_end = broken_end or end
            node, text = self.statement(start, end)
            if isinstance(node, Function | ast.ClassDef):
                return Definition(name, kind, text, header - start, node), end
            if self.budget < 0:
                break
        return Definition(name, kind, _dedent(self.lines[start:broken_end]), header - start, None), broken_end

    def read_imports(self, at: int) -> tuple[list[str], int]:
        """The imports that start at a line, each in one normal form, and the line to go on with."""
        line = self.lines[at]
        if not STARTS_IMPORT.match(line):
            return [], at + 1
        spans_lines = "(" in line or line.rstrip().endswith("\\")
        for end in range(at + 1, min(at + LONGEST_IMPORT if spans_lines else at + 1, len(self.lines)) + 1):
            statement, text = self.statement(at, end)
            if isinstance(statement, ast.Import | ast.ImportFrom):
                return [ast.unparse(statement)], end
        module = parse(line.strip())  # several statements on one line
        found = [part for part in (module.body if module else ()) if isinstance(part, ast.Import | ast.ImportFrom)]
        return [ast.unparse(part) for part in found], at + 1


def _may_end(line: str, margin: int) -> bool:
    stripped = line.strip()
    return bool(stripped) and not stripped.startswith("#") and _width(line) <= margin


def _until_colon(text: str) -> str | None:
    """The text up to and with the colon that ends a function's signature."""
    lines = text.split("\n")
    depth = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
                if token.string == ":" and depth == 0:
                    row, column = token.end
                    return "\n".join([*lines[: row - 1], lines[row - 1][:column]])
    except (tokenize.TokenError, SyntaxError, ValueError):  # the body is broken, but the colon was not reached either
        return None
    return None


def _dedent(lines: Sequence[str]) -> str:
    """These lines with the first one's white space taken off each that has it (a string's lines may not)."""
    indent = _indent_of(lines[0])
    return "\n".join(line.removeprefix(indent) for line in lines).rstrip()


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _width(line: str) -> int:
    """Columns of white space at a line's start; a tab fills up to eight, as for the parser."""
    return len(_indent_of(line).expandtabs(8))
