"""`trainshort generate`: continue a text, at any length."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainshort.commands.parser import Arg
from trainshort.errors import InputError

if TYPE_CHECKING:
    from trainshort.data.tokenizer import Tokenizer
    from trainshort.generate.session import Reach
    from trainshort.generate.streaming import Stream
    from trainshort.model import TransformerLM


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model, as far as wanted, in memory that can be bounded.

    Text goes to standard output as it is made; speed, warnings and the error certificate to standard error. Ctrl-C
    ends after the token at hand, and saves the state where --save-state asks for it.

    Examples:
      trainshort generate runs/demo-alibi "The state of the union"
      trainshort generate runs/demo-alibi --prompt-file speech.txt --tokens 500 --temperature 0.8 --top-p 0.95
      cat speech.txt | trainshort generate runs/demo-alibi - --samples 3
      trainshort generate runs/demo-alibi "We" "The Congress of" --tokens 50
      trainshort generate runs/demo-alibi "We" --endless --tolerance 1e-6 --save-state we.state
      trainshort generate runs/demo-alibi --resume-state we.state --endless
      trainshort generate runs/demo-alibi --interactive --mode bounded
    """

    run_folder: Annotated[Path, Arg(metavar="RUN", positional=True)]
    """A run folder, or one of its checkpoints."""
    prompt: Annotated[tuple[str, ...], Arg(positional=True)] = ()
    """Text to continue; several make a batch; - reads standard input."""
    prompt_file: Path | None = None
    """File with the text to continue, in UTF-8."""
    tokens: int | None = None
    """Tokens to make per sample. Default: 256."""
    endless: bool = False
    """Go on until stopped, also past the end of a text. Default mode: bounded."""
    interactive: bool = False
    """Ask for a line, continue it, ask again; the state stays."""
    samples: int = 1
    """Samples of each prompt, made side by side."""
    temperature: float | None = None
    """Divides the scores; 0 always takes the likeliest token. Default: 1."""
    top_k: int | None = None
    """Choose among this many likeliest tokens only."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Choose among tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float | None = None
    """Above 1, tokens that came before become less likely."""
    stop: tuple[str, ...] = ()
    """Texts at which a sample ends; they are not shown."""
    seed: int | None = None
    """Seed of the first sample; the next has the next number. Default: 1."""
    mode: Literal["full", "bounded", "window"] | None = None
    """What is remembered: full, everything; bounded, what can matter (ALiBi); window, the last. Default: full."""
    tolerance: float | None = None
    """Mode bounded: softmax mass that a row may lose. Default: 1e-6."""
    window: int | None = None
    """Mode window: tokens seen, the newest included."""
    sinks: int | None = None
    """Mode window: the first so many tokens are kept too (StreamingLLM)."""
    chunk: int | None = None
    """Tokens of a prompt read at once. Default: 512."""
    save_state: Path | None = None
    """File to save the state to at the end."""
    save_every: int = 0
    """Save the state also after every so many tokens."""
    resume_state: Path | None = None
    """State to go on from; a prompt is then read after it."""
    tokenizer: Path | None = None
    """A tokenizer.json. Default: that of the run's data."""

    def run(self) -> int:
        self._check()
        from trainshort.checkpoint import load_model
        from trainshort.generate.session import Session

        prompts = self._prompts()
        model = load_model(self.run_folder)
        tokenizer = self._tokenizer()
        stream = self._stream(model, tokenizer, prompts)
        session = Session(stream, self._reach(), self.save_state, self.save_every)
        return session.interact() if self.interactive else session.run()

    def _check(self) -> None:
        if self.samples < 1 or self.save_every < 0:
            raise InputError("--samples is at least 1 and --save-every at least 0.")
        if self.endless and (self.tokens is not None or self.stop or self.interactive):
            raise InputError("--endless goes on until stopped; it does not go with --tokens, --stop or --interactive.")
        if self.prompt and self.prompt_file:
            raise InputError("give the prompt as an argument or by --prompt-file, not both.")
        if self.resume_state and (self.samples > 1 or len(self.prompt) > 1):
            raise InputError("--resume-state goes on with the samples it saved; give at most one prompt, no --samples.")
        if self.interactive and (self.samples > 1 or len(self.prompt) > 1 or "-" in self.prompt):
            raise InputError("--interactive is one conversation: at most one prompt, not from standard input.")
        if self.save_state is not None and not self.save_state.absolute().parent.is_dir():
            raise InputError(f"There is no folder {self.save_state.parent} to save the state in; make it first.")

    def _prompts(self) -> list[str]:
        if self.prompt_file is not None:
            prompts = [_read_text(self.prompt_file)]
        else:
            prompts = [_read_stdin() if prompt == "-" else prompt for prompt in self.prompt]
        if any(not prompt for prompt in prompts) or not (prompts or self.resume_state or self.interactive):
            raise InputError(
                "the prompt is empty. Give a text to continue, --prompt-file FILE, or - for standard input."
            )
        return [prompt for prompt in prompts for _ in range(self.samples)]

    def _stream(self, model: "TransformerLM", tokenizer: "Tokenizer", prompts: list[str]) -> "Stream":
        from trainshort.generate.settings import GenerateConfig
        from trainshort.generate.state import load_state
        from trainshort.generate.streaming import Stream

        settings = self._settings(model)
        if self.resume_state is not None:
            stream = load_state(self.resume_state, model, tokenizer, **settings)
            for number, sample in enumerate(stream.samples):
                if prompts:
                    stream.feed(prompts[0], number)
                else:
                    sample.go_on()
            return stream
        stream = Stream(model, GenerateConfig.read(settings), tokenizer)
        for prompt in prompts:
            stream.add(prompt)
        if self.interactive and not prompts:
            stream.begin()
        return stream

    def _settings(self, model: "TransformerLM") -> dict[str, Any]:
        """The settings that were given; the rest have their defaults, or those of the saved state."""
        names = ("tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        names += ("mode", "tolerance", "window", "sinks", "chunk")
        settings = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop:
            settings["stop"] = self.stop
        if self.endless:
            settings |= {"tokens": None, "stop_at_end": False}
            if self.mode is None and self.resume_state is None:
                if model.position.linear_slopes() is None:
                    raise InputError(
                        f"--endless in bounded memory needs ALiBi; this model has {model.config.position}. "
                        "Choose how to forget: --mode window --window 1024, or --mode full until memory ends."
                    )
                settings["mode"] = "bounded"
        return settings

    def _tokenizer(self) -> "Tokenizer":
        """The run's own, from its folder, or from where its data was prepared."""
        from trainshort.config import load_config
        from trainshort.data import load_tokenizer
        from trainshort.data.request import data_folder

        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        for run in (self.run_folder, self.run_folder.parent.parent):  # or of a checkpoint
            if (run / "tokenizer.json").exists() and (run / "config.json").exists():
                return load_tokenizer(run)
        folder = data_folder(load_config(self.run_folder / "config.json").data)
        if not (folder / "tokenizer.json").exists():
            raise InputError(
                f"{self.run_folder} has no tokenizer: its data folder {folder} is not here. "
                "Prepare the data again, or give --tokenizer FILE."
            )
        return load_tokenizer(folder)

    def _reach(self) -> "Reach":
        """How far the model is known to be good: by its card, else no farther than its training length."""
        from trainshort.config import load_config
        from trainshort.evaluate import card
        from trainshort.generate.session import Reach

        run = self.run_folder if (self.run_folder / "checkpoints").exists() else self.run_folder.parent.parent
        found = card.load(run)
        if found is None:
            length = load_config(self.run_folder / "config.json").train.length
            words = f"the model was trained at that length and not measured past it; trainshort evaluate {run} does."
            return Reach(length, words)
        mark = found["no_worse"]
        past = "nothing longer was measured" if mark["open"] else "it was measured worse past that"
        return Reach(mark["length"], f"{found['summary']}; {past}.")


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}). Convert it, such as with iconv.") from None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"Standard input is not UTF-8 (byte {error.start}). Convert it, such as with iconv.") from None
