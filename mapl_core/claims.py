"""The claims of the paper's text as data: which rows are compared, in which metric, and how many parts must hold.

A claim is requirements, each a number of parts of which at least so many must hold; a part (one domain) is one or more
comparisons, all of which must hold. A comparison takes the best of some rows minus the best of others and asks on which
side of zero (superiority), or of a margin (equivalence), its 95 % interval lies. scoreboard.py gives the verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mapl_core.results import ResultError
from mapl_core.runs import DOMAIN_NAMES, METHOD_NAMES, PARADIGM_NAMES, Results, Run
from mapl_core.tables import COLUMNS

EQUIVALENCE_POINTS = {"pocket": 3.0}  # margin of claim 2; one point in every other profile


# ---------------------------------------------------------------------------------------------------------------------
# The form of a claim
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Select:
    """Which runs make a row: those of Table 1, or those of another experiment with other settings.

    Attributes:
        paradigm: empty for a method that has only one.
        experiment: of the runs that differ from Table 1's; they are told apart by `comparator` and `buffer` as
            metrics.csv names them, empty for any. Table 1's own runs belong to it too where they have these settings.
    """

    method: str
    paradigm: str = ""
    experiment: str = ""
    comparator: str = ""
    buffer: str = ""

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, self.setting)))

    @property
    def name(self) -> str:
        return METHOD_NAMES.get(self.method, self.method)

    @property
    def setting(self) -> str:
        """What tells it apart from other rows of its method."""
        paradigm = PARADIGM_NAMES.get(self.paradigm, self.paradigm) if self.method in METHODS else ""
        comparator = f"{self.comparator} comparator" if self.comparator else ""
        return ", ".join(filter(None, (paradigm, comparator, self.buffer)))

    def runs(self, results: Results, domain: str) -> dict[int, Run]:
        """By seed; Table 1's own run comes first. Raises ResultError if two others of one seed fit."""
        fitting = [run for run in results.by_method.get((domain, self.method), ()) if self._fits(run)]
        found = {run.seed: run for run in fitting if run.is_default}
        for run in fitting:
            other = found.setdefault(run.seed, run)
            if other is not run and not other.is_default:
                raise ResultError(f"{other.name} and {run.name} are both {self.label}; remove one")
        return found

    def _fits(self, run: Run) -> bool:
        row = run.metrics[0]
        belongs = run.is_default or (self.experiment and row.experiment == self.experiment)
        wanted = {"paradigm": self.paradigm, "comparator": self.comparator, "buffer": self.buffer}
        return bool(belongs) and all(getattr(row, name) == value for name, value in wanted.items() if value)


Mix = tuple[tuple[float, Select], ...]  # a weighted sum of rows; mostly one row with weight 1


@dataclass(frozen=True)
class Comparison:
    """Best of `ours` minus best of `others` in one metric; with a margin (in points) an equivalence."""

    domain: str
    metric: str
    ours: tuple[Mix, ...]
    others: tuple[Mix, ...]
    margin: float | None = None

    @property
    def label(self) -> str:
        return f"{name_side(self.ours)} minus {name_side(self.others)}"


@dataclass(frozen=True)
class Requirement:
    """At least `needed` of the named parts must hold; a part holds if all its comparisons do."""

    parts: Mapping[str, tuple[Comparison, ...]]
    needed: int


@dataclass(frozen=True)
class Claim:
    """One claim of the paper's text.

    Attributes:
        kind: S (superiority), E (equivalence) or C (count), as in the plan of the experiments.
        experiment: whose runs it needs.
        requirements: all must be met; empty where those runs need settings that metrics.csv does not name yet.
    """

    number: int
    text: str
    kind: str
    experiment: str
    requirements: tuple[Requirement, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# The claims
# ---------------------------------------------------------------------------------------------------------------------

HEADLINE = {domain: columns[0].metric for domain, columns in COLUMNS.items()}
PARADIGMS = ("dec-dec", "cen-cen", "dec-cen")
METHODS = ("marlhf", "madpo")
TEST_TIME = (Select("untrained", "dec-dec"), Select("sequential"), Select("discussion"))
SINGLE = tuple(Select(name) for name in ("single_raw", "single_grpo", "single_ppo", "single_dpo"))
MARL = tuple(Select(name) for name in ("magrpo", "collm_cc", "collm_dc"))
MAPL = tuple(Select(method, paradigm) for method in METHODS for paradigm in PARADIGMS)


def claims(profile: str) -> list[Claim]:
    """The twenty claims, in the order of the paper; the margin of claim 2 depends on the profile."""
    margin = EQUIVALENCE_POINTS.get(profile, 1.0)
    every, early = tuple(HEADLINE), ("tldr", "coophe", "bfcl")
    dec_dec = {method: Select(method, "dec-dec") for method in METHODS}
    return [
        _claim(
            1,
            "MAPL's best configuration beats every test-time protocol",
            "S, 4 of 4 domains",
            "table1",
            _all(_best(domain, MAPL, TEST_TIME) for domain in every),
        ),
        _claim(
            2,
            f"MAPL's best comes within {margin:g} point{'' if margin == 1 else 's'} of MAGRPO, on either side, "
            "on TLDR score and Travel pass",
            "E, both",
            "table1",
            _all(_best(domain, MAPL, MARL[:1], margin=margin) for domain in ("tldr", "travel")),
        ),
        _claim(
            3,
            "MARLHF Dec-Dec has a higher call rate than MAGRPO on CoopHE and a higher success on Travel",
            "S, both",
            "table1",
            _all(
                [
                    _best("coophe", (dec_dec["marlhf"],), MARL[:1], metric="call"),
                    _best("travel", (dec_dec["marlhf"],), MARL[:1], metric="success"),
                ]
            ),
        ),
        _claim(
            4,
            "Cen-Cen is the best paradigm for both methods (MADPO on TLDR excepted, as in the paper)",
            "C, 3 of 4 domains",
            "table1",
            _count(3, (_best_paradigm(method, domain) for domain in every for method in _counted(domain))),
        ),
        _claim(
            5,
            "Dec-Cen is worse than Dec-Dec for both methods, more so for MARLHF",
            "C, 3 of 4 domains",
            "table1",
            _count(3, (step for domain in every for step in _dec_cen_steps(domain))),
        ),
        _claim(
            6,
            "MARLHF beats MADPO, on average over the paradigms",
            "C, 3 of 4 domains",
            "table1",
            _count(3, (Comparison(domain, HEADLINE[domain], *_averages()) for domain in every)),
        ),
        _claim(
            7,
            "An online buffer beats an offline one on TLDR, CoopHE and BFCL, for both methods",
            "S, all three",
            "table2a",
            _all(_buffers(domain, method, "online", "offline", "table2a") for domain in early for method in METHODS),
        ),
        _claim(
            8,
            "A decaying buffer beats an online one for both methods, more so for MARLHF",
            "C, 3 of 4 domains",
            "table2a",
            _count(3, (step for domain in every for step in _decay_steps(domain))),
        ),
        _claim(
            9,
            "A comparator of the agents' size beats a 4x one on TLDR; a larger one wins in at most 2 of 4 domains",
            "S and C",
            "table2b",
        ),
        _claim(
            10,
            "MADPO gains more than MARLHF from an external comparator on CoopHE, BFCL and Travel",
            "S, all three",
            "table2b",
        ),
        _claim(11, "MAGRPO beats CoLLM-CC and CoLLM-DC inside MARLHF in every domain", "S, 4 of 4 domains", "table2c"),
        _claim(
            12,
            "More offline data helps on TLDR and BFCL, makes no difference on CoopHE (3 points), and hurts beyond 120 "
            "pairs on Travel",
            "S and E",
            "figure5",
        ),
        _claim(
            13,
            "Older data (delay 3 against 0) hurts on CoopHE and BFCL, for both methods",
            "S, both",
            "figure6",
            _all(
                _buffers(domain, method, "delay 0", "delay 3", "figure6")
                for domain in ("coophe", "bfcl")
                for method in METHODS
            ),
        ),
        _claim(
            14,
            "The best lambda is above 0.5 for MARLHF in all domains and at most 0.2 for MADPO in most",
            "C, 4 and 3 of 4 domains",
            "figure6",
            _all((_lambdas(domain, "marlhf", (0.8, 1.0), (0.0, 0.2, 0.5)) for domain in every), ", MARLHF"),
            _count(3, (_lambdas(domain, "madpo", (0.0, 0.2), (0.5, 0.8, 1.0)) for domain in every), ", MADPO"),
        ),
        _claim(
            15,
            "A later comparator checkpoint (current against raw) helps both methods on TLDR, CoopHE and BFCL",
            "S, all three",
            "figure8",
            _all(_comparators(domain, method, "current", "raw") for domain in early for method in METHODS),
        ),
        _claim(
            16,
            "Larger agents gain less from training on TLDR; performance rises with size on BFCL and Travel",
            "S, all three",
            "figure10",
        ),
        _claim(17, "Trained teams of three are worse than two on BFCL and better on Travel", "S, both", "table5"),
        _claim(
            18,
            "The best MAPL team beats the best single agent on CoopHE and Travel",
            "S, both",
            "table1",
            _all(_best(domain, MAPL, SINGLE) for domain in ("coophe", "travel")),
        ),
        _claim(
            19,
            "MARL with the oracle reward is best on TLDR score and on CoopHE and Travel pass",
            "S, all three",
            "table1",
            _all(_best(domain, MARL, TEST_TIME + SINGLE + MAPL) for domain in ("tldr", "coophe", "travel")),
        ),
        _claim(
            20,
            "A trained Dec-Dec team beats the larger raw model on CoopHE",
            "S",
            "table1",
            _all([_best("coophe", tuple(dec_dec.values()), SINGLE[:1])]),
        ),
    ]


def _claim(number: int, text: str, kind: str, experiment: str, *requirements: Requirement) -> Claim:
    return Claim(number, text, kind, experiment, requirements)


def _one(select: Select) -> Mix:
    return ((1.0, select),)


def _best(
    domain: str, ours: Sequence[Select], others: Sequence[Select], *, metric: str = "", margin: float | None = None
) -> Comparison:
    sides = (tuple(_one(select) for select in side) for side in (ours, others))
    return Comparison(domain, metric or HEADLINE[domain], *sides, margin)


def _count(needed: int, comparisons: Iterable[Comparison], suffix: str = "") -> Requirement:
    """One part a domain, and so many domains must hold."""
    parts: dict[str, tuple[Comparison, ...]] = {}
    for comparison in comparisons:
        name = DOMAIN_NAMES[comparison.domain] + suffix
        parts[name] = (*parts.get(name, ()), comparison)
    return Requirement(parts, needed)


def _all(comparisons: Iterable[Comparison], suffix: str = "") -> Requirement:
    """One part a domain, and every domain must hold."""
    requirement = _count(0, comparisons, suffix)
    return Requirement(requirement.parts, len(requirement.parts))


def _counted(domain: str) -> tuple[str, ...]:
    """The methods for which claim 4 is counted; the paper excepts MADPO on TLDR."""
    return METHODS[:1] if domain == "tldr" else METHODS


def _best_paradigm(method: str, domain: str) -> Comparison:
    return _best(domain, (Select(method, "cen-cen"),), (Select(method, "dec-dec"), Select(method, "dec-cen")))


def _gap(method: str, first: Select, second: Select) -> Mix:
    return ((1.0, first), (-1.0, second))


def _more_for_marlhf(domain: str, gaps: Mapping[str, tuple[Select, Select]]) -> list[Comparison]:
    """First beats second for both methods, and by more for MARLHF: a difference of differences."""
    steps = [_best(domain, (first,), (second,)) for first, second in gaps.values()]
    marlhf, madpo = (_gap(method, *gaps[method]) for method in METHODS)
    return [*steps, Comparison(domain, HEADLINE[domain], (marlhf,), (madpo,))]


def _dec_cen_steps(domain: str) -> list[Comparison]:
    gaps = {method: (Select(method, "dec-dec"), Select(method, "dec-cen")) for method in METHODS}
    return _more_for_marlhf(domain, gaps)


def _decay_steps(domain: str) -> list[Comparison]:
    """Table 1's own runs have the decaying buffer."""
    online = {method: Select(method, "dec-dec", "table2a", buffer="online") for method in METHODS}
    return _more_for_marlhf(domain, {method: (Select(method, "dec-dec"), online[method]) for method in METHODS})


def _averages() -> tuple[tuple[Mix, ...], tuple[Mix, ...]]:
    """Each method's mean over the paradigms: which of the two is better does not hang on a choice among them."""
    marlhf, madpo = (tuple((1 / len(PARADIGMS), Select(method, name)) for name in PARADIGMS) for method in METHODS)
    return (marlhf,), (madpo,)


def _buffers(domain: str, method: str, better: str, worse: str, experiment: str) -> Comparison:
    rows = [Select(method, "dec-dec", experiment, buffer=buffer) for buffer in (better, worse)]
    return _best(domain, rows[:1], rows[1:])


def _lambdas(domain: str, method: str, better: Sequence[float], worse: Sequence[float]) -> Comparison:
    sides = (
        tuple(Select(method, "dec-dec", "figure6", buffer=f"decay {value:g}") for value in side)
        for side in (better, worse)
    )
    return _best(domain, *sides)


def _comparators(domain: str, method: str, better: str, worse: str) -> Comparison:
    rows = [Select(method, "dec-dec", "figure8", comparator=name) for name in (better, worse)]
    return _best(domain, rows[:1], rows[1:])


def name_side(side: Sequence[Mix]) -> str:
    """A side of a comparison in words: its row, its mixture of rows, or how many rows the best is taken of."""
    return _name_mix(side[0]) if len(side) == 1 else f"best of {len(side)}"


def _name_mix(mix: Mix) -> str:
    """Mixtures are of one method: "MARLHF (Dec-Dec less Dec-Cen)", "MADPO (mean of Dec-Dec, Cen-Cen, Dec-Cen)"."""
    first, settings = mix[0][1], [select.setting for _, select in mix]
    if len(mix) == 1:
        return first.label
    is_gap = any(weight < 0 for weight, _ in mix)
    return f"{first.name} ({' less '.join(settings)})" if is_gap else f"{first.name} (mean of {', '.join(settings)})"
