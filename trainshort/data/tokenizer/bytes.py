"""`bytes`: every byte of UTF-8 is a token; nothing is built and nothing is lost."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from trainshort.data.tokenizer.base import ByteDecoder, Decoder, Ids, Tokenizer, byte_alphabet, tokenizers


@tokenizers.register("bytes")
class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8. A document ends with byte 0, which text does not contain."""

    name = "bytes"
    summary = "a token is a byte of UTF-8; 256 of them"
    vocabulary = 256
    end = 0

    @classmethod
    def build(cls, texts: Iterable[str], vocabulary: int, size: int | None) -> "ByteTokenizer":
        return cls()

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "ByteTokenizer | None":
        model = layout["model"]
        same = model.get("type") == "BPE" and not model["merges"] and model["vocab"] == _vocabulary()
        return cls() if same else None

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self.checked(ids)).decode(errors="replace")

    def decoder(self) -> Decoder:
        return ByteDecoder(lambda token: bytes([token]))

    def to_json(self) -> str:
        from tokenizers import Tokenizer as Saved
        from tokenizers import decoders, models, pre_tokenizers

        saved = Saved(models.BPE(_vocabulary(), []))
        saved.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        saved.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        return saved.to_str()


def _vocabulary() -> dict[str, int]:
    return {letter: byte for byte, letter in byte_alphabet().items()}
