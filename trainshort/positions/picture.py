"""`python -m trainshort.positions.picture`: docs/biases.png, what methods add to a score at each distance, drawn from
the methods themselves at their first values."""

from pathlib import Path

import torch

from trainshort.attention import DistanceBias, LinearBias
from trainshort.config import ModelConfig
from trainshort.plots.figures import OTHERS, Figure, Series, color, draw
from trainshort.positions import build_position

PICTURE = Path(__file__).parents[2] / "docs" / "biases"
HEADS, SHOWN, FARTHEST = 8, (1, 4, 8), 1024
METHODS = ("alibi", "log-alibi", "sandwich", "kerple")


def table(name: str, length: int = FARTHEST) -> torch.Tensor:
    """A method's bias at each distance, a row for each head."""
    torch.manual_seed(1)  # KERPLE's first values are drawn
    bias = build_position(ModelConfig(heads=HEADS, position=name)).score_bias(length)
    if isinstance(bias, LinearBias):
        return -bias.slopes[:, None] * torch.arange(length)
    assert isinstance(bias, DistanceBias)
    return bias.table.detach()


def figure(name: str) -> Figure:
    rows, places = table(name), tuple(range(0, FARTHEST, 4))
    colors = (color(name), *OTHERS)
    series = tuple(
        Series(f"head {head} of {HEADS}", places, tuple(rows[head - 1, list(places)].tolist()), colors[index])
        for index, head in enumerate(SHOWN)
    )
    alt = f"{name}: bias by distance of heads {', '.join(map(str, SHOWN))}"
    return Figure(name, name, alt, series, x_label="distance", y_label="bias (nats)")


if __name__ == "__main__":
    draw([figure(name) for name in METHODS], PICTURE, size=(16.0, 3.6))
    PICTURE.with_suffix(".svg").unlink()
