"""`python -m benchmarks.plot_biases`: docs/biases*.png, what methods add to a score at each distance, drawn from
the methods themselves at their first values."""

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
HEADS, SHOWN, FARTHEST, WIDTH = 8, (1, 4, 8), 1024, 512
PLACES = (*range(0, 32, 4), *range(32, FARTHEST, 16), FARTHEST - 1)
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
"""Every method but those that add to the embeddings or do nothing, by picture and panel."""


@torch.no_grad()
def by_distance(method: PositionMethod, length: int = FARTHEST) -> Float[Tensor, "lines distances"]:
    """What a method adds to the scores of the last query, a line for each head: nearest key first. One that looks at
    the text reads random numbers. One that turns has one line: the product of two equal vectors of length 1."""
    torch.manual_seed(1)
    if method.rotates():
        same = torch.full((1, 1, length, WIDTH // HEADS), (WIDTH / HEADS) ** -0.5)
        q, k = method.rotate(same, same, torch.arange(length)[None])
        return (k[0, 0] @ q[0, 0, -1]).flip(0)[None]
    x, where = torch.randn(1, length, WIDTH), torch.arange(length)[None]
    heads = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
    call = AttentionCall(heads, heads, heads, method.content_bias(LayerInput(0, x, length, where, {})))
    written = materialize_bias(call, slice(length - 1, length), slice(0, length))
    if written is None:
        raise ValueError(f"{method.name} adds nothing")
    return written.reshape(-1, length).flip(1)


def figure(title: str, settings: dict[str, Any]) -> Figure:
    torch.manual_seed(1)  # KERPLE's first values are drawn
    config = ModelConfig.parse({"heads": HEADS, "width": WIDTH, "layers": 1, "vocab_size": 2} | settings)
    method = build_position(config)
    if isinstance(method, Bam):  # which begins as ALiBi: what training can make of it
        method.power.data[[head - 1 for head in SHOWN]] = torch.tensor([0.5, 0.8, 1.0])
        method.scale.data.fill_(math.log(1 / 16))
    rows, colors = by_distance(method), (method_color(config.position), *OTHERS)
    names = [f"head {head} of {HEADS}" for head in SHOWN] if len(rows) > 1 else ["equal vectors"]
    series = tuple(
        Series(name, PLACES, tuple(rows[head - 1, list(PLACES)].tolist()), colors[index])
        for index, (name, head) in enumerate(zip(names, SHOWN, strict=False))
    )
    label = "bias (nats)" if len(rows) > 1 else "product"
    return Figure(config.position, title, f"{title}: {label} by distance", series, x_label="distance", y_label=label)


if __name__ == "__main__":
    for picture, panels in PICTURES.items():
        path = FOLDER / picture
        draw_figures([figure(title, settings) for title, settings in panels.items()], path, size=(16.0, 3.6))
        path.with_suffix(".svg").unlink()
