"""Create small texts, models, run folders and Hugging Face models for tests."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainshort.config.run_config import DataConfig, ModelConfig, RunConfig, TrainConfig
from trainshort.data.preparation import prepare
from trainshort.evaluate.results import Evaluation, find_evaluations
from trainshort.evaluate.targets import ModelTarget
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import CheckpointData, TrainState, model_tensors, save
from trainshort.train.parallel import init_distributed
from trainshort.train.run_data import copy_data_description

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "two", "dogs", "ran", "past", "every", "old", "house", "rain")


def prose(sentences: int, seed: int = 0) -> str:
    """Return a random text with one sentence per line and five sentences per paragraph.

    Args:
        sentences: The number of sentences.
        seed: The seed of the random words.
    """
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, size=int(rng.integers(4, 12)))) for _ in range(sentences)]
    text = ""
    for index, line in enumerate(lines):
        is_end_of_paragraph = index % 5 == 4
        text += line + (".\n\n" if is_end_of_paragraph else ".\n")
    return text


def tiny_model(position: str = "alibi", **changes: Any) -> TransformerLM:
    """Return a model with two layers, in evaluation mode.

    The weights are so large that the losses of different tokens differ visibly.

    Args:
        position: The position method.
        changes: Changes of the settings of the model.
    """
    torch.manual_seed(3)
    settings = {"vocab_size": 32, "layers": 2, "width": 32, "heads": 4, "position": position}
    if position == "learned":
        settings["position_settings"] = {"max_length": 16}
    model = TransformerLM(ModelConfig(**{**settings, **changes}))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    return model.eval()


def tiny_target(position: str = "alibi", trained_at: int = 16, **changes: Any) -> ModelTarget:
    """Return an evaluation target with a small model.

    Args:
        position: The position method.
        trained_at: The training length.
        changes: Changes of the settings of the model.
    """
    return ModelTarget(tiny_model(position, **changes), trained_at=trained_at)


def random_tokens(count: int, vocab_size: int = 32, seed: int = 0) -> np.ndarray:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(vocab_size, size=count).astype(np.uint16)


def make_run(root: Path, name: str = "tiny", position: str = "alibi", **changes: Any) -> Path:
    """Create a run folder with data, config and one checkpoint. The tokens are bytes and the training length is 16.

    Args:
        root: The folder for the text, the prepared data and the run.
        name: The name of the run. The run folder is root/runs/name.
        position: The position method.
        changes: Changes of the settings of the model.

    Returns:
        The run folder.
    """
    corpus = root / f"{name}.txt"
    corpus.write_text(prose(400), encoding="utf-8")
    data_config = DataConfig(corpus=str(corpus), tokenizer="bytes", folder=root / f"{name}-data")
    prepared = prepare(data_config, progress=False)
    model = tiny_model(position, vocab_size=256, **changes)
    config = RunConfig(model=model.config, data=data_config, train=TrainConfig(length=16, batch=4, steps=5))
    run = root / "runs" / name
    run.mkdir(parents=True)
    (run / "config.json").write_text(config.model_dump_json(indent=2))
    state = TrainState(step=5, tokens=320, seconds=1.0, window_nll=0.0, window_count=0)
    with init_distributed() as world:
        save(run, CheckpointData(config, state, {"model": model_tensors(model)}), world)
    copy_data_description(run, prepared)
    return run


def evaluations(folder: Path) -> list[Evaluation]:
    """Return all stored evaluations of a run folder. The newest evaluation comes last."""
    return [stored.evaluation for stored in find_evaluations(folder)]


def save_hugging_face(folder: Path, kind: str) -> None:
    """Save a tiny Hugging Face model with random weights and a byte tokenizer.

    Args:
        folder: The folder for the model.
        kind: The architecture: "gpt2", "gptj", "bloom", "mpt", "llama" or "gemma2".
    """
    import transformers as hf

    common = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 0}
    gpt = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    llama = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    match kind:
        case "gpt2":
            model = hf.GPT2LMHeadModel(hf.GPT2Config(**common, **gpt))
        case "gptj":
            model = hf.GPTJForCausalLM(hf.GPTJConfig(**common, **gpt, rotary_dim=4))
        case "bloom":
            model = hf.BloomForCausalLM(hf.BloomConfig(**common, hidden_size=32, n_layer=2, n_head=4))
        case "mpt":
            model = hf.MptForCausalLM(hf.MptConfig(**common, d_model=32, n_heads=4, n_layers=2, max_seq_len=64))
        case "llama":
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**common, **llama))
        case "gemma2":
            gemma = {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.1}
            model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**common, **llama, **gemma))
        case _:
            raise ValueError(kind)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a Hugging Face tokenizer with one token for each byte and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from trainshort.data.tokenizers.base import byte_alphabet

    byte_tokens = {letter: byte + 2 for byte, letter in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE({"</s>": 0, "<s>": 1, **byte_tokens}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
