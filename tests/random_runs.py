"""Create run folders that contain a model with random weights and a byte tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainshort.config.run_config import ModelConfig, RunConfig, TrainConfig
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import CheckpointData, TrainState, model_tensors, save
from trainshort.train.parallel import World


def make_run(path: Path, *, length: int = 32, **settings: Any) -> Path:
    """Create a run folder with a checkpoint of step 0.

    Args:
        path: The run folder.
        length: The training length in the config.
        settings: Settings of the model.

    Returns:
        `path`.
    """
    torch.manual_seed(0)
    settings = {"vocab_size": 256, "layers": 2, "width": 64, "heads": 4, **settings}
    model = TransformerLM(ModelConfig.parse(settings))
    _enlarge_weights(model)
    config = RunConfig(model=model.config, train=TrainConfig(length=length))
    path.mkdir()
    (path / "checkpoints").mkdir()
    (path / "config.json").write_text(config.model_dump_json())
    (path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    state = TrainState(step=0, tokens=0, seconds=0.0, window_nll=0.0, window_count=0)
    save(path, CheckpointData(config, state, {"model": model_tensors(model)}), World())
    return path


@torch.no_grad()
def _enlarge_weights(model: nn.Module) -> None:
    """Make the weights so large that the outputs of the model depend visibly on its inputs."""
    for name, weight in model.named_parameters():
        if "slopes" in name:
            weight.mul_(1.3)
            continue
        is_layer_matrix = weight.dim() == 2 and "vocabulary" not in name
        weight.mul_(4 if is_layer_matrix else 1)
        # Matrices do not use the noise. It is drawn anyway, because tests depend on the sequence of random numbers.
        noise = torch.randn_like(weight)
        is_vector = weight.dim() == 1
        weight.add_(0.1 * noise * is_vector)


def record(folder: Path) -> dict[str, Any]:
    """Return the description of an export, which `trainshort export` writes to trainshort.json."""
    return json.loads((folder / "trainshort.json").read_text())
