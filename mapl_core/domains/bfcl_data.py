"""Rows of BFCL: the registry package's files and the paper's derivation of them on the hub.

A row has the fields id, category, user_prompt, function (schemas) and ground_truth, a list of gold calls
`{name: {argument: [accepted values]}}`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mapl_core.wheels import WheelData, read_wheel_data

Row = dict[str, Any]
CATEGORIES = ("parallel", "parallel_multiple")
SPLIT_SIZES = {"train": 160, "eval": 40}

PACKAGE = WheelData(
    requirement="bfcl-eval==2026.3.23",
    package="bfcl_eval",
    size="2 MB",
    digests={
        "data/BFCL_v4_parallel.json": "19f51a82eff42e5d62541aa500115a056eb78f437c2ba1f10415fd7c8e5dda84",
        "data/BFCL_v4_parallel_multiple.json": "8863ea8433239f55c5f016154cf0830853c89f693c6ea270396a2fa121960579",
        "data/possible_answer/BFCL_v4_parallel.json": (
            "8a6aa19c1adddc6a5a2f7e40f9dbf30cc7e95815e7b830c90589ab318229e0f0"
        ),
        "data/possible_answer/BFCL_v4_parallel_multiple.json": (
            "5ebf24f458c1f16300c05505d83d6f0a1b68b79be273a033febd0d4f840507e3"
        ),
    },
)
SHUFFLE_SEED = 42
TRAIN_SHARE = 0.8

HUB_DATASET = "OpenMLRL/BFCL-V4-Parallel-Native"
HUB_COMMIT_START = "13fe055"  # of the full hash, which is resolved at the first download and required from then on


def small_rows(split: str) -> list[Row]:
    """The package's 400 rows, shuffled with a fixed seed and divided 80 to 20; of these the first 160 and 40.

    Raises:
        FileNotFoundError: if the package is not here and cannot be downloaded.
        ValueError: if what is here is damaged or another version.
    """
    rows = package_rows()
    random.Random(SHUFFLE_SEED).shuffle(rows)
    cut = round(TRAIN_SHARE * len(rows))
    return {"train": rows[:cut], "eval": rows[cut:]}[split][: SPLIT_SIZES[split]]


def package_rows() -> list[Row]:
    """All rows of both categories, in the order of the package's files."""
    files = read_wheel_data(PACKAGE, _cache() / "wheels")
    rows = []
    for category in CATEGORIES:
        name = f"BFCL_v4_{category}.json"
        answers = {
            answer["id"]: answer["ground_truth"] for answer in _json_lines(files[f"data/possible_answer/{name}"])
        }
        rows += [
            {
                "id": question["id"],
                "category": category,
                "user_prompt": question["question"][0][0]["content"],
                "function": question["function"],
                "ground_truth": answers[question["id"]],
            }
            for question in _json_lines(files[f"data/{name}"])
        ]
    return rows


def hub_rows(split: str) -> list[Row]:
    """The paper's rows: the first 160 or 40 of the hub's split, of these the two parallel categories.

    Raises:
        ConnectionError: if the hub's rows cannot be had.
        ModuleNotFoundError: if the package datasets is missing.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "source 'paper' needs the package datasets; install it with: pip install datasets"
        ) from error
    try:
        revision = hub_revision()
        # Lines of text, decoded here: Arrow has no type for lists of mixed values, and the JSON reader of datasets
        # 4.8 turned an accepted value of 8.854e-12 into 0.0.
        file = f"hf://datasets/{HUB_DATASET}@{revision}/{split}.jsonl"
        lines = load_dataset("text", data_files={split: file}, split=split)
    except Exception as error:  # the hub client fails in many ways: every one is reported with its cause
        raise ConnectionError(
            f"{HUB_DATASET} at commit {HUB_COMMIT_START}... could not be loaded ({type(error).__name__}: {error}). "
            "Unset HF_HUB_OFFLINE and go online, or copy a filled hub cache here and name it in HF_HOME, "
            "or choose another source: 'pocket' needs no hub, and 'small' a package that is downloaded once."
        ) from error
    rows = [json.loads(line["text"]) for line in lines if line["text"].strip()][: SPLIT_SIZES[split]]
    return [{**row, "category": row["official_category"]} for row in rows if row.get("official_category") in CATEGORIES]


def hub_revision() -> str:
    """The full hash of the pinned commit: noted in the cache folder, or asked of the hub once and then noted."""
    note = _cache() / "hub" / f"{HUB_DATASET.replace('/', '--')}.commit"
    if note.is_file():
        revision = note.read_text(encoding="utf-8").strip()
        if not _is_pinned(revision):
            raise ValueError(f"{note} holds {revision!r}, not a commit {HUB_COMMIT_START}...; delete it")
        return revision
    from huggingface_hub import HfApi

    commits = [commit.commit_id for commit in HfApi().list_repo_commits(HUB_DATASET, repo_type="dataset")]
    revision = next((commit for commit in commits if _is_pinned(commit)), None)
    if revision is None:
        raise ValueError(f"{HUB_DATASET} has no commit {HUB_COMMIT_START}... among {len(commits)}")
    note.parent.mkdir(parents=True, exist_ok=True)
    unfinished = note.with_name(f"{note.name}.{os.getpid()}")
    unfinished.write_text(revision + "\n", encoding="utf-8")
    os.replace(unfinished, note)
    return revision


def fault(row: Row) -> str | None:
    """Why a row cannot be a task, or None for a good one."""
    for name, kind in (("user_prompt", str), ("function", list), ("ground_truth", list)):
        if not isinstance(row.get(name), kind) or not row[name]:
            return f"{name} is empty or {type(row.get(name)).__name__}, not a {kind.__name__}"
    schemas: dict[str, Any] = {}
    for schema in row["function"]:
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            return "a schema without a name"
        if schemas.setdefault(schema["name"], schema) != schema:
            return f"two different schemas of {schema['name']}"
    for call in row["ground_truth"]:
        if not isinstance(call, dict) or len(call) != 1 or not isinstance(next(iter(call.values())), dict):
            return "a gold call that is no {name: {argument: accepted values}}"
        if (name := next(iter(call))) not in schemas:
            return f"gold call of {name}, which has no schema"
    if len(row["ground_truth"]) < 2:
        return "only one gold call: nothing to share out"
    return None


def accepted_rows(rows: Sequence[Row], describe: Callable[[int], str]) -> tuple[list[Row], list[tuple[str, str]]]:
    """The rows that can be tasks, and id and reason of the others.

    Args:
        rows: as read; schemas that a row repeats are merged.
        describe: names a row without an id by its number.
    """
    accepted, refused, seen = [], [], set()
    for number, row in enumerate(rows):
        has_id = isinstance(row.get("id"), str) and row["id"]
        row_id = row["id"] if has_id else describe(number)
        reason = f"the id {row_id} occurs twice" if row_id in seen else fault(row)
        seen.add(row_id)
        if reason:
            refused.append((row_id, reason))
        else:
            merged = {schema["name"]: schema for schema in row["function"]}
            accepted.append({**row, "id": row_id, "function": list(merged.values())})
    return accepted, refused


def _json_lines(content: bytes) -> Iterator[Any]:
    return (json.loads(line) for line in content.splitlines() if line.strip())


def _is_pinned(revision: str) -> bool:
    return revision.startswith(HUB_COMMIT_START) and len(revision) == 40 and revision.isalnum()


def _cache() -> Path:
    from mapl_core.pocket.common import cache_dir

    return cache_dir()
