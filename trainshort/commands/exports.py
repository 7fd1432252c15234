"""`trainshort export` and `trainshort verify`: a run for other programs, and whether they compute the same."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trainshort.commands.parser import Arg

if TYPE_CHECKING:
    from trainshort.interop.verifying import Verification


@dataclass(frozen=True)
class Export:
    """Write a run for another program: weights, tokenizer, generation settings, model card; then verify it there.

    hf-mpt and hf-bloom are transformers' own classes; hf is ours (import trainshort.hf) and carries every model. What a
    target has no word for is rewritten where that is exact, and refused where it is not. The recipe `portable-128`
    trains a model that hf-mpt, gguf and ctranslate2 take as it is.

    Examples:
      trainshort export runs/demo-alibi --to gguf --out exported/gguf
      trainshort export runs/demo-alibi --to gguf --dtype q8_0 --out exported/small
      trainshort export runs/mine --to hf-mpt --out exported/mpt
    """

    run_folder: Annotated[Path, Arg(metavar="RUN", positional=True)]
    """A run folder, or one of its checkpoints."""
    to: str
    """hf-mpt, hf-bloom, hf, gguf or ctranslate2."""
    out: Path
    """The folder to make; refused if it exists."""
    dtype: str | None = None
    """gguf: f32, f16 or q8_0. Default: f32."""
    verify: bool = True
    """Load the export in its program and compare."""

    def run(self) -> int:
        from trainshort.interop.exporting import export
        from trainshort.interop.verifying import verify

        for note in export(self.run_folder, self.to, self.out, self.dtype):
            print(f"trainshort: {note}.", file=sys.stderr)
        print(f"Exported to {self.out}.")
        return _told(verify(self.out)) if self.verify else 0


@dataclass(frozen=True)
class Verify:
    """Load an export in the program it was made for (transformers, llama.cpp, CTranslate2) and compare it with its run:
    logits at 1, 2 and 8 times the training length, greedy text, tokens. Exits with 1 if something differs.

    Examples:
      trainshort verify exported/gguf
      trainshort verify exported/gguf --run-folder runs/demo-alibi
    """

    folder: Annotated[Path, Arg(metavar="FOLDER", positional=True)]
    """A folder that trainshort export made."""
    run_folder: Path | None = None
    """The run it was made of, if that has moved."""

    def run(self) -> int:
        from trainshort.interop.verifying import verify

        return _told(verify(self.folder, self.run_folder))


def _told(report: "Verification") -> int:
    from rich.console import Console

    Console().print(report.table())
    for problem in report.problems:
        print(f"Differs: {problem}.")
    if not report.problems:
        tokens = {True: "tokens of awkward strings equal", None: "it takes token numbers alone"}[report.tokenization]
        print(f"Verified in {report.engine}: logits within their limits, greedy text equal, {tokens}.")
    return 1 if report.problems else 0
