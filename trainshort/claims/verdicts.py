"""What a claim is, and how checks are filed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainshort.claims.measured import Measured, View
from trainshort.registry import Registry

Verdict = Literal["holds", "does not hold", "not testable at this scale"]


@dataclass(frozen=True)
class Outcome:
    """What a check found."""

    verdict: Verdict
    obtained: str
    reason: str
    sources: tuple[Path, ...] = field(default=())


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and its check. The check sees stored results and nothing else."""

    name: str
    statement: str
    published: str
    check: Callable[[View], Outcome]
    oddity: bool = False
    """Whether it is an inconsistency of the paper and not one of its claims."""

    @property
    def summary(self) -> str:
        return self.statement


claims: Registry[Claim] = Registry("claim")


def claim(
    name: str, statement: str, published: str, *, oddity: bool = False
) -> Callable[[Callable[[View], Outcome]], Callable[[View], Outcome]]:
    """Decorator: file a check under its claim."""

    def add(check: Callable[[View], Outcome]) -> Callable[[View], Outcome]:
        claims.register(name)(Claim(name, statement, published, check, oddity))
        return check

    return add


def missing(what: str) -> Outcome:
    """The outcome where a number is not there."""
    return Outcome("not testable at this scale", "not run", f"It needs {what}.")


def verdict(condition: bool) -> Verdict:
    return "holds" if condition else "does not hold"


def sources(*measured: Measured | None) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path for one in measured if one for path in one.sources))


def all_claims() -> Registry[Claim]:
    """The registry, filled."""
    from trainshort.claims import cost, extrapolation, oddities  # noqa: F401  (each files its checks)

    return claims


def judge(view: View) -> list[tuple[Claim, Outcome]]:
    """Every claim with its outcome."""
    return [(one, one.check(view)) for _, one in all_claims().items()]
