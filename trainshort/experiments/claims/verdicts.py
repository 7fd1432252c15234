"""What a claim is, and how checks are filed."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainshort.experiments.claims.measured import MeasuredCell, RatioWithInterval, ScaleView
from trainshort.utils.registry import Registry

Verdict = Literal["holds", "does not hold", "cannot tell", "not testable at this scale"]
"""Cannot tell: it was tried, and what was found is less than chance alone may do. Not testable: it was not tried."""


@dataclass(frozen=True)
class Outcome:
    """What a check found."""

    verdict: Verdict
    obtained: str
    reason: str
    sources: tuple[Path, ...] = ()
    smallest_detectable: str = ""
    """The smallest effect that these runs could have told from none."""


@dataclass(frozen=True)
class Rule:
    """When a check's rule was fixed: whoever reads a verdict may ask whether its numbers were known by then."""

    commit: str
    date: str
    results_were_known: bool
    """Whether numbers that it judges had been seen when it was fixed."""
    change: str = ""
    """What was changed then; empty for a rule that stands as it was first written."""

    @property
    def note(self) -> str:
        """In the words of a note; empty where the rule came before the numbers."""
        return (
            f"This rule was changed on {self.date}, after numbers had been seen: {self.change}."
            if self.results_were_known
            else ""
        )


ORIGINAL_RULE = Rule("93a8134", "2026-11-15", results_were_known=False)
"""All rules were written in one commit, before the one that stores the first numbers (1c4df6d)."""
INTERVAL_RULE = Rule(
    "36d23a9", "2026-11-16", results_were_known=True, change="a difference within chance is not judged"
)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and its check. The check sees stored results and nothing else."""

    name: str
    statement: str
    published: str
    check: Callable[[ScaleView], Outcome]
    rule: Rule = ORIGINAL_RULE


claims: Registry[Claim] = Registry("claim")
JudgedClaims = list[tuple[Claim, Outcome]]


def register_claim(
    name: str, published: str, *, rule: Rule = ORIGINAL_RULE
) -> Callable[[Callable[[ScaleView], Outcome]], Callable[[ScaleView], Outcome]]:
    """Decorator: file a check under its claim, whose statement is the check's docstring."""

    def add(check: Callable[[ScaleView], Outcome]) -> Callable[[ScaleView], Outcome]:
        statement = " ".join((check.__doc__ or "").split())
        claims.add(name, Claim(name, statement, published, check, rule))
        return check

    return add


def missing_outcome(what: str) -> Outcome:
    """The outcome where a number is not there."""
    return Outcome("not testable at this scale", "not run", f"It needs {what}.")


def verdict_of_condition(condition: bool) -> Verdict:
    return "holds" if condition else "does not hold"


def judge_above(found: RatioWithInterval, bound: float) -> Verdict:
    """Whether a difference is more than a bound: told only where its whole interval lies on one side. This is the one
    rule about noise, for perplexities and for times, for ALiBi and against it."""
    if found.low > bound:
        return "holds"
    return "does not hold" if found.high <= bound else "cannot tell"


def judge_below(found: RatioWithInterval, bound: float) -> Verdict:
    """The same the other way."""
    if found.high < bound:
        return "holds"
    return "does not hold" if found.low >= bound else "cannot tell"


def negate_verdict(found: Verdict) -> Verdict:
    swapped: dict[Verdict, Verdict] = {"holds": "does not hold", "does not hold": "holds"}
    return swapped.get(found, found)


def combine_verdicts(found: Iterable[Verdict]) -> Verdict:
    """Of a claim with several parts: it holds when all do, and falls with one."""
    parts = list(found)
    if "does not hold" in parts:
        return "does not hold"
    return "cannot tell" if "cannot tell" in parts else "holds"


def make_outcome(told: Verdict, obtained: str, reason: str, *found: MeasuredCell | RatioWithInterval | None) -> Outcome:
    """What a check found, with the files of all that it rests on, and `differences of 0.8 %` as the least that its
    comparisons could tell."""
    sources = tuple(dict.fromkeys(path for one in found if one for path in one.sources))
    least = max((one.half_width for one in found if isinstance(one, RatioWithInterval)), default=0.0)
    return Outcome(told, obtained, reason, sources, f"differences of {least:.1%}" if least else "")


def evaluate_claims(view: ScaleView) -> JudgedClaims:
    """Every claim with its outcome."""
    from trainshort.experiments.claims import extrapolation, speed_and_memory  # noqa: F401  (each files its checks)

    return [(one, one.check(view)) for _, one in claims.items()]


def count_verdicts(judged: JudgedClaims) -> Counter[Verdict]:
    """Count how often each verdict was given."""
    return Counter(found.verdict for _, found in judged)
