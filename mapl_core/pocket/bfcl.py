"""Generated BFCL tasks for the pocket model, and the scripted answers it is pretrained on.

A request asks for two to four things; every thing is one call. The answers are written as
`name ( argument = value ) ;`, which the oracle reads like any other Python call.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mapl_core.domains.base import Domain, Task
from mapl_core.domains.bfcl import POCKET, task_of_row
from mapl_core.pocket.common import prompt_forms

CITIES = (
    "amsterdam", "athens", "berlin", "bern", "boston", "cairo", "delhi", "dublin", "geneva", "lima", "lisbon",
    "london", "madrid", "milan", "oslo", "paris", "prague", "rome", "tokyo", "vienna",
)  # fmt: skip
PEOPLE = ("anna", "ben", "clara", "david", "emma", "felix", "greta", "hugo", "ines", "jonas", "karla", "leo")
DISHES = (
    "burger", "curry", "dumplings", "falafel", "lasagna", "noodles", "paella", "pizza", "ramen", "salad", "soup",
    "sushi",
)  # fmt: skip
STYLES = ("blues", "disco", "folk", "funk", "jazz", "metal", "opera", "polka", "punk", "reggae", "rock", "soul")
NIGHTS = ("2", "3", "4", "5", "6")
ENTITIES = {"city": CITIES, "person": PEOPLE, "dish": DISHES, "style": STYLES, "nights": NIGHTS}

# Argument types; whatever is not listed is a string. `unit` may be left out.
INTEGERS = ("nights",)
DEFAULTS = {"unit": "celsius"}
OTHER_UNIT = "fahrenheit"


@dataclass(frozen=True)
class Wording:
    """How a request asks for one call of a function: the parameters in their order, and a clause that names them all.

    Attributes:
        parameters: names of the arguments.
        clause: with the arguments in braces.
        optional_clause: the same when the optional argument is asked for as well.
        optional: name of an argument that may be left out, with its default in DEFAULTS.
    """

    parameters: tuple[str, ...]
    clause: str
    optional: str | None = None
    optional_clause: str = ""


FUNCTIONS = {
    "get_weather": Wording(
        ("city",), "check the weather in {city}", "unit", "check the weather in {city} in {unit}"
    ),
    "book_hotel": Wording(("city", "nights"), "book a hotel in {city} for {nights}"),
    "order_dish": Wording(("dish",), "order some {dish}"),
    "call_person": Wording(("person",), "call {person}"),
    "play_music": Wording(("style",), "play some {style}"),
    "invite_person": Wording(("person", "city"), "invite {person} to {city}"),
}  # fmt: skip
OPENINGS = ("please", "today", "now")
FEWEST_CALLS, MOST_CALLS = 2, 4

# How often an agent falls into which mode, whatever its role and the others do (domains.md, section 4.2).
MODES = {
    "all": 0.15,
    "first half": 0.18,
    "second half": 0.18,
    "one": 0.15,
    "repeated": 0.08,
    "wrong": 0.10,
    "nothing": 0.12,
    "cut off": 0.04,
}
LAYOUT = ""
NEW_TOKENS = (48, 48)  # limits on new tokens, agent by agent; a coordinator has their sum
NO_CALL = "[ ]"

SPLIT_SIZES = {"train": 160, "eval": 40}
SPLIT_SEED = "mapl pocket bfcl tasks"


@dataclass(frozen=True)
class PocketCall:
    """One call that a request asks for: function and arguments, as words of the vocabulary."""

    function: str
    arguments: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.function} ( {' , '.join(f'{name} = {value}' for name, value in self.arguments)} ) ;"

    @property
    def clause(self) -> str:
        wording = FUNCTIONS[self.function]
        arguments = dict(self.arguments)
        return (wording.optional_clause if wording.optional in arguments else wording.clause).format(**arguments)

    @property
    def gold(self) -> dict[str, dict[str, list[Any]]]:
        """The gold call, as in the real rows: accepted values of every argument."""
        accepted: dict[str, list[Any]] = {name: [_typed(name, value)] for name, value in self.arguments}
        optional = FUNCTIONS[self.function].optional
        if optional and optional not in accepted:
            accepted[optional] = [DEFAULTS[optional], ""]
        return {self.function: accepted}


@dataclass(frozen=True)
class Request:
    """What a task is made of: the functions that it shows, and the calls that it asks for."""

    shown: tuple[str, ...]
    calls: tuple[PocketCall, ...]
    opening: str = field(default="please", compare=False)

    @property
    def text(self) -> str:
        clauses = [call.clause for call in self.calls]
        return f"{self.opening} {' , '.join(clauses[:-1])} and {clauses[-1]}"

    @property
    def identity(self) -> frozenset[PocketCall]:
        """Two requests for the same calls are the same task, however they are worded and ordered."""
        return frozenset(self.calls)


# Tasks ---------------------------------------------------------------------------------------------------------------


def schema_of(function: str) -> dict[str, Any]:
    """The JSON schema of a function, in the layout of the real rows."""
    wording = FUNCTIONS[function]
    properties: dict[str, Any] = {
        name: {"type": "integer" if name in INTEGERS else "string", "description": f"the {name}"}
        for name in wording.parameters
    }
    if wording.optional:
        default = DEFAULTS[wording.optional]
        properties[wording.optional] = {"type": "string", "description": f"the {wording.optional}", "default": default}
    required = list(wording.parameters)
    parameters = {"type": "dict", "properties": properties, "required": required}
    return {"name": function, "description": function.replace("_", " "), "parameters": parameters}


def draw_request(rng: random.Random) -> Request:
    """Two to four different calls of one function, or of two or three functions of which at least two are needed."""
    shown = tuple(rng.sample(list(FUNCTIONS), rng.choice((1, 1, 2, 3))))
    number = rng.randint(FEWEST_CALLS, MOST_CALLS)
    while True:
        calls = [_draw_call(rng.choice(shown), rng) for _ in range(number)]
        used = {call.function for call in calls}
        if len({str(call) for call in calls}) == number and len(used) >= min(2, len(shown)):
            return Request(shown, tuple(calls), rng.choice(OPENINGS))


def _draw_call(function: str, rng: random.Random) -> PocketCall:
    wording = FUNCTIONS[function]
    arguments = [(name, rng.choice(ENTITIES[name])) for name in wording.parameters]
    if wording.optional and rng.random() < 0.3:
        arguments.append((wording.optional, OTHER_UNIT))
    return PocketCall(function, tuple(arguments))


def _split_requests() -> dict[str, list[Request]]:
    """The requests of both splits; no two of them ask for the same calls."""
    rng = random.Random(SPLIT_SEED)
    distinct: dict[frozenset[PocketCall], Request] = {}
    while len(distinct) < sum(SPLIT_SIZES.values()):
        request = draw_request(rng)
        distinct.setdefault(request.identity, request)
    drawn = list(distinct.values())
    return {"train": drawn[: SPLIT_SIZES["train"]], "eval": drawn[SPLIT_SIZES["train"] :]}


def make_tasks(split: str, limit: int | None = None) -> list[Task]:
    """The generated BFCL tasks of one split, always the same ones in the same order.

    Args:
        split: "train" (160 tasks) or "eval" (40); no request of one is in the other.
        limit: only the first so many tasks.

    Raises:
        ValueError: for another split, or a limit that it cannot serve.
    """
    if split not in SPLIT_SIZES:
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    count = SPLIT_SIZES[split] if limit is None else limit
    if not 1 <= count <= SPLIT_SIZES[split]:
        raise ValueError(f"limit must be between 1 and {SPLIT_SIZES[split]}, got {limit}; the split is no larger")
    requests = _split_requests()[split][:count]
    return [_task(f"bfcl-pocket-{split}-{index:03d}", split, request) for index, request in enumerate(requests)]


def _task(name: str, split: str, request: Request) -> Task:
    row = {
        "id": name,
        "category": "parallel" if len(request.shown) == 1 else "parallel_multiple",
        "user_prompt": request.text,
        "function": [schema_of(function) for function in request.shown],
        "ground_truth": [call.gold for call in request.calls],
    }
    return task_of_row(row, "pocket", split)


def draw_task(rng: random.Random, reserved: frozenset) -> tuple[Task, Request]:
    """A fresh task for pretraining, never one that asks for the calls of a reserved task, and its request."""
    while True:
        request = draw_request(rng)
        if request.identity not in reserved:
            return _task("bfcl-pocket-corpus", "train", request), request


def reserved_slots() -> frozenset:
    """Identities of the train and eval tasks, which the pocket base must not have seen."""
    return frozenset(request.identity for requests in _split_requests().values() for request in requests)


def calls_of(task: Task) -> list[PocketCall]:
    """The calls that a pocket task asks for, optional arguments only where they are asked for."""
    return [
        PocketCall(function, tuple((name, str(values[0])) for name, values in arguments.items() if "" not in values))
        for gold in task.fields["ground_truth"]
        for function, arguments in gold.items()
    ]


def _typed(name: str, value: str) -> Any:
    return int(value) if name in INTEGERS else value


# Scripted answers ----------------------------------------------------------------------------------------------------


def write_calls(calls: Sequence[PocketCall]) -> str:
    return " ".join(map(str, calls)) or NO_CALL


def sample_answer(request: Request, rng: random.Random) -> str:
    """One scripted answer of one agent, independent of the others' (domains.md: the start mixture)."""
    mode = rng.choices(list(MODES), weights=list(MODES.values()))[0]
    calls, middle = request.calls, (len(request.calls) + 1) // 2
    if mode == "all":
        return write_calls(calls)
    if mode == "first half":
        return write_calls(calls[:middle])
    if mode == "second half":
        return write_calls(calls[middle:])
    if mode == "one":
        return write_calls([rng.choice(calls)])
    if mode == "repeated":
        return write_calls([rng.choice(calls)] * 2)
    if mode == "wrong":
        return write_calls([_altered(rng.choice(calls), request, rng)])
    if mode == "nothing":
        return NO_CALL
    words = str(rng.choice(calls)).split()
    return " ".join(words[: rng.randint(2, len(words) - 2)])  # without its closing bracket


def _altered(call: PocketCall, request: Request, rng: random.Random) -> PocketCall:
    """A call with a value that the request does not name, or of another function with the same first parameter."""
    name, value = call.arguments[0]
    same_kind = [f for f, wording in FUNCTIONS.items() if f != call.function and wording.parameters == (name,)]
    if same_kind and rng.random() < 0.3:
        return PocketCall(rng.choice(same_kind), ((name, value),))
    others = [other for other in ENTITIES[name] if other not in request.text.split()]
    return PocketCall(call.function, ((name, rng.choice(others)), *call.arguments[1:]))


def best_answers(task: Task, num_agents: int = 2) -> list[str]:
    """A joint answer that earns the full oracle reward on this task: the generator's self-test."""
    calls = calls_of(task)
    return [write_calls(calls[agent::num_agents]) for agent in range(num_agents)]


def copied_words(text: str, task: Task) -> tuple[int, int]:
    """How many different entity words of an answer are its own request's, and how many there are in all."""
    entities = {word for name, words in ENTITIES.items() if name not in INTEGERS for word in words}
    mentioned = entities.intersection(re.findall(r"\w+", text))
    return len(mentioned.intersection(task.fields["user_prompt"].split())), len(mentioned)


# The corpus ----------------------------------------------------------------------------------------------------------

# How often the corpus shows each prompt form; every form that an experiment may write is among them.
FORMS = {"agent": 0.44, "coordinator": 0.20, "single": 0.12, "sequential": 0.10, "discussion": 0.14}
# The same for team sizes and roles (domains.bfcl.ROLES).
TEAM_SIZES = {1: 0.05, 2: 0.70, 3: 0.25}
TEAM_ROLES = {"self_select": 0.80, "odd_even": 0.10, "split_by_order": 0.10}


def atoms() -> list[str]:
    """Texts that are one token each although they are not one plain word: none here."""
    return []


def vocabulary_texts(domain: Domain) -> Iterator[str]:
    """Texts that together hold every word of the language: fillers, functions, all prompt forms."""
    yield from (" ".join(words) for words in ENTITIES.values())
    yield from OPENINGS
    yield f"{OTHER_UNIT} {NO_CALL} and"
    for function, wording in FUNCTIONS.items():
        yield f"{function} ( {' , '.join((*wording.parameters, wording.optional or ''))} = ) ;"
        yield re.sub(r"{\w+}", "", f"{wording.clause} {wording.optional_clause}")
    for task in make_tasks("train", 10):
        yield from (write() for write in prompt_forms(domain, task, [""] * domain.num_agents).values())
    yield from (re.sub(r"{\w+}", "", role) for role in POCKET.roles.values())
    yield " ".join("123456789")


def write_example(domain: Domain, rng: random.Random, reserved: frozenset) -> tuple[str, str]:
    """One pair of prompt and scripted answer for pretraining.

    Whatever form, team size and roles, the answer follows the same uncoordinated mixture: a coordinator draws all parts
    independently, and an agent that is shown its team mates' texts does not use them.

    Args:
        domain: the BFCL domain; its team size and roles are not used, since the corpus shows all of them.
        rng: source of all choices.
        reserved: identities of tasks that must not be shown.
    """
    size, roles = (rng.choices(list(shares), list(shares.values()))[0] for shares in (TEAM_SIZES, TEAM_ROLES))
    team = type(domain)(num_agents=size, roles=roles)
    task, request = draw_task(rng, reserved)
    drafts, answers = ([sample_answer(request, rng) for _ in range(size)] for _ in range(2))
    form = rng.choices(list(FORMS), weights=list(FORMS.values()))[0]
    if form in ("coordinator", "single"):
        return prompt_forms(team, task, drafts)[form](), team.join(answers)
    agent = rng.randrange(size)
    return prompt_forms(team, task, drafts)[f"{form} {agent}"](), answers[agent]
