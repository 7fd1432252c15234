"""The settings of text generation. This module does not import torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trainshort.config.base import StrictConfig

Mode = Literal["full", "bounded", "window"]


class GenerateConfig(StrictConfig):
    """The settings of `trainshort generate` and of `trainshort.stream`."""

    tokens: int | None = Field(default=256, ge=1)
    """The number of tokens to generate per sample; none: without end."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Divides the logits. Below 1, likely tokens become more likely. 0 always chooses the most likely token."""
    top_k: int | None = Field(default=None, ge=1)
    """Choose among this number of most likely tokens."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Choose among the most likely tokens that together have this probability."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Choose among the tokens with at least this share of the highest probability."""
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Above 1, tokens that already occurred become less likely (as in CTRL)."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample. They are not printed."""
    stop_at_end: bool = True
    """Whether the end-of-text token ends a sample."""
    seed: int = Field(default=1, ge=0, lt=2**62)
    """The seed of the first sample. Each further sample uses the next number."""
    mode: Mode = "full"
    """What the KV cache keeps. full: all tokens; bounded: what can matter (ALiBi, FoX); window: the newest tokens."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Mode bounded: the softmax mass (sum of attention weights) that may be dropped from each query."""
    window: int | None = Field(default=None, ge=1)
    """Mode window: the number of newest tokens that a token attends to, itself included."""
    sinks: int = Field(default=0, ge=0)
    """Mode window: the number of first tokens that are kept too (StreamingLLM)."""
    chunk: int = Field(default=512, ge=1)
    """The number of prompt tokens per forward pass. A larger number needs more memory. The results are the same."""

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        """Check that the settings `window`, `sinks` and `stop` fit to the other settings."""
        if self.mode == "window" and self.window is None:
            raise ValueError("mode 'window' requires a window; set both, such as mode 'window' and window 1024")
        if self.window is not None and self.mode != "window":
            raise ValueError(f"window requires mode 'window', got mode '{self.mode}'")
        if self.sinks and self.mode != "window":
            raise ValueError(f"sinks require mode 'window', got mode '{self.mode}'")
        if "" in self.stop:
            raise ValueError("a stop text is empty; remove it, because every text contains the empty text")
        return self
