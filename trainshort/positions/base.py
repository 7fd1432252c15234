"""What a position method is: a module with three doors, of which it opens one.

The transformer calls all three for every method and so has no branches. A new method is one class:

    @positions.register("mine")
    class Mine(PositionMethod):
        \"\"\"The line that `trainshort list positions` shows.\"\"\"

        def score_bias(self):
            return LinearBias(self.slopes)

Positions are given as a tensor rather than as a starting number, so that packed documents count from their own
beginning and the rows of a batch can stand at different places.
"""

from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.attention import Bias
from trainshort.config import ModelConfig
from trainshort.errors import InputError
from trainshort.registry import Registry


class PositionMethod(nn.Module):
    """Does nothing at each door; methods override the one they use."""

    longest: int | None = None
    """Longest input the method can read; None: any."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(
        self, x: Float[Tensor, "batch length width"], where: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length width"]:
        """Door 1: added to the embeddings, once."""
        return x

    def rotate(
        self,
        q: Float[Tensor, "batch heads length dim"],
        k: Float[Tensor, "batch kv_heads length dim"],
        where: Int[Tensor, "batch length"],
    ) -> tuple[Tensor, Tensor]:
        """Door 2: turns queries and keys, in every layer."""
        return q, k

    def score_bias(self) -> Bias | None:
        """Door 3: a bias on the scores, in every layer."""
        return None

    def check_length(self, length: int) -> None:
        """Refuse an input past the longest; a method with no limit has nothing to check."""
        if self.longest is not None and length > self.longest:
            raise InputError(
                f"learned positions stop at {self.longest}, but this input reaches {length}. "
                "Train with a longer table, or use position='alibi'."
            )


positions: Registry[type[PositionMethod]] = Registry("position method")
