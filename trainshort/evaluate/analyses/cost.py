"""What each position method costs on this machine: the paper's Table 1, in one run.

Training speed, inference speed and peak memory for each method at each length, with the run's own model shape and
random weights (the cost does not depend on them, with one exception: ALiBi's proven windows depend on the norms of
queries and keys, so its speed is measured with the run's own weights). Every method and length is a process of its own,
because a process never gives all its memory back: only so is the peak that of this method at this length.
The paper's methods and the run's own are measured unless others are asked for: all of them would take an hour.
"""

from typing import Any

from rich.console import Group

from trainshort.config.position_config import PAPER_METHODS
from trainshort.config.run_config import ModelConfig, RunConfig, TrainConfig
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, new_table, with_title
from trainshort.evaluate.step_cost import OUT_OF_MEMORY
from trainshort.evaluate.targets import RunTarget
from trainshort.utils.timing import Timing, run_in_subprocess

ROUNDS = 5
"""Steps that are timed, after one that warms up; their median counts."""
BATCH_TOKENS = 4096
"""Tokens per step, the same for all lengths, as far as the length itself allows."""
COST_MODES = ("training", "inference")


def scope(lab: AnalysisContext) -> tuple[ModelConfig, list[int], list[str]]:
    """The model's settings, the lengths, and the methods, each of which must go with these settings."""
    config = lab.model("the cost analysis").config
    lengths = sorted(lab.lengths or (lab.trained_at, 4 * lab.trained_at, 16 * lab.trained_at))
    chosen = list(dict.fromkeys(lab.methods or (*PAPER_METHODS, config.position)))
    for method in chosen:
        config.replace(position=method).with_max_length(lengths[-1])
    return config, lengths, chosen


def run(lab: AnalysisContext) -> dict[str, Any]:
    config, lengths, chosen = scope(lab)
    lab.meter.start(len(chosen) * sum(map(_tokens, lengths)))
    rows = [_row(lab, config, method, length) for length in lengths for method in chosen]
    return {"summary": summary(rows), "batch_tokens": BATCH_TOKENS, "rows": rows}


def _tokens(length: int) -> int:
    """Tokens of one step, which its time goes by."""
    return max(1, BATCH_TOKENS // length) * length


def _row(lab: AnalysisContext, config: ModelConfig, method: str, length: int) -> dict[str, Any]:
    weights, longest = None, lab.model("the cost analysis").position.max_length
    if isinstance(lab.target, RunTarget) and method == config.position and length <= (longest or length):
        weights = str(lab.target.checkpoint)  # whose table, if it has one, reaches as far
    model = config.replace(position=method).with_max_length(length)
    found = lab.cached(f"{method} {length}", lambda: measure(model, length, str(lab.target.device), weights))
    lab.meter.advance(_tokens(length), f"{method} at {length:,} tokens")
    return {"position": method, "length": length, "weights": "run" if weights else "random", **found}


def measure(model: ModelConfig, length: int, device: str = "cpu", weights: str | None = None) -> dict[str, Any]:
    """Tokens per second with their spread and peak bytes, of training and of inference."""
    train = TrainConfig(length=length, batch=max(1, BATCH_TOKENS // length))
    config = RunConfig(model=model, train=train).model_dump(mode="json")
    asked: dict[str, Any] = {"config": config, "device": device, "weights": weights, "rounds": ROUNDS}
    try:
        found = run_in_subprocess("trainshort.evaluate.step_cost", **asked)
    except MemoryError:
        try:  # training was too much; perhaps inference is not
            found = {
                "training": OUT_OF_MEMORY,
                **run_in_subprocess("trainshort.evaluate.step_cost", train=False, **asked),
            }
        except MemoryError:
            found = dict.fromkeys(COST_MODES, OUT_OF_MEMORY)
    return {kind: _to_rates(found[kind]) for kind in COST_MODES}


def _to_rates(found: dict[str, Any]) -> dict[str, Any]:
    if found["status"] != "measured":
        return found
    speed = Timing(found["seconds"]).rate(found["tokens"], "tokens/s")
    kept = {name: found[name] for name in ("status", "memory", "tokens")}
    return {**kept, "tokens_per_second": speed.value, "spread": speed.spread}


def summary(rows: list[dict[str, Any]]) -> str:
    """Every method's inference at the longest length against sinusoidal's, as in the paper's Table 1, or against the
    first that was measured."""
    longest = max(row["length"] for row in rows)
    at = {row["position"]: row["inference"] for row in rows if row["length"] == longest}
    base = next((name for name in (PAPER_METHODS[0], *at) if at.get(name, OUT_OF_MEMORY)["status"] == "measured"), None)
    if base is None or len(at) == 1:
        return f"measured up to {longest:,} tokens"
    told = [f"{name} {_compare_to_baseline(found, at[base])}" for name, found in at.items() if name != base]
    return f"at {longest:,} tokens, inference against {base}'s: {'; '.join(told)}"


def _compare_to_baseline(found: dict[str, Any], base: dict[str, Any]) -> str:
    if found["status"] != "measured":
        return found["status"]
    ratio = found["tokens_per_second"] / base["tokens_per_second"]
    spread = (found["spread"] or 0.0) + (base["spread"] or 0.0)
    if abs(ratio - 1) <= spread:
        return f"as fast, as far as these rounds can tell (±{spread:.0%})"
    return f"at {ratio:.0%} (±{spread:.0%}) of its speed"


def table(result: dict[str, Any]) -> Group:
    title = f"Tokens per second and peak memory, {result['batch_tokens']:,} tokens a step"
    shown = new_table("position", "length", "train tok/s", "infer tok/s", "train MB", "infer MB")
    for row in result["rows"]:
        speeds = (_cell(row[kind], "tokens_per_second", 1) for kind in COST_MODES)
        memory = (_cell(row[kind], "memory", 1e6) for kind in COST_MODES)
        shown.add_row(row["position"], f"{row['length']:,}", *speeds, *memory)
    return with_title(title, shown)


def _cell(found: dict[str, Any], name: str, unit: float) -> str:
    if found["status"] != "measured":
        return "OOM"
    return "" if found[name] is None else f"{found[name] / unit:,.0f}"


COST = Analysis("what does each position method cost at each length?", run, table, slow=True, fits=scope)
