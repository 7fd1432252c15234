"""Draw docs/biases*.png: what each position method adds to the scores of attention, by distance.

    python -m benchmarks.plot_biases

The values are computed by the position methods themselves, with their initial parameters.
"""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention import AttentionCall
from trainshort.attention.backends.reference import materialize_bias
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions import LayerInput, PositionMethod, build_position
from trainshort.model.positions.bam import Bam
from trainshort.utils.figures import OTHERS, Figure, Series, draw_figures, method_color

FOLDER = Path(__file__).parents[1] / "docs"

# The shape of the model whose biases are drawn.
HEADS = 8
WIDTH = 512

# The heads that are drawn, counted from 1.
SHOWN = (1, 4, 8)

# Keys up to this distance are drawn. Small distances are drawn with more points.
LENGTH = 1024
DRAWN_DISTANCES = (*range(0, 32, 4), *range(32, LENGTH, 16), LENGTH - 1)

PICTURES: dict[str, dict[str, dict[str, Any]]] = {
    "biases": {
        "alibi": {"position": "alibi"},
        "log-alibi": {"position": "log-alibi"},
        "sandwich": {"position": "sandwich"},
        "t5": {"position": "t5"},
    },
    "biases-trained": {
        "kerple (log)": {"position": "kerple"},
        "kerple (power)": {"position": "kerple", "position_settings": {"form": "power"}},
        "bam, exponents 0.5, 0.8, 1": {"position": "bam"},
        "fire, of the last query": {"position": "fire"},
    },
    "biases-text": {
        "fox, gates from 0.5": {"position": "fox"},
        "fox, gates from slopes": {"position": "fox", "position_settings": {"init": "alibi"}},
        "rotary": {"position": "rotary"},
        "xpos": {"position": "xpos"},
    },
}
"""The settings of each panel, by the name of the picture and the title of the panel. Every position method has a panel,
except for methods that change the embeddings and for the method "none"."""


@torch.no_grad()
def score_changes_by_distance(method: PositionMethod, length: int = LENGTH) -> Float[Tensor, "lines distances"]:
    """Return what a position method adds to the scores of the last query, starting with the nearest key.

    Args:
        method: The position method. Methods that depend on the text read random numbers.
        length: The number of keys.

    Returns:
        One line per head. A method that rotates queries and keys has one line: the inner products of two equal vectors
        of length 1 after the rotation.

    Raises:
        ValueError: If the method adds nothing to the scores.
    """
    torch.manual_seed(1)
    position_ids = torch.arange(length)[None]
    if method.rotates():
        head_width = WIDTH // HEADS
        unit_vectors = torch.full((1, 1, length, head_width), (WIDTH / HEADS) ** -0.5)
        q, k = method.rotate(unit_vectors, unit_vectors, position_ids)
        inner_products = k[0, 0] @ q[0, 0, -1]
        return inner_products.flip(0)[None]

    x = torch.randn(1, length, WIDTH)
    heads = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
    bias = method.content_bias(LayerInput(0, x, length, position_ids, {}))
    call = AttentionCall(heads, heads, heads, bias)
    last_query = slice(length - 1, length)
    all_keys = slice(0, length)
    values = materialize_bias(call, last_query, all_keys)
    if values is None:
        raise ValueError(f"The position method {method.name} adds nothing to the scores.")
    return values.reshape(-1, length).flip(1)


def figure(title: str, settings: dict[str, Any]) -> Figure:
    """Return the panel of one position method.

    Args:
        title: The title of the panel.
        settings: Settings of `ModelConfig`, with the position method.
    """
    torch.manual_seed(1)  # KERPLE draws its initial values at random.
    config = ModelConfig.parse({"heads": HEADS, "width": WIDTH, "layers": 1, "vocab_size": 2} | settings)
    method = build_position(config)
    if isinstance(method, Bam):
        _set_bam_example(method)

    lines = score_changes_by_distance(method)
    has_line_per_head = len(lines) > 1
    if has_line_per_head:
        line_names = [f"head {head} of {HEADS}" for head in SHOWN]
        label = "bias (nats)"
    else:
        line_names = ["equal vectors"]
        label = "product"

    colors = (method_color(config.position), *OTHERS)
    series = []
    # `zip` stops at the shorter argument, so a method with one line uses only the first head.
    for line_name, head, color in zip(line_names, SHOWN, colors, strict=False):
        values = lines[head - 1, list(DRAWN_DISTANCES)].tolist()
        series.append(Series(line_name, DRAWN_DISTANCES, tuple(values), color))
    return Figure(
        config.position, title, f"{title}: {label} by distance", tuple(series), x_label="distance", y_label=label
    )


def _set_bam_example(method: Bam) -> None:
    """Set parameters that training could reach. The initial parameters of BAM make it equal to ALiBi."""
    shown_indices = [head - 1 for head in SHOWN]
    method.power.data[shown_indices] = torch.tensor([0.5, 0.8, 1.0])
    method.scale.data.fill_(math.log(1 / 16))


def main() -> None:
    """Draw all pictures into the folder docs."""
    for picture, panels in PICTURES.items():
        path = FOLDER / picture
        figures = [figure(title, settings) for title, settings in panels.items()]
        draw_figures(figures, path, size=(16.0, 3.6))
        # Only the PNG file is used in the documentation.
        path.with_suffix(".svg").unlink()


if __name__ == "__main__":
    main()
