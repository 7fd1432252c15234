"""`trainshort generate`: continue a text of any length."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainshort.cli.parser import Arg, check_minimum, options_from_config, read_command
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
    """Continue a text with a trained model

    The text is written to standard output while it is generated. The speed, warnings and the certificate (an upper
    bound on the softmax mass that was dropped) are written to standard error. Ctrl-C stops after the current token.

    Examples:
      trainshort generate runs/demo-alibi "The state of the union"
      trainshort generate runs/demo-alibi --prompt-file speech.txt --tokens 500 --temperature 0.8 --top-p 0.95
      cat speech.txt | trainshort generate runs/demo-alibi - --samples 3
      trainshort generate runs/demo-alibi "We" "The Congress of" --tokens 50
      trainshort generate runs/demo-alibi "We" --endless --tolerance 1e-6
      trainshort generate runs/demo-alibi --interactive --mode bounded
    """

    run_folder: Annotated[Path, Arg(metavar="RUN", positional=True)]
    """Use the model of this run folder, checkpoint or Hugging Face folder"""
    prompt: Annotated[tuple[str, ...], Arg(positional=True)] = ()
    """Continue these texts (one sample for each text), or read a text from standard input (-)"""
    prompt_file: Annotated[Path | None, Arg(metavar="FILE")] = None
    """Continue the text in this UTF-8 file"""
    endless: bool = False
    """Generate until stopped, also after end-of-text tokens (default mode: bounded)"""
    interactive: bool = False
    """Continue one line after another and remember the text so far"""
    samples: int = 1
    """Generate this many samples for each prompt, as one batch"""
    tokenizer: Annotated[Path | None, Arg(metavar="FILE")] = None
    """Use this tokenizer.json instead of the tokenizer of the run"""
    slopes: str | None = None
    """Change the ALiBi slopes: interpolate, ntk=4, clamp=512, max_bias=16 or window=512"""
    rotary: str | None = None
    """Change the rotary positions: linear=4, ntk=4, dynamic=1, yarn=4 or blocks=256"""
    attention_scale: str | None = None
    """Multiply the attention scores by this factor, such as 1.2"""
    settings: Any = None
    """The settings of GenerateConfig that the user gave, as a dictionary. The other settings have their defaults."""

    @classmethod
    def parse(cls, words: list[str]) -> "Generate":
        """Parse the command line. Each setting of `GenerateConfig` is an option, besides the fields of this class."""
        setting_options = options_from_config(GenerateConfig())
        return read_command(cls, words, setting_options)

    def run(self) -> int:
        """Generate the text and return the exit code."""
        self._check_options()
        # These imports load torch, so the options are checked first.
        from trainshort.evaluate.overrides import Override
        from trainshort.evaluate.targets import reject_foreign_export
        from trainshort.generate.session import Session
        from trainshort.train.checkpoint import is_hugging_face
        from trainshort.train.checkpoint_files import extrapolation_summary

        prompts = self._read_prompts()
        reject_foreign_export(self.run_folder)
        self._check_folder_exists()
        GenerateConfig.parse(self.settings)  # Invalid settings are reported before the model is loaded.
        override = Override.from_options(self.slopes, self.rotary, self.attention_scale)

        if is_hugging_face(self.run_folder):
            loaded = self._load_hugging_face()
        else:
            loaded = self._load_run()
        settings = self._settings_for(loaded.model)

        model_change = nullcontext()
        if override is not None:
            model_change = self._apply_override(override, loaded, settings, prompts)
        with model_change:
            stream = self._make_stream(loaded, settings, prompts)
            # The summary is printed last, because all checks of the options may still fail before.
            summary = extrapolation_summary(self.run_folder)
            if summary is not None:
                print_status(f"{self.run_folder}: {summary}.")
            session = Session(stream, loaded.evaluated_length)
            return session.interact() if self.interactive else session.run()

    def _apply_override(
        self, override: "Override", loaded: "LoadedModel", settings: dict[str, Any], prompts: list[str]
    ) -> AbstractContextManager[None]:
        """Return a context manager in which the model runs with an override.

        Args:
            override: The change of the model, such as other ALiBi slopes.
            loaded: The model. Its training length must be known.
            settings: The settings of `GenerateConfig`.
            prompts: The prompts. The override depends on the length of the longest prompt.

        Raises:
            InputError: If the override does not support the other options.
        """
        from trainshort.evaluate.overrides import apply_override

        new_tokens = GenerateConfig.parse(settings).tokens
        if new_tokens is None or self.interactive:
            raise InputError(
                f"--{override.option} requires a known text length. It cannot be combined with --endless or "
                "--interactive."
            )
        mode = self.settings.get("mode", "full")
        if override.method == "blocks" and mode != "full":
            raise InputError(f"--rotary blocks requires --mode full, got --mode {mode}.")
        if loaded.training_length is None:
            raise InputError(
                f"--{override.option} requires the training length, but the training length of {self.run_folder} is "
                "unknown."
            )
        prompt_lengths = [len(loaded.tokenizer.encode(prompt)) for prompt in prompts]
        total_length = max(prompt_lengths) + new_tokens
        return apply_override(loaded.model, override, loaded.training_length, total_length)

    def _check_options(self) -> None:
        """Raise `InputError` for options that cannot be combined, such as --endless and --tokens."""
        check_minimum(1, samples=self.samples)
        # `settings` holds the options that the user gave. --tokens and --stop end the text.
        has_text_limit = "tokens" in self.settings or "stop" in self.settings
        if self.endless and (self.interactive or has_text_limit):
            raise InputError("--endless cannot be combined with --tokens, --stop or --interactive.")
        if self.prompt and self.prompt_file:
            raise InputError("Give the prompt as an argument or with --prompt-file, not both.")
        has_several_samples = self.samples > 1 or len(self.prompt) > 1
        if self.interactive and (has_several_samples or "-" in self.prompt):
            raise InputError(
                "--interactive supports only one sample: at most one prompt, no --samples and no standard input (-)."
            )

    def _check_folder_exists(self) -> None:
        """Raise `InputError` if there is no run folder. The message explains how to import a model from the hub."""
        from trainshort.evaluate.targets import looks_like_hub_name

        folder = self.run_folder
        if folder.exists():
            return
        if looks_like_hub_name(str(folder)):
            hint = f"Import a model from the hub first: trainshort import {folder} --out runs/{folder.name}."
        else:
            hint = "List the folder `runs` to see your runs."
        raise InputError(f"Run folder not found: {folder}. {hint}")

    def _load_run(self) -> "LoadedModel":
        """Load the model of a run folder or of one of its checkpoints.

        If the run was evaluated, the evaluated length is the longest length with good results. Otherwise it is the
        training length.
        """
        from trainshort.config.run_config import load_config
        from trainshort.evaluate.significance import load_summary
        from trainshort.generate.session import EvaluatedLength
        from trainshort.train.checkpoint import find_checkpoint, load_model

        checkpoint = find_checkpoint(self.run_folder)
        config = load_config(self.run_folder / "config.json")
        run = self.run_folder
        if checkpoint == self.run_folder:
            # The user gave the path of a checkpoint, such as RUN/checkpoints/step-000000200.
            run = self.run_folder.resolve().parent.parent
        tokenizer = self._load_tokenizer(run)
        training_length = config.train.length

        summary = load_summary(run)
        if summary is None:
            warning = (
                "the model was trained at that length and was not evaluated at longer lengths. "
                f"Evaluate it with: trainshort evaluate {run}"
            )
            evaluated_length = EvaluatedLength(training_length, warning)
        else:
            # The longest length at which the model was no worse than at its training length.
            no_worse = summary["no_worse"]
            # "open" is true if all evaluated lengths were good, so the model may be good at longer lengths, too.
            if no_worse["open"]:
                beyond = "longer lengths were not evaluated"
            else:
                beyond = "the model was worse at longer lengths"
            evaluated_length = EvaluatedLength(no_worse["length"], f"{summary['summary']}; {beyond}.")
        return LoadedModel(load_model(checkpoint), tokenizer, training_length, evaluated_length)

    def _load_hugging_face(self) -> "LoadedModel":
        """Import the model of a Hugging Face folder into memory. No run folder is written.

        Returns:
            The model, its tokenizer and its training length. The evaluated length holds a warning for longer texts.
        """
        from trainshort.generate.session import EvaluatedLength
        from trainshort.interop.import_model import ImportRequest, load_in_memory

        model, source = load_in_memory(ImportRequest(str(self.run_folder), tokenizer=self.tokenizer))
        if source.tokenizer is None:
            raise InputError(f"{self.run_folder} has no tokenizer.json. Give --tokenizer FILE.")

        import_hint = ""
        if not model.position.rotates():  # `trainshort import` does not support rotary positions.
            run_name = self.run_folder.resolve().name
            import_hint = f" To keep the imported model: trainshort import {self.run_folder} --out runs/{run_name}"
        print_status(f"{self.run_folder} is a Hugging Face model. It was imported into memory.{import_hint}")

        training_length = source.weight_map.model.training_length
        evaluated_length = None
        if training_length:
            warning = "the model was trained at that length and was not evaluated at longer lengths."
            evaluated_length = EvaluatedLength(training_length, warning)
        return LoadedModel(model, source.tokenizer, training_length, evaluated_length)

    def _read_prompts(self) -> list[str]:
        """Return the prompts of all samples (generated texts). Each prompt is repeated `samples` times.

        Raises:
            InputError: If a prompt is empty, or if there is no prompt and the command is not interactive.
        """
        prompts = []
        if self.prompt_file is not None:
            prompts.append(io.read_text(self.prompt_file, hint="Give a text file in UTF-8."))
        else:
            for prompt in self.prompt:
                # "-" stands for the text on standard input.
                prompts.append(_read_stdin() if prompt == "-" else prompt)

        has_no_prompt = not prompts and not self.interactive
        if has_no_prompt or "" in prompts:
            raise InputError(
                "The prompt is empty. Give a text to continue, --prompt-file FILE, or - for standard input."
            )
        prompts_of_samples = []
        for prompt in prompts:
            prompts_of_samples += [prompt] * self.samples
        return prompts_of_samples

    def _make_stream(self, loaded: "LoadedModel", settings: dict[str, Any], prompts: list[str]) -> "TokenStream":
        """Create the token stream, which generates one sample (generated text) for each prompt.

        Args:
            loaded: The model and its tokenizer.
            settings: The settings of `GenerateConfig`.
            prompts: The prompts. The list may be empty if the command is interactive.
        """
        from trainshort.generate.streaming import TokenStream

        stream = TokenStream(loaded.model, GenerateConfig.parse(settings), loaded.tokenizer)
        for prompt in prompts:
            stream.add(prompt)
        if self.interactive and not prompts:
            stream.begin()  # Start with an empty text. The user types the first line.
        return stream

    def _settings_for(self, model: "TransformerLM") -> dict[str, Any]:
        """Return the settings that the user gave, together with the settings that `--endless` implies.

        With `--endless`, the default mode is "bounded". This mode limits the memory: keys are removed from the cache
        if their softmax mass is proven to be small. Only some position methods have such a proof.

        Args:
            model: The loaded model.

        Raises:
            InputError: If `--endless` is used without `--mode`, and the model does not support the mode "bounded".
        """
        if not self.endless:
            return self.settings
        settings = {**self.settings, "tokens": None, "stop_at_end": False}
        if "mode" not in settings:
            if not model.position.has_error_bound():
                raise InputError(
                    f"--endless in mode bounded requires ALiBi or FoX, but this model uses {model.config.position}. "
                    "Use --mode window --window 1024 to keep the last tokens, or --mode full until memory is full."
                )
            settings["mode"] = "bounded"
        return settings

    def _load_tokenizer(self, run: Path) -> "Tokenizer":
        """Load the tokenizer that was given by --tokenizer, or the tokenizer of the run.

        Args:
            run: The run folder.
        """
        from trainshort.data.tokenizers.base import load_tokenizer
        from trainshort.train.run_data import RUN_DATA_FILE, TOKENIZER, run_tokenizer

        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        has_tokenizer = (run / TOKENIZER).exists()
        has_data_description = (run / RUN_DATA_FILE).exists()
        if not has_tokenizer and not has_data_description:
            raise InputError(f"{self.run_folder} has no tokenizer. Give --tokenizer FILE.")
        return run_tokenizer(run)


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its tokenizer.

    Attributes:
        training_length: The length of the training sequences, or None if it is unknown.
        evaluated_length: The length up to which the model was evaluated. A warning is printed beyond this length.
    """

    model: "TransformerLM"
    tokenizer: "Tokenizer"
    training_length: int | None
    evaluated_length: "EvaluatedLength | None"


def _read_stdin() -> str:
    """Read a UTF-8 text from standard input."""
    content = sys.stdin.buffer.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"Standard input is not valid UTF-8 (byte {error.start}). Convert the text, for example with iconv."
        ) from None
