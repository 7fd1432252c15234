"""`trainshort prepare`: tokenize a text. `trainshort train`: train a model with the settings of a recipe.

`trainshort train` has one option for each setting of `RunConfig`. The values of the recipe are the defaults of the
options. The parser only converts the words of the command line. The config validates the values.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from trainshort.cli.parser import Arg, Option, Parser, UsageError, options_from_config, options_from_dataclass
from trainshort.config.position_config import methods, setting_of_other_method_message
from trainshort.config.run_config import DataConfig, RunConfig, load_config
from trainshort.errors import InputError
from trainshort.utils.terminal import print_line

# Settings that the program writes. They are not options.
PROGRAM_SETTINGS = ("format", "plugins")


def apply_position_option(base: RunConfig, words: list[str]) -> RunConfig:
    """Return the config of a recipe with the position method that the command line chooses.

    The position method decides which settings exist. Therefore the method must be known before the other options are
    parsed.

    Args:
        base: The config of the recipe.
        words: The command line.

    Returns:
        `base`, with another position method if the command line contains `--model.position` or `--position`.

    Raises:
        InputError: If the position method is unknown.
    """
    next_words = [*words[1:], ""]  # The word after each word. No word follows the last word.
    for word, next_word in zip(words, next_words, strict=True):
        option, equals_sign, inline_value = word.partition("=")
        if option not in ("--model.position", "--position"):
            continue
        position = inline_value if equals_sign else next_word
        if position and not position.startswith("--"):
            methods.get(position)  # Raises InputError if the method is unknown.
            base = base.replace(model={"position": position})
    return base


@dataclass
class TrainParser(Parser):
    """Parser of `trainshort train`, with a special message for settings of other position methods.

    Attributes:
        position: The position method that the user chose.
    """

    position: str

    def _find_option(self, word: str) -> tuple[Option, bool, str | None]:
        """Find the option for a word of the command line, such as "--train.steps=3". See `Parser._find_option`.

        The options contain only the settings of the position method that the user chose. If the word is unknown, this
        function checks whether the word is a setting of another position method.

        Args:
            word: A word that starts with a dash, such as "--train.steps=3".

        Raises:
            InputError: If the option is a setting of another position method. The message names that method.
            UsageError: If the option is unknown.
        """
        try:
            return super()._find_option(word)
        except UsageError:
            # "--train.no-compile=true" has the group "train" and the setting "compile".
            typed_name = word.removeprefix("--").partition("=")[0]
            group, _, last_part = typed_name.replace("-", "_").rpartition(".")
            setting = last_part.removeprefix("no_")
            can_be_position_setting = group in ("", "model", "position_settings", "model.position_settings")
            methods_with_setting = [
                name for name, method in methods.items() if setting in method.config_class.model_fields
            ]
            belongs_to_other_method = bool(methods_with_setting) and self.position not in methods_with_setting
            if can_be_position_setting and belongs_to_other_method:
                raise InputError(setting_of_other_method_message(setting, self.position)) from None
            raise


def apply_settings(base: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """Return a validated copy of a config with some settings changed.

    Args:
        base: The config.
        settings: New values by dotted names, such as `{"train.steps": 100}`.

    Raises:
        InputError: If a value is invalid.
    """
    values = base.model_dump()
    for dotted_name, value in settings.items():
        *group_names, setting = dotted_name.split(".")  # "train.steps": the group "train", the setting "steps".
        group = values
        for group_name in group_names:
            group = group[group_name]
        group[setting] = value

    has_other_corpus = values["data"]["corpus"] != base.data.corpus
    if has_other_corpus:
        # A plug-in that only defined the corpus of `base` is not needed.
        values["plugins"] = [plugin for plugin in values["plugins"] if not plugin["for_data"]]
    return RunConfig.parse(values)


_DATA_SETTINGS = DataConfig.model_fields


def _help_from_setting(name: str) -> Arg:
    """Return the annotation of an option that has the help text of a setting in `DataConfig`."""
    return Arg(help=_DATA_SETTINGS[name].description or "")


@dataclass(frozen=True)
class Prepare:
    """Tokenize a corpus and write train.bin, valid.bin, test.bin and meta.json to a folder

    If the command is interrupted, run it again to continue. A folder with other settings is not overwritten.

    Examples:
      trainshort prepare sotu
      trainshort prepare texts/ --tokenizer bytes
      trainshort prepare 'logs/*.jsonl' --vocab-size 8192 --out data/logs --workers 8
      trainshort prepare wikitext-103 --tokenizer words --vocab-size 267744
      trainshort prepare bookcorpus --tokenizer bert/tokenizer.json
    """

    corpus: Annotated[str, Arg(metavar="CORPUS", positional=True)]
    """Read this corpus (see `trainshort list corpora`), file, folder, glob or hub dataset (owner/name[:config])"""
    tokenizer: Annotated[str, _help_from_setting("tokenizer")] = _DATA_SETTINGS["tokenizer"].default
    vocab_size: Annotated[int, _help_from_setting("vocab_size")] = _DATA_SETTINGS["vocab_size"].default
    out: Path | None = None
    """Write the dataset to this folder (default: data/<corpus>-<tokenizer><vocabulary>)"""
    workers: int | None = None
    """Encode with this many processes (default: one per core, fewer for small corpora)"""
    errors: Literal["strict", "replace"] = "strict"
    """Stop at bytes that are not UTF-8 (strict), or replace such bytes by U+FFFD (replace)"""

    def run(self) -> int:
        """Prepare the dataset, which tokenizes its text, and return the exit code."""
        from trainshort.data.dataset import is_dataset_folder, open_dataset
        from trainshort.data.dataset_request import data_folder
        from trainshort.data.preparation import describe, prepare
        from trainshort.data.prepare_state import PrepareProgress

        settings = {
            "corpus": self.corpus,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "folder": self.out,
        }
        config = DataConfig.parse(settings)
        folder = data_folder(config)
        was_prepared_before = is_dataset_folder(folder)
        progress = PrepareProgress(True)
        try:
            prepared = prepare(config, workers=self.workers, errors=self.errors)
        except KeyboardInterrupt:
            progress.say(f"\nStopped. Run the same command again to continue in {folder}.")
            return 130  # the exit code after Ctrl-C
        if was_prepared_before:
            progress.say(f"Already prepared. {describe(open_dataset(prepared.folder))}.")
        return 0


@dataclass(frozen=True)
class Train:
    """Train a model with the settings of RECIPE in a new run folder

    Every setting of the recipe can be changed by an option. Under torchrun, the same command trains on several
    processes.

    Examples:
      trainshort train demo-alibi
      trainshort train demo-alibi --model.position t5 --train.steps 100 --out runs/t5
      trainshort train runs/t5 --resume
      torchrun --nproc_per_node=2 -m trainshort train demo-alibi --parallel fsdp --optim.name adamw
    """

    recipe: Annotated[str, Arg(positional=True)]
    """Use the settings of this recipe (see `trainshort list recipes`), run folder or config.json"""
    out: Path
    """Write the run to this folder, which must not exist unless --resume is given"""
    config: RunConfig
    """The settings of the recipe, changed by the options that the user gave."""
    resume: bool = False
    """Continue after the last valid checkpoint, or start if there is no checkpoint"""
    quiet: bool = False
    """Show no progress"""

    @classmethod
    def parse(cls, words: list[str]) -> "Train":
        """Parse the command line of `trainshort train`.

        The recipe must be the first word, because its settings are the defaults of the options.

        Args:
            words: The command line after the word "train".

        Raises:
            InputError: If the first word is not a recipe, or an option is invalid.
        """
        first_word = words[0] if words else ""
        asks_for_help = first_word in ("-h", "--help")
        if asks_for_help:
            base = RunConfig()
            default_out = Path("runs/RECIPE")
        elif not first_word or first_word.startswith("-"):
            raise InputError(
                "The recipe must come first: trainshort train RECIPE [options]. See trainshort list recipes."
            )
        else:
            base, default_out = find_recipe(first_word)
        base = apply_position_option(base, words)

        own_options = []
        for option in options_from_dataclass(cls):
            if option.field == "out":
                own_options.append(replace(option, default=default_out))
            elif option.field != "config":
                own_options.append(option)
        setting_options = options_from_config(base, exclude=PROGRAM_SETTINGS)
        options = [*own_options, *setting_options]
        values = TrainParser("trainshort train", options, cls.__doc__ or "", base.model.position).parse(words)

        settings = {}
        for option in setting_options:
            if option.field in values:
                settings[option.field] = values.pop(option.field)
        config = apply_settings(base, settings)
        _check_data_folder_unambiguous(config, base)
        values.setdefault("out", default_out)
        return cls(config=config, **values)

    def run(self) -> None:
        """Train the model and print a summary."""
        from trainshort.train.loop import train
        from trainshort.train.parallel import get_rank
        from trainshort.utils.terminal import StopRequest, perplexity

        stop_request = StopRequest(
            process_ends=True
        )  # Records Ctrl-C, so that the run is saved before the process ends.
        result = train(self.config, self.out, resume=self.resume, quiet=self.quiet, stop=stop_request)
        if get_rank() != 0:
            return  # Only rank 0 prints the summary.

        validation_text = ""
        if result.valid_nll is not None and result.valid_count:
            loss = result.valid_nll / result.valid_count
            validation_text = f" Validation loss {loss:.4f}, perplexity {perplexity(loss):.4g}."
        print_line(
            f"{result.run}: {result.steps} steps, {result.tokens:,} tokens.{validation_text} "
            f"Best checkpoint: {result.best}"
        )


def find_recipe(name: str) -> tuple[RunConfig, Path]:
    """Return the settings of a recipe (the named settings of a run) and the default run folder.

    Args:
        name: The name of a recipe, a run folder, or the path of a config.json.

    Raises:
        InputError: If there is no such recipe, run folder or config.
    """
    from trainshort.experiments.recipes import recipes

    path = Path(name)
    is_config_file = path.suffix == ".json"
    if name in recipes or not (path.exists() or is_config_file):
        make_config = recipes.get(name)
        return make_config(), Path("runs") / name
    if path.is_dir():
        return load_config(path / "config.json"), path
    if is_config_file:
        # The config.json of a run folder stands for that run.
        default_out = path.parent if path.name == "config.json" else Path("runs") / path.stem
        return load_config(path), default_out
    raise InputError(
        f"{name} is neither a recipe nor a run folder nor a config.json. "
        f"To train on a text: trainshort train demo-alibi --data.corpus {name}."
    )


def _check_data_folder_unambiguous(config: RunConfig, base: RunConfig) -> None:
    """Raise `InputError` if the user chose a prepared dataset and also another corpus or tokenizer.

    A prepared dataset has a corpus and a tokenizer, so the other corpus or tokenizer would be ignored.

    Args:
        config: The config with the options that the user gave.
        base: The config of the recipe.
    """
    if config.data.folder is None:
        return
    for name in ("corpus", "tokenizer"):
        is_changed = getattr(config.data, name) != getattr(base.data, name)
        if is_changed:
            raise InputError(
                f"--data.folder {config.data.folder} is a prepared dataset, which already has a {name}. Leave out "
                f"--data.{name} to use the dataset, or leave out --data.folder to prepare the text."
            )
