"""The texts at the top of the report: an introduction, the main results, and the limitations of the results.

All sentences are computed from the stored numbers. This module does not import torch.
"""

from typing import Any

from trainshort.experiments.claims.collection import Collection
from trainshort.experiments.claims.extrapolation import ALIBI_SHORT, SINUSOIDAL_LONG
from trainshort.experiments.claims.measured import RatioWithInterval, ScaleView
from trainshort.experiments.claims.verdicts import JudgedClaims, count_verdicts
from trainshort.experiments.experiments import EvalProtocol
from trainshort.report.headline import Headline, headline_sentences


def introduction(headline: Headline) -> str:
    """Return what a reader must know to understand the results: the models, the lengths and the word "perplexity".

    Args:
        headline: The curves of the main figure, one for each model.
    """
    names = [curve.name for curve in headline.curves]
    if len(names) == 1:
        models = f"One small language model ({names[0]}) was"
    else:
        models = f"{len(names)} small language models ({', '.join(names)}) were"
    sentences = [
        f"{models} trained on sequences of {headline.training_length:,} tokens "
        f"and evaluated on sequences of up to {headline.lengths[-1]:,} tokens."
    ]
    if len(names) > 1 and headline.is_controlled_comparison:
        sentences.append("The models differ only in the method that encodes the positions of tokens.")
    sentences += [
        "A perplexity of 40 means that the model is as uncertain as if 40 next tokens were equally likely.",
        "A lower perplexity is better.",
        "A curve that stays flat to the right belongs to a model that handles longer text than it was trained on.",
    ]
    return " ".join(sentences)


# ---- results


def result_sentences(headline: Headline, view: ScaleView | None) -> list[str]:
    """Return the main results as sentences, the most important ones first.

    The last entry compares ALiBi, trained at a short length, with sinusoidal embeddings, trained at the evaluation
    length. It is left out if these models do not exist.

    Args:
        headline: The curves of the main figure.
        view: The stored results at one scale (laptop, gpu or paper). None if the runs belong to no scale.
    """
    sentences = headline_sentences(headline)
    if view is None:
        return sentences
    protocol = EvalProtocol(SINUSOIDAL_LONG.length)
    change = view.compare_perplexities((ALIBI_SHORT, protocol), (SINUSOIDAL_LONG, protocol))
    if change is None:
        return sentences
    # The last entry of the result consists of several sentences.
    short_against_long = [_short_against_long(view, change), *_cost_sentences(view)]
    return [*sentences, " ".join(short_against_long)]


def _short_against_long(view: ScaleView, change: RatioWithInterval) -> str:
    """Compare the perplexities of ALiBi (trained short) and sinusoidal embeddings (trained long).

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        change: How much higher ALiBi's perplexity is, relative to the perplexity of the sinusoidal model.
    """
    short_length = view.scale.scale_length(ALIBI_SHORT.length)
    long_length = view.scale.scale_length(SINUSOIDAL_LONG.length)
    alibi_perplexity, sinusoidal_perplexity = change.values
    if not change.is_significant:
        verdict = "may be due to chance"
    elif change.change > 0:
        verdict = "shows that ALiBi is worse"
    else:
        verdict = "shows that ALiBi is better"
    return (
        f"Train short, test long: ALiBi trained at {short_length:,} tokens has a perplexity of {alibi_perplexity:.1f} "
        f"at {long_length:,} tokens. Sinusoidal embeddings trained at {long_length:,} tokens, with the same number of "
        f"training tokens, have a perplexity of {sinusoidal_perplexity:.1f}. The difference of {change} {verdict}."
    )


def _cost_sentences(view: ScaleView) -> list[str]:
    """Compare the costs of ALiBi (trained short) and sinusoidal embeddings (trained long).

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        Sentences about the training speed and the training memory. The list is empty if nothing was measured.
    """
    sentences: list[str] = []

    speedup = view.compare_speeds(ALIBI_SHORT, SINUSOIDAL_LONG)
    if speedup is not None:
        if speedup.is_significant:
            sentences.append(f"Training at the shorter length was {1 + speedup.change:.2f} times as fast.")
        else:
            sentences.append("The training speeds do not differ significantly.")

    short_memory = view.find_cost(ALIBI_SHORT, "train memory")
    long_memory = view.find_cost(SINUSOIDAL_LONG, "train memory")
    memory_change = view.compare_memories(ALIBI_SHORT, SINUSOIDAL_LONG)
    if short_memory is not None and long_memory is not None and memory_change is not None:
        short_megabytes = f"{1e3 * short_memory.value:,.0f} MB"
        long_megabytes = f"{1e3 * long_memory.value:,.0f} MB"
        sentence = f"Peak training memory was {short_megabytes} against {long_megabytes}"
        # With a single measurement of each model, the interval is empty and nothing is known about the noise.
        has_interval = memory_change.low != memory_change.high
        if has_interval and not memory_change.is_significant:
            sentence += ", a difference within the measurement noise"
        sentences.append(f"{sentence}.")

    if sentences:
        sentences.append("Costs were measured with random weights.")
    return sentences


# ---- limitations


def limitations(headline: Headline, collection: Collection, judged_claims: JudgedClaims) -> list[str]:
    """Return sentences about what the results are based on, and what they do not show.

    Args:
        headline: The curves of the main figure.
        collection: The runs.
        judged_claims: The claims of the paper and the outcomes of their checks.
    """
    # Each entry of the list is a text of one or more sentences.
    sentences = [_text_sentences(headline, collection)]
    training_sentences = _training_sentences(collection)
    if training_sentences:
        sentences.append(training_sentences)
    if judged_claims:
        sentences.append(
            f"The report checks {len(judged_claims)} claims of the paper: {format_verdict_counts(judged_claims)}."
        )
    sentences.append(
        "The models are small and were trained on little text. "
        "Compare the shapes of the curves with the paper, not the values."
    )
    return sentences


def _text_sentences(headline: Headline, collection: Collection) -> str:
    """Return sentences about the evaluated text, and about the bands of the figure.

    Args:
        headline: The curves of the main figure. All curves show results for the same text.
        collection: The runs.
    """
    corpus = headline.curves[0].stored[0].evaluation.corpus
    text = (
        f"The perplexities were measured on {corpus['tokens']:,} tokens of the {corpus['split']} split of "
        f"{corpus['name']}."
    )
    if corpus["split"] == "test":
        use = "This split was not used for training or for choosing settings."
    else:
        use = "This split may have been used for choosing settings."

    seed_count = len({run.config.train.seed for run in collection.runs.values()})
    if seed_count == 1:
        seeds = (
            "The bands are 95 % intervals over the text. "
            "Each model was trained with one seed. Another seed would change all curves slightly."
        )
    else:
        seeds = (
            f"The models were trained with {seed_count} seeds. The bands show the range over the seeds. "
            "For a model with one seed they are 95 % intervals over the text."
        )
    return f"{text} {use} {seeds}"


def _training_sentences(collection: Collection) -> str:
    """Return sentences about the number of training tokens and the tuning of the optimizer settings.

    The result is empty if the models were trained on different numbers of tokens, or if they belong to no scale (one of
    the sizes laptop, gpu and paper).
    """
    token_counts = {run.metrics[-1]["tokens"] for run in collection.runs.values() if run.metrics}
    if collection.scale is None or not token_counts:
        return ""
    smallest = min(token_counts)
    largest = max(token_counts)
    # Sequences at the end of a text can be shorter, so the numbers may differ slightly.
    if largest >= 1.01 * smallest:
        return ""

    amount = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    sentences = f"Every model was trained on {amount} tokens."
    if collection.scale.name == "laptop":
        sentences += (
            " The optimizer settings of each method were chosen by the validation loss, from the same candidates for "
            "all methods (trainshort tune)."
        )
    return sentences


def format_verdict_counts(judged_claims: JudgedClaims) -> str:
    """Return a text such as "9 supported, 0 not supported, 3 inconclusive, 1 not tested"."""
    counts = count_verdicts(judged_claims)
    return (
        f"{counts['supported']} supported, {counts['not supported']} not supported, "
        f"{counts['inconclusive']} inconclusive, {counts['not tested']} not tested"
    )


# ---- the same as data


def make_headline_record(headline: Headline, view: ScaleView | None, judged_claims: JudgedClaims) -> dict[str, Any]:
    """Return the content of `headline.json`: the curves, the main results and the number of each verdict.

    The tables in the README are generated from this file.

    Args:
        headline: The curves of the main figure.
        view: The stored results at one scale (laptop, gpu or paper). None if the runs belong to no scale.
        judged_claims: The claims of the paper and the outcomes of their checks.
    """
    lines: dict[str, Any] = {}
    for curve in (*headline.curves, *headline.longer_models):
        points: dict[str, list[float | None]] = {}
        for length, value in curve.points.items():
            low, high = curve.bounds.get(length, (None, None))
            points[str(length)] = [value, low, high]
        lines[curve.name] = {"position": curve.position, "points": points}

    evaluation = headline.curves[0].stored[0].evaluation
    return {
        "format": 2,
        "length": headline.training_length,
        "corpus": {key: evaluation.corpus[key] for key in ("name", "split", "tokens")},
        "lines": lines,
        "found": result_sentences(headline, view),
        "verdicts": count_verdicts(judged_claims),
        "provenance": evaluation.provenance,
    }
