"""One `trainshort analyze`: the analyses asked for, one after the other, each with a file, a table and a sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainshort.analyze import cost, early_tokens, far_context, reach, recall, slopes
from trainshort.analyze.base import Lab, analyses
from trainshort.errors import InputError
from trainshort.evaluate.text import Text
from trainshort.files import make_folder, write_sealed
from trainshort.runs import provenance

__all__ = ["analyses", "analyze", "cost", "early_tokens", "far_context", "reach", "recall", "slopes"]

FORMAT = 1


def analyze(lab: Lab, text: Text, names: Sequence[str], console: Console) -> list[Path]:
    """Answer each question and write analysis/NAME.json in the target's folder. When all were asked for, one that does
    not fit this model is passed over in words; one that was asked for by name is an error."""
    written = []
    for name in names or analyses.names():
        chosen = analyses.get(name)
        console.print(f"\n[bold]{name}[/]: {chosen.question}", highlight=False)
        try:
            result = chosen.run(lab)
        except InputError as error:
            if names:
                raise
            console.print(f"passed over: {error}", highlight=False, markup=False)
            continue
        written.append(_write(lab, text, name, result))
        console.print(chosen.table(result))
        console.print(f"{result['summary']}.", highlight=False)
    console.print("\nWritten: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    return written


def _write(lab: Lab, text: Text, name: str, result: dict[str, Any]) -> Path:
    folder = lab.target.folder / "analysis"
    make_folder(folder)
    content = {
        "format": FORMAT,
        "analysis": name,
        "target": lab.target.description(),
        "corpus": text.description(),
        "settings": {"trained_at": lab.trained_at, "lengths": lab.lengths, "samples": lab.samples, "seed": lab.seed},
        "result": result,
        "provenance": provenance(threads=torch.get_num_threads()),
    }
    path = folder / f"{name}.json"
    write_sealed(path, content)
    return path
