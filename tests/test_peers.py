"""Claims about the comparison with the peer, as far as they hold without the peer's environment."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def modules_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's files import each other as they do when it runs as a program."""
    monkeypatch.syspath_prepend(str(FOLDER))


def measurement(collect_seconds: float, update_seconds: float, **other):
    from work import Measurement

    values = {"versions": {}, "trained_parameters": 1000, "prompt_tokens": [80, 90], "collected": 320}
    values |= {"sampled_tokens": 9600, "updated": 64, "loaded_mib": 200.0, "peak_mib": 300.0}
    return Measurement(collect_seconds=collect_seconds, update_seconds=update_seconds, **values | other)


def test_the_ratio_is_taken_within_each_round_and_their_median_is_told():
    """Rates by hand: collection 40, 32 and 64 samples a second against 4; update 32, 8 and 64 against 4, 2 and 4."""
    from comparison import compare

    rounds = [
        (measurement(8.0, 2.0), measurement(80.0, 16.0)),
        (measurement(10.0, 8.0), measurement(80.0, 32.0)),
        (measurement(5.0, 1.0), measurement(80.0, 16.0)),
    ]
    collection, update, *_ = compare("madpo", rounds)
    assert collection.startswith("madpo, collection: 10.0 times as fast (rounds from 8.0 to 16.0;")
    assert collection.endswith("ours 40.00 samples/s, comlrl 4.00")
    assert update.startswith("madpo, update: 8.0 times as fast (rounds from 4.0 to 16.0;")
    assert update.endswith("ours 32.00 samples/s, comlrl 4.00")


def test_the_largest_peak_of_all_rounds_is_told_with_the_memory_before_the_work():
    from comparison import compare

    rounds = [
        (measurement(1.0, 1.0, peak_mib=310.0, loaded_mib=210.0), measurement(1.0, 1.0, peak_mib=900.0)),
        (measurement(1.0, 1.0, peak_mib=305.0, loaded_mib=205.0), measurement(1.0, 1.0, peak_mib=800.0)),
    ]
    (memory,) = [line for line in compare("magrpo", rounds) if "peak memory" in line]
    assert memory == ("magrpo, peak memory: ours 310 MiB (210 before the work); comlrl 900 MiB (200 before the work)")


@pytest.mark.parametrize("other", [{"prompt_tokens": [80, 91]}, {"collected": 319}])
def test_different_work_is_not_compared(other: dict):
    from comparison import compare

    with pytest.raises(ValueError, match="the sides did different work"):
        compare("madpo", [(measurement(1.0, 1.0), measurement(1.0, 1.0, **other))])


def test_the_work_survives_the_command_line_and_no_post_is_in_two_tasks():
    from work import Work

    work = Work("madpo", num_tasks=4, posts=3)
    assert Work(**json.loads(json.dumps(asdict(work)))) == work
    written = [task.fields["post"] for task in work.tasks()]
    posts = [post["post"] for post in map(lambda task: task.fields, work.domain.load_tasks("train", "pocket", 12))]
    assert len(written) == 4 and all(sum(post in text for text in written) == 1 for post in posts)
    assert all(text.count("SUBREDDIT:") == 3 for text in written)


@pytest.mark.parametrize(
    ("method", "collected", "updated"),
    [
        ("madpo", 2 * 2 * 6, 2 * 2 * 2),  # tasks, sides, m; two pairs of two for each task
        ("magrpo", 2 * 4, 2 * 4),  # tasks, G
    ],
)
def test_this_side_plays_and_learns_from_as_many_answers_as_the_work_says(method: str, collected: int, updated: int):
    from ours import measure
    from work import Work

    done = measure(Work(method, size="1x", num_tasks=2, posts=1, samples=6, pairs=2, threads=1))
    assert (done.collected, done.updated) == (collected, updated)
    assert 0 < done.sampled_tokens <= 2 * 48 * collected  # two agents, 48 tokens each
    assert len(done.prompt_tokens) == 4 and done.collect_seconds > 0 and done.update_seconds > 0
    assert done.peak_mib >= done.loaded_mib > 0
