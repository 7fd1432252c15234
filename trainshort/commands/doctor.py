"""`trainshort doctor`: what a Hugging Face model of ALiBi's gets wrong."""

from dataclasses import dataclass
from typing import Annotated

from trainshort.commands.parser import Arg


@dataclass(frozen=True)
class Doctor:
    """Examine a Hugging Face model with ALiBi (MPT, BLOOM, Falcon-RW) on a tiny copy of its class, number format and
    settings: length limit, ignored settings, rounded, doubled or lost biases, packed documents that leak, memory of
    length times length. Only the settings and the names of the tensors are read, and no code that comes with a model is
    executed. Exits with 0 when it is healthy, with 1 when something is wrong.

    trainshort.doctor(model) examines a loaded model, trainshort.patch(model) cures most of it.

    Examples:
      trainshort doctor ./mpt-7b
      trainshort doctor bigscience/bloom-560m --json
    """

    model: Annotated[str, Arg(metavar="MODEL", positional=True)]
    """The folder of a saved model, or its name on the hub."""
    json: bool = False
    """The findings as JSON."""

    def run(self) -> int:
        from trainshort.interop.doctor import doctor
        from trainshort.terminal import printable

        found = doctor(self.model)
        print(found.to_json() if self.json else printable(str(found)))
        return 0 if found.healthy else 1
