"""A run with random, loud weights and a small tokenizer, as if it had been trained."""

import json
from pathlib import Path

import torch

from trainshort.config.run_config import ModelConfig, RunConfig, TrainConfig
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import CheckpointData, TrainState, model_tensors, save
from trainshort.train.parallel import World


def make_run(path: Path, *, length: int = 32, **settings) -> Path:
    torch.manual_seed(0)
    settings = {"vocab_size": 256, "layers": 2, "width": 64, "heads": 4, **settings}
    model = TransformerLM(ModelConfig.parse(settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "slopes" in name:
                weight.mul_(1.3)
            else:
                weight.mul_(4 if weight.dim() == 2 and "vocabulary" not in name else 1)
                weight.add_(0.1 * torch.randn_like(weight) * (weight.dim() == 1))
    config = RunConfig(model=model.config, train=TrainConfig(length=length))
    path.mkdir()
    (path / "checkpoints").mkdir()
    (path / "config.json").write_text(config.model_dump_json())
    (path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    state = TrainState(step=0, tokens=0, seconds=0.0, window_nll=0.0, window_count=0)
    save(path, CheckpointData(config, state, {"model": model_tensors(model)}), World())
    return path


def record(folder: Path) -> dict:
    return json.loads((folder / "trainshort.json").read_text())
