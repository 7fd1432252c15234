"""`trainshort generate`: continue a text, at any length."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainshort.cli.parser import Arg, at_least, options_from_config, read_command
from trainshort.errors import InputError
from trainshort.generate.config import GenerateConfig
from trainshort.utils import io
from trainshort.utils.terminal import print_status

if TYPE_CHECKING:
    from trainshort.data.tokenizers.base import Tokenizer
    from trainshort.evaluate.overrides import Override
    from trainshort.generate.session import EvaluatedLength
    from trainshort.generate.streaming import TokenStream
    from trainshort.model.transformer import TransformerLM


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model, as far as wanted, in memory that can be bounded.

    Text goes to standard output as it is made; speed, warnings and the error certificate to standard error. Ctrl-C
    ends after the token at hand.

    Examples:
      trainshort generate runs/demo-alibi "The state of the union"
      trainshort generate runs/demo-alibi --prompt-file speech.txt --tokens 500 --temperature 0.8 --top-p 0.95
      cat speech.txt | trainshort generate runs/demo-alibi - --samples 3
      trainshort generate runs/demo-alibi "We" "The Congress of" --tokens 50
      trainshort generate runs/demo-alibi "We" --endless --tolerance 1e-6
      trainshort generate runs/demo-alibi --interactive --mode bounded
    """

    run_folder: Annotated[Path, Arg(metavar="RUN", positional=True)]
    """A run folder, one of its checkpoints, or a Hugging Face model's folder, which is imported for this once."""
    prompt: Annotated[tuple[str, ...], Arg(positional=True)] = ()
    """Text to continue; several make a batch; - reads standard input."""
    prompt_file: Annotated[Path | None, Arg(metavar="FILE")] = None
    """File with the text to continue, in UTF-8."""
    endless: bool = False
    """Go on until stopped, also past the end of a text; in mode bounded unless --mode says otherwise."""
    interactive: bool = False
    """Ask for a line, continue it, ask again. The text so far is remembered."""
    samples: int = 1
    """Samples of each prompt, made side by side."""
    tokenizer: Annotated[Path | None, Arg(metavar="FILE")] = None
    """A tokenizer.json in place of the run's own."""
    slopes: str | None = None
    """Other ALiBi slopes than trained: interpolate, ntk=4, clamp=512, max_bias=16, or window=512."""
    rotary: str | None = None
    """Rotary positions that turn slower than trained: linear=4, ntk=4, dynamic=1, yarn=4; or seen in blocks=256."""
    scores: str | None = None
    """Factor of every product of a query and a key, such as 1.2."""
    settings: Any = None
    """The settings of GenerateConfig that were given on the command line. The others have their defaults."""

    @classmethod
    def parse(cls, words: list[str]) -> "Generate":
        """From the command line: the options above, and one for every setting of GenerateConfig."""
        return read_command(cls, words, options_from_config(GenerateConfig()))

    def run(self) -> int:
        self._check()
        from trainshort.evaluate.overrides import Override
        from trainshort.evaluate.targets import reject_foreign_export
        from trainshort.generate.session import Session
        from trainshort.train.checkpoint import is_hugging_face
        from trainshort.train.checkpoint_files import extrapolation_summary

        prompts = self._prompts()
        reject_foreign_export(self.run_folder)
        self._check_run()
        GenerateConfig.parse(self.settings)  # a wrong one is told before the model is loaded
        change = Override.from_options(self.slopes, self.rotary, self.scores)
        opened = self._brought_in() if is_hugging_face(self.run_folder) else self._own()
        settings = self._settings(opened.model)
        with nullcontext() if change is None else self._changed(change, opened, settings, prompts):
            stream = self._stream(opened, settings, prompts)
            if line := extrapolation_summary(self.run_folder):  # told when nothing is left to refuse
                print_status(f"{self.run_folder}: {line}.")
            session = Session(stream, opened.reach)
            return session.interact() if self.interactive else session.run()

    def _changed(
        self, change: "Override", opened: "Opened", settings: dict[str, Any], prompts: list[str]
    ) -> AbstractContextManager[None]:
        """Inside, the model runs with the change that the options ask for."""
        from trainshort.evaluate.overrides import apply_override

        tokens = GenerateConfig.parse(settings).tokens
        if tokens is None or self.interactive:
            raise InputError(
                f"--{change.option} is for one text of a known length; it does not go with --endless or --interactive."
            )
        if change.method == "blocks" and self.settings.get("mode", "full") != "full":
            raise InputError(
                "--rotary blocks goes with --mode full: blocks are counted from the beginning of the text."
            )
        if opened.trained_at is None:
            raise InputError(f"--{change.option} needs the training length, which {self.run_folder} does not tell.")
        longest = max(len(opened.tokenizer.encode(prompt)) for prompt in prompts)
        return apply_override(opened.model, change, opened.trained_at, longest + tokens)

    def _check(self) -> None:
        at_least(1, samples=self.samples)
        if self.endless and (self.interactive or not {"tokens", "stop"}.isdisjoint(self.settings)):
            raise InputError("--endless goes on until stopped; it does not go with --tokens, --stop or --interactive.")
        if self.prompt and self.prompt_file:
            raise InputError("give the prompt as an argument or by --prompt-file, not both.")
        if self.interactive and (self.samples > 1 or len(self.prompt) > 1 or "-" in self.prompt):
            raise InputError(
                "--interactive is one conversation: at most one prompt, not from standard input, no --samples."
            )

    def _check_run(self) -> None:
        from trainshort.evaluate.targets import looks_like_hub_name

        folder = self.run_folder
        if folder.exists():
            return
        hint = "`ls runs` shows the runs made here"
        if looks_like_hub_name(str(folder)):
            hint = f"A model from elsewhere is brought in first: trainshort import {folder} --out runs/{folder.name}"
        raise InputError(f"There is no run folder {folder}. {hint}.")

    def _own(self) -> "Opened":
        """A run, or one of its checkpoints. How far it is known to be good: by its card, else no farther than its
        training length."""
        from trainshort.config.run_config import load_config
        from trainshort.evaluate.significance import load_summary
        from trainshort.generate.session import EvaluatedLength
        from trainshort.train.checkpoint import find_checkpoint, load_model

        checkpoint, config = find_checkpoint(self.run_folder), load_config(self.run_folder / "config.json")
        run = self.run_folder.resolve().parent.parent if checkpoint == self.run_folder else self.run_folder
        tokenizer, length = self._tokenizer(run), config.train.length
        if found := load_summary(run):
            past = "nothing longer was measured" if found["no_worse"]["open"] else "it was measured worse past that"
            reach = EvaluatedLength(found["no_worse"]["length"], f"{found['summary']}; {past}.")
        else:
            words = f"the model was trained at that length and not measured past it; trainshort evaluate {run} does."
            reach = EvaluatedLength(length, words)
        return Opened(load_model(checkpoint), tokenizer, length, reach)

    def _brought_in(self) -> "Opened":
        """A Hugging Face folder, imported into memory for this one use."""
        from trainshort.generate.session import EvaluatedLength
        from trainshort.interop.import_model import ImportRequest, load_in_memory

        model, source = load_in_memory(ImportRequest(str(self.run_folder), tokenizer=self.tokenizer))
        if source.tokenizer is None:
            raise InputError(f"{self.run_folder} has no tokenizer.json. Give --tokenizer FILE.")
        keep = f"; to keep it: trainshort import {self.run_folder} --out runs/{self.run_folder.resolve().name}"
        keep = "" if model.position.rotates() else keep  # which import does not take
        print_status(f"{self.run_folder} is a Hugging Face model, imported for this once{keep}")
        length = source.weight_map.model.training_length
        words = "the model was trained at that length, and what it is past it was not measured here."
        return Opened(model, source.tokenizer, length, EvaluatedLength(length, words) if length else None)

    def _prompts(self) -> list[str]:
        if self.prompt_file is not None:
            prompts = [io.read_text(self.prompt_file, hint="Give a text file in UTF-8.")]
        else:
            prompts = [_read_stdin() if prompt == "-" else prompt for prompt in self.prompt]
        if any(not prompt for prompt in prompts) or not (prompts or self.interactive):
            raise InputError(
                "the prompt is empty. Give a text to continue, --prompt-file FILE, or - for standard input."
            )
        return [prompt for prompt in prompts for _ in range(self.samples)]

    def _stream(self, opened: "Opened", settings: dict[str, Any], prompts: list[str]) -> "TokenStream":
        from trainshort.generate.streaming import TokenStream

        stream = TokenStream(opened.model, GenerateConfig.parse(settings), opened.tokenizer)
        for prompt in prompts:
            stream.add(prompt)
        if self.interactive and not prompts:
            stream.begin()
        return stream

    def _settings(self, model: "TransformerLM") -> dict[str, Any]:
        """The settings that were given, and those that --endless means."""
        if not self.endless:
            return self.settings
        settings = {**self.settings, "tokens": None, "stop_at_end": False}
        if "mode" not in settings:
            if not model.position.has_error_bound():
                raise InputError(
                    f"--endless in bounded memory needs ALiBi or FoX; this model has {model.config.position}. "
                    "Choose how to forget: --mode window --window 1024, or --mode full until memory ends."
                )
            settings["mode"] = "bounded"
        return settings

    def _tokenizer(self, run: Path) -> "Tokenizer":
        """Load the tokenizer that was given by --tokenizer, or the tokenizer of the run."""
        from trainshort.data.tokenizers.base import load_tokenizer
        from trainshort.train.run_data import RUN_DATA_FILE, TOKENIZER, run_tokenizer

        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        if not (run / TOKENIZER).exists() and not (run / RUN_DATA_FILE).exists():
            raise InputError(f"{self.run_folder} has no tokenizer. Give --tokenizer FILE.")
        return run_tokenizer(run)


@dataclass(frozen=True)
class Opened:
    """A model, with what generating needs to know of it."""

    model: "TransformerLM"
    tokenizer: "Tokenizer"
    trained_at: int | None
    reach: "EvaluatedLength | None"


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"Standard input is not UTF-8 (byte {error.start}). Convert it, such as with iconv.") from None
