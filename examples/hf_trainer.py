"""Train a model of trainshort with the Trainer of Hugging Face, save the model and load it again.

    pip install 'trainshort[hf]' accelerate
    python examples/hf_trainer.py

`import trainshort.hf` registers the model class. After that, `AutoModelForCausalLM`, `generate`, `pipeline` and
`Trainer` accept models of trainshort.
"""

import argparse
import inspect
import math
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

import trainshort.hf
from trainshort import ModelConfig, TransformerLM

VOCAB_SIZE = 256  # One token for each value of a byte, so no tokenizer is needed.


class ByteDataset(Dataset):
    """A text as pieces of `length` bytes. The model shifts the labels itself, as all models of transformers do."""

    def __init__(self, text: bytes, length: int) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        pieces = len(tokens) // length
        self.pieces = tokens[: pieces * length].view(pieces, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[index]
        return {"input_ids": piece, "labels": piece}


def main(arguments: list[str] | None = None) -> dict[int, float]:
    """Train a model, print its perplexity at several lengths, and return the perplexities by length."""
    parser = argparse.ArgumentParser(description="Train a model of trainshort with the Trainer of Hugging Face.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--length", type=int, default=64, help="tokens in a training sequence")
    parser.add_argument("--out", help="folder for the trained model (default: a temporary folder)")
    options = parser.parse_args(arguments)
    out = options.out or tempfile.mkdtemp(prefix="trainshort-hf-")

    # The built-in text is source code of Python. The last tenth is the test split.
    text = (inspect.getsource(argparse) + inspect.getsource(inspect)).encode()
    split = int(0.9 * len(text))
    train_text, test_text = text[:split], text[split:][:8192]

    set_seed(0)
    config = ModelConfig(vocab_size=VOCAB_SIZE, layers=2, width=64, heads=4, position="alibi")
    model = trainshort.hf.TrainshortForCausalLM.from_trainshort(TransformerLM(config), trained_at=options.length)

    training_arguments = TrainingArguments(
        output_dir=out,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=4,
        learning_rate=3e-3,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=training_arguments, train_dataset=ByteDataset(train_text, options.length))
    trainer.train()

    perplexities = {}
    for length in (options.length, 4 * options.length, 16 * options.length):
        metrics = trainer.evaluate(ByteDataset(test_text, length))
        perplexities[length] = math.exp(metrics["eval_loss"])
        print(f"perplexity at {length:5d} tokens: {perplexities[length]:.2f}")

    trainer.save_model(out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([list(b"def __init__(self")])
    generated = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    print(bytes(generated[0].tolist()).decode(errors="replace"))
    return perplexities


if __name__ == "__main__":
    main()
