"""`trainshort import`: a model from elsewhere becomes a run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainshort.commands.parser import Arg


@dataclass(frozen=True)
class Import:
    """Make a run folder of an ALiBi model from elsewhere: evaluate it, analyze it, generate with it, train it on.

    Reads the checkpoints of the paper's authors (fairseq), and MPT, BLOOM, Falcon-RW, replit-code, Baichuan-13B, BTLM,
    Jais and Refact in safetensors. No code that comes with a model is executed.

    Examples:
      trainshort import alibi_wt103_L512.pt --dictionary dict.txt --out runs/authors-512
      trainshort import ./mpt-7b --out runs/mpt-7b
    """

    source: Annotated[str, Arg(metavar="MODEL", positional=True)]
    """A fairseq checkpoint file, a Hugging Face model's folder, or its name on the hub."""
    out: Path
    """The run folder to make; refused if it exists."""
    dictionary: Path | None = None
    """fairseq: the dict.txt of the model's data. Without it the run has no tokenizer."""
    tokenizer: Path | None = None
    """Another tokenizer.json than the model's own."""
    trained_at: int | None = None
    """The training length, for a model that does not tell it."""

    def run(self) -> None:
        from trainshort.interop.importing import ImportRequest, import_model

        import_model(ImportRequest(self.source, self.dictionary, self.tokenizer, self.trained_at), self.out)
        print(f'{self.out}: try trainshort generate {self.out} "Once upon a time"')
