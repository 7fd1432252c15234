"""The oracle: attention as the formula reads, nothing clever. Every other engine is measured against it."""

from trainshort.attention.call import Call, is_exporting
from trainshort.attention.formula import formula
from trainshort.attention.op import Result, engines


class Reference:
    """The plain formula in float32 (float64 for float64 inputs); the oracle of the tests, any call, no hurry."""

    def rank(self, call: Call) -> int:
        """Derivatives of any order and direction, and graphs for elsewhere, need plain operations of torch."""
        return 100 if is_exporting() or call.is_transformed else 1

    def unsupported(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> Result:
        return Result(*formula(call))


engines.register("reference")(Reference())
