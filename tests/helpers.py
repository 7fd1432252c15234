"""Small real things for the tests of evaluation and analysis: texts, models, run folders, Hugging Face models."""

from pathlib import Path

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

WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "two", "dogs", "ran", "past", "every", "old", "house", "rain")


def prose(sentences: int, seed: int = 0) -> str:
    """A text of short paragraphs, the same for the same seed."""
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, size=int(rng.integers(4, 12)))) for _ in range(sentences)]
    return "".join(line + (".\n\n" if index % 5 == 4 else ".\n") for index, line in enumerate(lines))


def tiny_model(position: str = "alibi", **changes) -> TransformerLM:
    """Two layers with weights large enough that losses differ from token to token."""
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


def tiny_target(position: str = "alibi", trained_at: int = 16, **changes) -> ModelTarget:
    return ModelTarget(tiny_model(position, **changes), trained_at=trained_at)


def random_tokens(count: int, vocab_size: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab_size, size=count).astype(np.uint16)


def make_run(root: Path, name: str = "tiny", position: str = "alibi", **changes) -> Path:
    """A run folder with data, config and one checkpoint, as training leaves it; byte tokens, trained length 16."""
    corpus = root / f"{name}.txt"
    corpus.write_text(prose(400), encoding="utf-8")
    data = DataConfig(corpus=str(corpus), tokenizer="bytes", folder=root / f"{name}-data")
    prepared = prepare(data, progress=False)
    model = tiny_model(position, vocab_size=256, **changes)
    config = RunConfig(model=model.config, data=data, train=TrainConfig(length=16, batch=4, steps=5))
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json(indent=2))
    state = TrainState(step=5, tokens=320, seconds=1.0, window_nll=0.0, window_count=0)
    with init_distributed() as world:
        save(folder, CheckpointData(config, state, {"model": model_tensors(model)}), world)
    copy_data_description(folder, prepared)
    return folder


def evaluations(folder: Path) -> list[Evaluation]:
    """What was evaluated in a run folder, the newest last."""
    return [stored.evaluation for stored in find_evaluations(folder)]


def save_hugging_face(folder: Path, kind: str) -> None:
    """A tiny model of this kind with random weights and a byte tokenizer, as transformers saves them."""
    import transformers as hf

    small = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 0}
    torch.manual_seed(0)
    gpt = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    match kind:
        case "gpt2":
            model = hf.GPT2LMHeadModel(hf.GPT2Config(**small, **gpt))
        case "gptj":
            model = hf.GPTJForCausalLM(hf.GPTJConfig(**small, **gpt, rotary_dim=4))
        case "bloom":
            model = hf.BloomForCausalLM(hf.BloomConfig(**small, hidden_size=32, n_layer=2, n_head=4))
        case "mpt":
            model = hf.MptForCausalLM(hf.MptConfig(**small, d_model=32, n_heads=4, n_layers=2, max_seq_len=64))
        case "llama":
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**small, **llama, max_position_embeddings=64))
        case "gemma2":
            extra = {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.1}
            model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**small, **llama, **extra, max_position_embeddings=64))
        case _:
            raise ValueError(kind)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer():
    """A transformers tokenizer of 256 bytes and two special tokens, made here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from trainshort.data.tokenizers.base import byte_alphabet

    letters = {letter: byte + 2 for byte, letter in byte_alphabet().items()}
    made = Tokenizer(models.BPE({"</s>": 0, "<s>": 1, **letters}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
