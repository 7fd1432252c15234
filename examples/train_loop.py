"""Train a small language model with ALiBi in plain PyTorch, and evaluate the model on longer inputs than in training.

    python examples/train_loop.py                 # trains on the source code of Python's standard library
    python examples/train_loop.py book.txt        # trains on a text file

The model reads bytes, so it needs no tokenizer. Only `alibi_attention` comes from trainshort. Everything else is plain
PyTorch.
"""

import argparse
import inspect
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainshort import alibi_attention

VOCAB_SIZE = 256  # One token for each value of a byte.


class Block(nn.Module):
    """A transformer block: attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        # (batch, length, 3 * width) -> three tensors of (batch, heads, length, head_width)
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = alibi_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class ByteModel(nn.Module):
    """A causal language model without position embeddings: ALiBi tells the attention how far away each token is."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load_tokens(path: Path | None) -> Tensor:
    """Return the bytes of a text file. The default is the source code of two modules of Python."""
    if path is not None:
        text = path.read_bytes()
    else:
        text = (inspect.getsource(argparse) + inspect.getsource(inspect)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def sample_batch(tokens: Tensor, batch_size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets from random places of the text. Each target is the token after its input."""
    starts = torch.randint(len(tokens) - length, (batch_size,), generator=generator).tolist()
    rows = torch.stack([tokens[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model: nn.Module, tokens: Tensor, *, steps: int, length: int, batch_size: int, seed: int) -> list[float]:
    """Train the model and return the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        inputs, targets = sample_batch(tokens, batch_size, length, generator)
        loss = mean_loss(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, length: int) -> float:
    """Return the perplexity of a text that the model reads in pieces of `length` tokens."""
    pieces = (len(tokens) - 1) // length
    inputs = tokens[: pieces * length].view(pieces, length)
    targets = tokens[1 : pieces * length + 1].view(pieces, length)
    return math.exp(mean_loss(model, inputs, targets).item())


def main(arguments: list[str] | None = None) -> dict[int, float]:
    """Train a model, print its perplexity at several lengths, and return the perplexities by length."""
    parser = argparse.ArgumentParser(description="Train a small language model with ALiBi in plain PyTorch.")
    parser.add_argument("text", type=Path, nargs="?", help="a text file (default: source code of Python)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=64, help="tokens in a training sequence")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    tokens = load_tokens(options.text)
    split = int(0.9 * len(tokens))
    train_tokens = tokens[:split]
    test_tokens = tokens[split:][:8193]

    torch.manual_seed(options.seed)
    model = ByteModel()
    print(f"{len(train_tokens):,} training tokens, sequences of {options.length} tokens")
    train(
        model,
        train_tokens,
        steps=options.steps,
        length=options.length,
        batch_size=options.batch_size,
        seed=options.seed,
    )

    perplexities = {}
    for length in (options.length, 4 * options.length, 16 * options.length):
        perplexities[length] = evaluate(model, test_tokens, length)
        print(f"perplexity at {length:5d} tokens: {perplexities[length]:.2f}")
    return perplexities


if __name__ == "__main__":
    main()
