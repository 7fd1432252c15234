"""How text is made: typed settings, checked before anything is computed. No torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trainshort.config.base import StrictConfig

Mode = Literal["full", "bounded", "window"]


class GenerateConfig(StrictConfig):
    """The settings of `trainshort generate` and of `trainshort.stream`."""

    tokens: int | None = Field(default=256, ge=1)
    """Tokens to make per sample; none: without end."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Divide the logits by this number. Below 1, likely tokens become likelier; 0 takes the likeliest token."""
    top_k: int | None = Field(default=None, ge=1)
    """Choose among this many likeliest tokens only."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Choose among the likeliest tokens that together have this probability."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Choose among tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Above 1, tokens that were read or made before become less likely (as in CTRL)."""
    stop: tuple[str, ...] = ()
    """Texts at which a sample ends; they are not shown."""
    stop_at_end: bool = True
    """Whether a sample ends at the tokenizer's end-of-text token."""
    seed: int = Field(default=1, ge=0, lt=2**62)
    """Seed of the first sample; the next has the next number."""
    mode: Mode = "full"
    """What is remembered: full, everything; bounded, what can matter (ALiBi); window, the last tokens."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Mode bounded: softmax mass that a row may lose."""
    window: int | None = Field(default=None, ge=1)
    """Mode window: tokens seen, the newest included."""
    sinks: int = Field(default=0, ge=0)
    """Mode window: the first so many tokens are kept too (StreamingLLM)."""
    chunk: int = Field(default=512, ge=1)
    """Tokens of a prompt read at once; memory grows with it, results do not change."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.mode == "window") != (self.window is not None):
            raise ValueError("mode 'window' and a window go together; give both, such as mode 'window' and window 1024")
        if self.sinks and self.mode != "window":
            raise ValueError(f"sinks belong to mode 'window', and the mode is '{self.mode}'")
        if "" in self.stop:
            raise ValueError("a stop text is empty, which every text contains; leave it out")
        return self
