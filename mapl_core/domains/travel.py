"""Travel: a team plans a trip, one agent the logistics, the other the activities (paper, section 5.1)."""

from __future__ import annotations

import ast
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mapl_core.domains.base import QUOTE, Domain, Skeleton, Task, Turn
from mapl_core.domains.travel_prompts import ROLE_NAMES, catalogue_text, output_rule, role_text, task_text
from mapl_core.domains.travel_queries import task_fields
from mapl_core.rewards import Reward, travel_reward
from mapl_core.rewards.text import clean_response
from mapl_core.rewards.travel import MAX_REWARD, MIN_REWARD, Outcome, judge
from mapl_core.rewards.travel_actions import TEAMS, owned_slots, write_action
from mapl_core.rewards.travel_trip import Trip, read_trip

HUB_DATASET = "osunlp/TravelPlanner"
HUB_REVISION = "8736504ecfc31b7f8b7e40122873c337e83fff7c"
HUB_CONFIGURATION = "validation"  # the split has the same name
HUB_COLUMNS = ("org", "dest", "days", "visiting_city_number", "date", "people_number", "local_constraint", "budget")
LEVELS = ("easy", "medium")
MOST_DAYS, MOST_CITIES = 5, 2  # filters of the paper
SPLIT_SEED, EVAL_ROWS, TRAIN_ROWS = 42, 5, 15  # rows of each cell of days and level

PLANS_FILE = "travelplanner_train_plans.jsonl"
DATA_SETTING = "MAPL_DATA_DIR"
ROWS_OF_A_LEVEL = 15  # of the 45 rows of the train split: 15 easy, then 15 medium, then 15 hard
EVERY_EVAL_ROW = 5  # of the local rows: the last of every five

SOURCES = ("pocket", "small", "paper")
SPLITS = ("train", "eval")
VALUE_TOKENS = 32  # most tokens of one value where the JSON around it is forced
SYSTEM_MESSAGE = "You plan trips with what the given catalogue holds, and you answer in JSON."
NOT_OFFICIAL = "not the official TravelPlanner benchmark"


class TravelDomain(Domain):
    """Two agents (logistics, activities) or three (logistics, dining, sightseeing), one turn, one merged itinerary.

    Attributes:
        refused: rows that `load_tasks` would not take, as (id, reason), by (source, split); for the run manifest.
    """

    name = "travel"
    horizon = 1
    max_reward = MAX_REWARD
    min_reward = MIN_REWARD
    headline = "pass"

    def __init__(
        self,
        num_agents: int = 2,
        catalogue_tokens: int | None = 3000,
        days: int = 3,
        structured: bool = False,
    ) -> None:
        """
        Args:
            num_agents: 2 or 3.
            catalogue_tokens: about how many tokens of catalogue each agent reads; None for the whole catalogue. What
                the cheapest feasible plan needs is never left out.
            days: length of the pocket trips, 3 or 5; the other sources have both.
            structured: force the JSON around the values, so that the model chooses values, not syntax. Pocket models
                write values alone in either case.
        """
        if num_agents not in TEAMS:
            raise ValueError(f"num_agents is {num_agents}; Travel has teams of {' and '.join(map(str, TEAMS))}")
        if catalogue_tokens is not None and catalogue_tokens < 1:
            raise ValueError(f"catalogue_tokens is {catalogue_tokens}; it must be positive, or None for no limit")
        if days not in (3, 5):
            raise ValueError(f"days is {days}; pocket trips have 3 or 5 days")
        self.num_agents = num_agents
        self.catalogue_tokens = catalogue_tokens
        self.days = days
        self.structured = structured
        self.refused: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def load_tasks(self, split: str, source: str, limit: int | None = None) -> list[Task]:
        """Trips of one split, in the order of their source; rows that cannot be scored go to `refused`.

        Args:
            split: "train" or "eval".
            source: "pocket" (generated), "small" (TravelPlanner's train rows in the folder MAPL_DATA_DIR) or "paper"
                (its validation rows, from the hub).
            limit: only the first so many tasks.

        Raises:
            ValueError: for an unknown split or source, a limit that the split cannot serve, or a malformed data file.
            FileNotFoundError: if the local rows are missing.
            ConnectionError: if the hub's rows cannot be had.
        """
        _check_choice("split", split, SPLITS)
        _check_choice("source", source, SOURCES)
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {limit}")
        if source == "pocket":
            from mapl_core.pocket.travel import make_tasks

            self.refused[source, split] = []
            return make_tasks(split, limit, days=self.days)
        rows = list(_local_rows(split) if source == "small" else _hub_rows(split))
        if limit is not None and limit > len(rows):
            raise ValueError(f"limit {limit} exceeds the {len(rows)} {split} rows of source {source!r}; lower it")
        tasks, refused = [], []
        for row_id, row in rows:
            try:
                fields = task_fields(**row)
                read_trip(fields)
                tasks.append(Task(row_id, source, split, fields))
            except (ValueError, KeyError) as error:
                refused.append((row_id, str(error)))
        self.refused[source, split] = refused
        return tasks[:limit]

    def provenance(self, source: str) -> dict[str, str]:
        """Where tasks come from, in words, for manifests and captions."""
        _check_choice("source", source, SOURCES)
        data = {
            "pocket": f"generated miniature trips of {self.days} days (mapl_core.pocket.travel)",
            "small": f"TravelPlanner's train split, easy and medium rows of at most {MOST_DAYS} days ({DATA_SETTING})",
            "paper": f"{HUB_DATASET} at {HUB_REVISION}, {HUB_CONFIGURATION}: at most {MOST_DAYS} days and "
            f"{MOST_CITIES} cities, {' and '.join(LEVELS)}, split with seed {SPLIT_SEED} (CC-BY-4.0)",
        }
        decoding = "forced JSON skeleton" if self.structured and source != "pocket" else "free"
        return {"data": data[source], "decoding": decoding, "evaluation": f"mapl_core.rewards.travel, {NOT_OFFICIAL}"}

    def trip(self, task: Task) -> Trip:
        """The task as the oracle reads it: catalogue, days, constraints."""
        return read_trip(task.fields)

    # Prompts ---------------------------------------------------------------------------------------------------------

    def task_text(self, task: Task) -> str:
        if task.source == "pocket":
            from mapl_core.pocket.travel import task_words

            return task_words(task)
        return task_text(task.fields["query"], self.trip(task), self.num_agents)

    def role_text(self, agent: int, task: Task, history: Sequence[Turn] = ()) -> str:
        _refuse_history(history)
        if task.source == "pocket":
            from mapl_core.pocket.travel import role_words

            return role_words(task, agent, self.num_agents)
        return role_text(self.trip(task), agent, self.num_agents, self.catalogue_tokens)

    def system_message(self, task: Task) -> str:
        return "" if task.source == "pocket" else SYSTEM_MESSAGE

    def coordinator_prompt(self, task: Task, history: Sequence[Turn] = ()) -> str:
        _refuse_history(history)
        roles = "\n\n".join(
            f"<agent_{agent}>: {self.role_text(agent, task)}" if task.source != "pocket" else
            f"<agent_{agent}> {self.role_text(agent, task)}"
            for agent in range(self.num_agents)
        )  # fmt: skip
        rule = "answer for all ." if task.source == "pocket" else _joint_rule(self.num_agents)
        return f"{self.task_text(task)}\n\n{roles}\n\n{rule}"

    def single_prompt(self, task: Task) -> str:
        """The whole task for one agent that writes all slots in tagged sections."""
        if task.source == "pocket":
            from mapl_core.pocket.travel import single_words

            return f"{self.task_text(task)}\n\n{single_words(task, self.num_agents)}"
        trip, owned = self.trip(task), TEAMS[self.num_agents]
        catalogue = catalogue_text(
            trip,
            [name for fields in owned for name in fields],
            None if self.catalogue_tokens is None else self.catalogue_tokens * self.num_agents,
        )
        return f"{self.task_text(task)}\n\n{catalogue}\n\n{_joint_rule(self.num_agents)}"

    def sequential_prompt(self, agent: int, task: Task, previous: Sequence[str]) -> str:
        """Agent `agent`'s prompt when the agents before it, and only they, have written their final parts.

        Raises:
            ValueError: if `previous` does not hold exactly the parts of the agents 0 .. agent - 1.
        """
        if len(previous) != agent:
            raise ValueError(f"agent {agent} follows {agent} earlier parts, got {len(previous)}")
        return self.prompts(task)[agent] + "".join(
            _shown(task, "wrote", other, text) for other, text in enumerate(previous)
        )

    def discussion_prompts(self, task: Task, drafts: Sequence[str]) -> list[str]:
        """Every agent's prompt in a round of discussion: its role, the others' drafts and its own.

        Raises:
            ValueError: if there is not one draft per agent.
        """
        if len(drafts) != self.num_agents:
            raise ValueError(f"expected {self.num_agents} drafts, one per agent, got {len(drafts)}")
        again = " write it again ." if task.source == "pocket" else "\n\nWrite your answer again."
        rounds = []
        for agent, prompt in enumerate(self.prompts(task)):
            others = [_shown(task, "wrote", other, text) for other, text in enumerate(drafts) if other != agent]
            rounds.append(prompt + "".join(others) + _shown(task, "draft", agent, drafts[agent]) + again)
        return rounds

    def skeleton(self, agent: int, task: Task) -> Skeleton | None:
        """The JSON of an agent's action without its values, where the option `structured` is on."""
        if not self.structured or task.source == "pocket":
            return None
        gap = "\x7f"  # JSON writes it as it is
        slots = owned_slots(agent, self.trip(task).days, self.num_agents)
        text = write_action(agent, [(slot, gap) for slot in slots])
        return Skeleton(tuple(text.split(gap + QUOTE)), VALUE_TOKENS)

    # Scoring ---------------------------------------------------------------------------------------------------------

    def render(self, responses: Sequence[str | None], task: Task) -> list[str | None]:
        """The texts that the oracle reads: a pocket model's words become the JSON that a large model would write."""
        if task.source != "pocket":
            return list(responses)
        from mapl_core.pocket.travel import render

        return [render(text, agent, task, self.num_agents) for agent, text in enumerate(responses)]

    def reward(self, responses: Sequence[str | None], task: Task) -> Reward:
        return travel_reward(self._texts(responses, task), task, num_agents=self.num_agents)

    def judge(self, responses: Sequence[str | None], task: Task) -> Outcome:
        """Everything that the oracle finds: the itinerary, each check, each rate."""
        return judge(self._texts(responses, task), task, num_agents=self.num_agents)

    def metrics(self, responses: Sequence[str | None], task: Task) -> dict[str, float]:
        """Pass and success, the shares that the reward is made of, and the plan's cost in dollars."""
        outcome = self.judge(responses, task)
        evaluation = outcome.evaluation
        return {
            "pass": float(evaluation.passes),
            "success": float(evaluation.succeeds),
            "V": outcome.validity,
            "J": float(outcome.all_strict),
            "B": outcome.balance,
            "g": evaluation.grounding,
            "Q": outcome.quality,
            "C": outcome.coordination,
            "P": outcome.protocol,
            "E": outcome.recovered,
            "U": float(outcome.complete_success),
            "cost": float(evaluation.cost),
        }

    def _texts(self, responses: Sequence[str | None], task: Task) -> Any:
        """Responses for the oracle; what is no list of texts is handed on as it is, for the oracle to refuse."""
        well_typed = isinstance(responses, list | tuple) and len(responses) == self.num_agents
        if not well_typed or not all(text is None or isinstance(text, str) for text in responses):
            return responses
        return self.render(responses, task)


# Rows ----------------------------------------------------------------------------------------------------------------


def data_file(name: str) -> Path:
    """A file of the folder that the setting MAPL_DATA_DIR names.

    Raises:
        FileNotFoundError: naming the file and the setting, if there is none.
    """
    folder = os.environ.get(DATA_SETTING)
    if not folder or not (Path(folder) / name).is_file():
        where = f"{folder} holds no such file" if folder else "it is not set"
        raise FileNotFoundError(
            f"source 'small' reads {name} from the folder that {DATA_SETTING} names, and {where}; get TravelPlanner's "
            f"train rows, or choose another source: 'pocket' needs no data"
        )
    return Path(folder) / name


def read_local_row(line: str, where: str) -> dict[str, str]:
    """Query and reference information of one line of the local file; the human plan in it is not read.

    Raises:
        ValueError: naming the line, if it is not a conversation with the expected user message.
    """
    try:
        messages = json.loads(line)["messages"]
        text = next(message["content"] for message in messages if message["role"] == "user")
        material, found, query = text.rpartition("\nQuery:")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{where}: not a conversation with a user message ({type(error).__name__}: {error})") from None
    start = material.find("[")
    if not found or start < 0:
        raise ValueError(f"{where}: the user message does not hold 'Given Information:[...]' and 'Query:'")
    return {"query": query.strip(), "reference": material[start:].strip()}


def _local_rows(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Easy and medium rows of at most five days of one split, in the order of the file."""
    path = data_file(PLANS_FILE)
    lines = path.read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        level = index // ROWS_OF_A_LEVEL  # 0 easy, 1 medium, 2 hard
        evaluates = index % EVERY_EVAL_ROW == EVERY_EVAL_ROW - 1
        if level >= len(LEVELS) or evaluates != (split == "eval"):
            continue
        row = read_local_row(line, f"{path}, line {index + 1}")
        try:
            fields = task_fields(**row)
            wanted = fields["days"] <= MOST_DAYS and fields["visiting_city_number"] <= MOST_CITIES
        except ValueError:
            wanted = True  # whoever makes the task finds the fault again, and reports the row as refused
        if wanted:
            yield f"travelplanner/train/{index}", row


def _hub_rows(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The paper's rows of one split, in the order of the data set."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "source 'paper' needs the package datasets; install it with: pip install datasets"
        ) from error
    try:
        rows = list(load_dataset(HUB_DATASET, HUB_CONFIGURATION, split=HUB_CONFIGURATION, revision=HUB_REVISION))
    except Exception as error:  # the hub client fails in many ways: every one is reported with its cause
        raise ConnectionError(
            f"{HUB_DATASET} at revision {HUB_REVISION} could not be loaded ({type(error).__name__}: {error}). "
            "Unset HF_HUB_OFFLINE and go online, or copy a filled hub cache here and name it in HF_HOME, "
            "or choose another source: 'small' and 'pocket' need no hub."
        ) from error
    for index in split_rows(rows)[split]:
        row = rows[index]
        yield (
            f"{HUB_DATASET}/{HUB_CONFIGURATION}/{index}",
            {
                "query": str(row.get("query") or ""),
                "reference": row.get("reference_information"),
                "structured": {name: row.get(name) for name in HUB_COLUMNS},
            },
        )


def split_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Indices of the evaluation and training rows: the paper's filters, stratified by days and level.

    Of every cell of days and level, in ascending order, the rows are shuffled by one generator; the first five are for
    evaluation and the next fifteen for training. Both splits keep the order of the data set.
    """
    cells: dict[tuple[int, str], list[int]] = {}
    for index, row in enumerate(rows):
        days, level = int(row["days"]), str(row["level"])
        if days <= MOST_DAYS and int(row["visiting_city_number"]) <= MOST_CITIES and level in LEVELS:
            cells.setdefault((days, level), []).append(index)
    rng = random.Random(SPLIT_SEED)
    split: dict[str, list[int]] = {"train": [], "eval": []}
    for _, members in sorted(cells.items()):
        rng.shuffle(members)
        split["eval"] += members[:EVAL_ROWS]
        split["train"] += members[EVAL_ROWS : EVAL_ROWS + TRAIN_ROWS]
    return {name: sorted(indices) for name, indices in split.items()}


def human_plan(message: str) -> dict[tuple[int, str], str]:
    """Slots of an annotated plan (a list literal of day objects), for tests and analyses; never part of a task."""
    return {
        (int(day["days"]), name): value
        for day in ast.literal_eval(message)
        if day
        for name, value in day.items()
        if name != "days"
    }


# Texts ---------------------------------------------------------------------------------------------------------------


def _joint_rule(num_agents: int) -> str:
    """How one model writes the answers of all agents."""
    sections = "\n".join(
        f"<agent_{agent}>: {ROLE_NAMES[owned]}. {output_rule(agent, owned)}"
        for agent, owned in enumerate(TEAMS[num_agents])
    )
    form = "\n".join(f"<agent_{agent}> one JSON object </agent_{agent}>" for agent in range(num_agents))
    return f"Write the answers of all agents, each in its section:\n{sections}\n\nAnswer in exactly this form:\n{form}"


def _shown(task: Task, form: str, agent: int, text: str) -> str:
    """An agent's text as another prompt shows it: without its thinking and outer white space."""
    text = clean_response(text).strip()
    if task.source == "pocket":
        return f" <agent_{agent}> : {text} ." if form == "wrote" else f" your draft : {text} ."
    return f"\n\nAgent {agent} wrote:\n{text}" if form == "wrote" else f"\n\nYour draft was:\n{text}"


def _refuse_history(history: Sequence[Turn]) -> None:
    if history:
        raise ValueError(f"Travel has one turn and no feedback, got {len(history)} earlier turns")


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
