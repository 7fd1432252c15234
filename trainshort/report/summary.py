"""The first screen in words, for somebody who never read the paper: what this is, what was found, how far to trust it.

Every sentence is written from the same stored numbers as the figure below it. No torch.
"""

from typing import Any

from trainshort.experiments.claims.collection import Collection
from trainshort.experiments.claims.extrapolation import ALIBI_SHORT, SINUSOIDAL_LONG
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.claims.verdicts import JudgedClaims, count_verdicts
from trainshort.experiments.experiments import EvalProtocol
from trainshort.report.headline import Headline, sentences


def introduction(headline: Headline) -> str:
    """What a reader has to know before the numbers."""
    longest = max(headline.lengths)
    names = [line.name for line in headline.lines]
    count = "One small language model" if len(names) == 1 else f"{len(names)} small language models"
    who = "it" if len(names) == 1 else "each"
    alike = (
        ", alike but for how they know where in the text a word stands"
        if headline.is_controlled_comparison and names[1:]
        else ""
    )
    return (
        f"{count}{alike} ({', '.join(names)}), learned from pieces of {headline.length:,} tokens. Then {who} was "
        f"evaluated on pieces of up to {longest:,}. A perplexity of 40 means: as unsure of the next token as if 40 "
        "were equally likely; lower is better, and a line that stays flat to the right is a model that copes with more "
        "text than it was trained on."
    )


def result_sentences(headline: Headline, view: ScaleView | None) -> list[str]:
    """The results, the most important first; last, ALiBi trained short and evaluated long against sinusoidal trained
    long on equally many tokens, and what that saves."""
    far = EvalProtocol(SINUSOIDAL_LONG.length)
    change = view.compare_perplexities((ALIBI_SHORT, far), (SINUSOIDAL_LONG, far)) if view else None
    if view is None or change is None:
        return sentences(headline)
    verdict = f"ALiBi is {'worse' if change.change > 0 else 'better'} by {abs(change.change):.0%}"
    verdict = verdict if change.is_significant else f"cannot tell ({change})"
    near, at = view.scale.scale_length(ALIBI_SHORT.length), view.scale.scale_length(SINUSOIDAL_LONG.length)
    told = (
        f"Train short, test long: ALiBi trained at {near:,} and evaluated at {at:,} has {change.values[0]:.1f}, "
        f"sinusoidal trained at {at:,} on as many tokens {change.values[1]:.1f}: {verdict}."
    )
    savings = _savings(view)
    return [*sentences(headline), told + (f" Training short was {savings} (with random weights)." if savings else "")]


def _savings(view: ScaleView) -> str:
    """Speed and memory of the two, where both were measured."""
    speed, parts = view.compare_speeds(ALIBI_SHORT, SINUSOIDAL_LONG), []
    if speed is not None:
        within = speed.low <= 0 <= speed.high
        parts.append("no faster than this machine can tell" if within else f"{1 + speed.change:.2f} times as fast")
    memory, more = (
        [view.find_cost(one, "train memory") for one in (ALIBI_SHORT, SINUSOIDAL_LONG)],
        view.compare_memories(ALIBI_SHORT, SINUSOIDAL_LONG),
    )
    if memory[0] and memory[1] and more:
        took = f"took {1e3 * memory[0].value:,.0f} MB instead of {1e3 * memory[1].value:,.0f}"
        within = len({more.low, more.high}) > 1 and more.low <= 0 <= more.high
        parts.append(f"{took}, which two weighings of one model may differ by" if within else took)
    return " and ".join(parts)


def limitations(headline: Headline, collection: Collection, judged: JudgedClaims) -> list[str]:
    """What stands behind the numbers, and what does not."""
    corpus = headline.lines[0].stored[0].evaluation.corpus
    seeds = len({run.config.train.seed for run in collection.runs.values()})
    chosen = "took no part in training or in choosing" if corpus["split"] == "test" else "may have served to choose"
    told = [
        f"Perplexities are of {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}, "
        f"which {chosen} settings. Bands are 95 % intervals over that text. "
        f"{'One seed' if seeds == 1 else f'{seeds} seeds'}: another would move every line a little."
    ]
    trained = {run.metrics[-1]["tokens"] for run in collection.runs.values() if run.metrics}
    if collection.scale and trained and max(trained) < 1.01 * min(trained):  # pieces at a text's end may be shorter
        amount = " to ".join(f"{count:,}" for count in sorted({min(trained), max(trained)}))
        told.append(
            f"Every model was trained on {amount} tokens, in the way that was best for its method on the validation "
            "split, out of the same grid of ways for all (trainshort tune)."
        )
    if judged:
        told.append(f"Of {count_verdicts(judged).total()} claims of the paper {verdicts(judged)}")
    told.append("Small models on little text: compare the shapes of lines with the paper's, not the values.")
    return told


def verdicts(judged: JudgedClaims) -> str:
    """How many claims hold, and how many do not."""
    counts = count_verdicts(judged)
    return (
        f"{counts['holds']} hold here, {counts['does not hold']} do not, {counts['cannot tell']} cannot be told from "
        f"chance; not tested with what was run: {counts['not testable at this scale']}."
    )


def summary(headline: Headline, view: ScaleView | None, judged: JudgedClaims) -> dict[str, Any]:
    """The same as data, for the tables of documents."""
    lines = {
        line.name: {
            "position": line.position,
            "points": {str(at): [value, *line.bounds.get(at, (None, None))] for at, value in line.points.items()},
        }
        for line in (*headline.lines, *headline.beyond)
    }
    first = headline.lines[0].stored[0].evaluation
    return {
        "format": 2,
        "length": headline.length,
        "corpus": {key: first.corpus[key] for key in ("name", "split", "tokens")},
        "lines": lines,
        "found": result_sentences(headline, view),
        "verdicts": count_verdicts(judged),
        "provenance": first.provenance,
    }
