"""Define the claims of the paper, their verdicts, and the registry of checks."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainshort.experiments.claims.measured import MeasuredCell, RatioWithInterval, ScaleView
from trainshort.utils.registry import Registry

Verdict = Literal["supported", "not supported", "inconclusive", "not tested"]
"""The result of checking a claim.

"inconclusive" means that the difference was measured, but that it may be due to chance. "not tested" means that the
required models or measurements do not exist.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of checking a claim.

    Attributes:
        verdict: Whether the measurements support the claim.
        measured: The measured numbers as text.
        reason: The criterion of the claim, and how the numbers compare with it.
        sources: The files that contain the numbers.
        smallest_detectable: The smallest difference that the measurements can detect, as text such as
            "differences of 0.8%". Empty if no differences were compared.
    """

    verdict: Verdict
    measured: str
    reason: str
    sources: tuple[Path, ...] = ()
    smallest_detectable: str = ""


@dataclass(frozen=True)
class CriterionVersion:
    """When the criterion of a claim was last changed.

    A criterion that was changed after results were available may fit the results too well. The report therefore shows
    the change.

    Attributes:
        commit: The commit of the change.
        date: The date of the change.
        results_were_known: Whether results that the criterion judges were available at the time of the change.
        change: What was changed. Empty for the first version of a criterion.
    """

    commit: str
    date: str
    results_were_known: bool
    change: str = ""

    @property
    def note(self) -> str:
        """Return a sentence about a change of the criterion that was made after results were available.

        The text is empty if the criterion was written before results were available.
        """
        if not self.results_were_known:
            return ""
        return f"Criterion changed on {self.date}, after results were available: {self.change}."


ORIGINAL_CRITERION = CriterionVersion("93a8134", "2026-11-15", results_were_known=False)
"""The first version of all criteria. It was written before the first results were available."""

INTERVAL_CRITERION = CriterionVersion(
    "36d23a9",
    "2026-11-16",
    results_were_known=True,
    change="a difference within its interval of chance is inconclusive",
)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and its check.

    Attributes:
        name: A short name.
        statement: The claim as a sentence.
        published: The numbers in the paper that support the claim.
        check: A function that compares the claim with stored results.
        criterion: When the criterion of the check was written or changed.
    """

    name: str
    statement: str
    published: str
    check: Callable[[ScaleView], Outcome]
    criterion: CriterionVersion = ORIGINAL_CRITERION


claims: Registry[Claim] = Registry("claim")

JudgedClaims = list[tuple[Claim, Outcome]]
"""Claims with the outcomes of their checks."""


def register_claim(
    name: str, *, statement: str, published: str, criterion: CriterionVersion = ORIGINAL_CRITERION
) -> Callable[[Callable[[ScaleView], Outcome]], Callable[[ScaleView], Outcome]]:
    """Return a decorator that registers a function as the check of a claim.

    Args:
        name: A short name of the claim.
        statement: The claim as a sentence.
        published: The numbers in the paper that support the claim.
        criterion: When the criterion of the check was written or changed.

    Returns:
        A decorator for a function that takes the stored results at one scale and returns the outcome of the claim.
    """

    def register(check: Callable[[ScaleView], Outcome]) -> Callable[[ScaleView], Outcome]:
        claims.add(name, Claim(name, statement, published, check, criterion))
        return check

    return register


def evaluate_claims(view: ScaleView) -> JudgedClaims:
    """Check all registered claims. A claim is a statement of the paper that the measurements can support.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        Pairs of a claim and the outcome of its check.
    """
    # Importing these modules registers the checks.
    from trainshort.experiments.claims import extrapolation, speed_and_memory  # noqa: F401

    return [(claim, claim.check(view)) for _, claim in claims.items()]


def count_verdicts(judged_claims: JudgedClaims) -> Counter[Verdict]:
    """Count how often each verdict was given."""
    return Counter(outcome.verdict for _, outcome in judged_claims)


# ---- judging differences


def judge_above(ratio: RatioWithInterval, bound: float) -> Verdict:
    """Judge whether a relative difference is greater than a bound.

    Args:
        ratio: The relative difference with its interval.
        bound: The bound, such as 0.01 for 1 %.

    Returns:
        "supported" if the complete interval is above the bound, "not supported" if no part of the interval is above
        the bound, and "inconclusive" otherwise.
    """
    if ratio.low > bound:
        return "supported"
    if ratio.high <= bound:
        return "not supported"
    return "inconclusive"


def judge_below(ratio: RatioWithInterval, bound: float) -> Verdict:
    """Judge whether a relative difference is less than a bound.

    Args:
        ratio: The relative difference with its interval.
        bound: The bound, such as -0.01 for -1 %.

    Returns:
        "supported" if the complete interval is below the bound, "not supported" if no part of the interval is below
        the bound, and "inconclusive" otherwise.
    """
    if ratio.high < bound:
        return "supported"
    if ratio.low >= bound:
        return "not supported"
    return "inconclusive"


def negate_verdict(verdict: Verdict) -> Verdict:
    """Return the verdict on the opposite statement. "inconclusive" and "not tested" remain unchanged."""
    if verdict == "supported":
        return "not supported"
    if verdict == "not supported":
        return "supported"
    return verdict


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim with several parts.

    The claim is supported only if all parts are supported. It is not supported as soon as one part is not supported.

    Args:
        verdicts: The verdict on each part.
    """
    parts = list(verdicts)
    if "not supported" in parts:
        return "not supported"
    if "inconclusive" in parts:
        return "inconclusive"
    return "supported"


def verdict_of_condition(condition: bool) -> Verdict:
    """Return "supported" if a condition is true, otherwise "not supported"."""
    return "supported" if condition else "not supported"


# ---- outcomes


def missing_outcome(requirement: str) -> Outcome:
    """Return the outcome of a claim that cannot be checked.

    Args:
        requirement: What is missing, as the end of the sentence "The check requires ...".
    """
    return Outcome(verdict="not tested", measured="not measured", reason=f"The check requires {requirement}.")


def make_outcome(
    verdict: Verdict, measured: str, reason: str, *evidence: MeasuredCell | RatioWithInterval | None
) -> Outcome:
    """Create the outcome of a claim.

    Args:
        verdict: The verdict.
        measured: The measured numbers as text.
        reason: The criterion of the claim, and how the numbers compare with the criterion.
        evidence: The values and comparisons that the verdict is based on. Their files become the sources of the
            outcome. The widest interval of the comparisons determines the smallest difference that can be detected.
    """
    sources: dict[Path, None] = {}  # A dictionary keeps the order and removes duplicates.
    largest_half_width = 0.0
    for item in evidence:
        if item is None:
            continue
        sources.update(dict.fromkeys(item.sources))
        if isinstance(item, RatioWithInterval):
            largest_half_width = max(largest_half_width, item.half_width)

    smallest_detectable = ""
    if largest_half_width:
        smallest_detectable = f"differences of {largest_half_width:.1%}"
    return Outcome(verdict, measured, reason, sources=tuple(sources), smallest_detectable=smallest_detectable)
