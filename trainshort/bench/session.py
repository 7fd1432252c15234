"""One `trainshort bench`: measures step by step, shows each table, and stores everything as it goes."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from trainshort.bench import machine, results
from trainshort.bench.measure import Progress, Step
from trainshort.bench.plan import AttentionPlan, Plan, described
from trainshort.bench.results import Bench
from trainshort.bench.tables import print_rows


def run(plans: Mapping[str, Plan], quick: bool, out: Path, console: Console, progress: Progress) -> Bench:
    """Measure what the plans ask for. The file is written after every step, so that a kill loses one step."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = described(plans, quick)
        suites = {name: _steps(name, plan, Path(scratch), settings[name], progress) for name, plan in plans.items()}
        bench = Bench(made=machine.describe(), settings=settings)
        results.save(bench, out)
        progress.line(f"measuring {', '.join(suites)}; results go to {out}")
        for name, steps in suites.items():
            for number, step in enumerate(steps, start=1):
                progress.begin(name, number, len(steps), step.title)
                rows = step.run(progress)
                bench = bench.with_rows(name, rows)
                results.save(bench, out)
                print_rows(rows, step.title[:1].upper() + step.title[1:], console)
        bench = bench.replace(finished=True)
        results.save(bench, out)
    return bench


def _steps(name: str, plan: Plan, scratch: Path, stored: dict[str, Any], progress: Progress) -> list[Step]:
    """A suite's steps; what is wrong with its inputs is told before the first of any suite."""
    import importlib

    module = importlib.import_module(f"trainshort.bench.{name}")
    if not isinstance(plan, AttentionPlan):
        return module.steps(plan)
    source, label = plan.inputs, plan.inputs
    if Path(source).is_dir():
        from trainshort.bench.recorded import record

        progress.line(f"recording queries, keys and values of {source}, {max(plan.lengths):,} tokens")
        path = scratch / "recorded.safetensors"
        stored["recorded"] = record(Path(source), max(plan.lengths), plan.layer, path)
        source, label = str(path), "recorded"
    elif source not in ("normal", "scaled"):
        label = "recorded"
    return module.steps(plan, source, label)
