"""`trainshort prepare`: text to token files; `trainshort train`: a recipe becomes a run folder.

A `RunConfig` on the command line: every setting is an option, with the recipe's value as its default. The parser reads
the words, the config judges the values, so that a mistake reads the same wherever it was made.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from trainshort.cli.parser import Arg, Option, Parser, UsageError, options_from_config, options_from_dataclass
from trainshort.config.position_config import methods, setting_of_other_method_message
from trainshort.config.run_config import DataConfig, RunConfig, load_config
from trainshort.errors import InputError
from trainshort.utils.terminal import print_line

WRITTEN = ("format", "plugins")
"""Settings that the program writes, not the user."""


def with_method(base: RunConfig, words: list[str]) -> RunConfig:
    """The recipe with the position method that the words choose, since it decides which settings there are."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        position = value if equals else following
        if option in ("--model.position", "--position") and position and not position.startswith("--"):
            methods.get(position)
            base = base.replace(model={"position": position})
    return base


@dataclass
class RunParser(Parser):
    """A parser that explains an option which belongs to a position method that was not chosen."""

    position: str

    def _find(self, word: str) -> tuple[Option, bool, str | None]:
        try:
            return super()._find(word)
        except UsageError:
            typed = word.removeprefix("--").partition("=")[0]
            head, _, tail = typed.replace("-", "_").rpartition(".")
            name = tail.removeprefix("no_")
            owners = [owner for owner, method in methods.items() if name in method.config_class.model_fields]
            of_a_method = head in ("", "model", "position_settings", "model.position_settings")
            if of_a_method and owners and self.position not in owners:
                raise InputError(setting_of_other_method_message(name, self.position)) from None
            raise


def chosen_config(base: RunConfig, chosen: dict[str, Any]) -> RunConfig:
    """The recipe's config with the chosen values, by dotted names, validated."""
    values = base.model_dump()
    for name, value in chosen.items():
        *groups, last = name.split(".")
        place = values
        for group in groups:
            place = place[group]
        place[last] = value
    if values["data"]["corpus"] != base.data.corpus:  # a plug-in that brought only the text before is not in this run
        values["plugins"] = [plugin for plugin in values["plugins"] if not plugin["for_data"]]
    return RunConfig.parse(values)


_SETTINGS = DataConfig.model_fields


def _help(name: str) -> Arg:
    return Arg(help=_SETTINGS[name].description or "")


@dataclass(frozen=True)
class Prepare:
    """Turn a corpus into a folder of tokens, train/valid/test.bin and meta.json.

    Interrupted, the same command continues. A folder made from other settings is refused.

    Examples:
      trainshort prepare sotu
      trainshort prepare texts/ --tokenizer bytes
      trainshort prepare 'logs/*.jsonl' --vocab-size 8192 --out data/logs --workers 8
      trainshort prepare wikitext-103 --tokenizer words --vocab-size 267744
      trainshort prepare bookcorpus --tokenizer bert/tokenizer.json
    """

    corpus: Annotated[str, Arg(metavar="CORPUS", positional=True)]
    """Corpus name (see `trainshort list corpora`), file, folder, glob, or hub dataset as owner/name[:config]."""
    tokenizer: Annotated[str, _help("tokenizer")] = _SETTINGS["tokenizer"].default
    vocab_size: Annotated[int, _help("vocab_size")] = _SETTINGS["vocab_size"].default
    out: Path | None = None
    """Folder to write. Default: data/<corpus>-<tokenizer><vocabulary>."""
    workers: int | None = None
    """Processes that encode. Default: one per core, fewer for small corpora; the result is the same."""
    errors: Literal["strict", "replace"] = "strict"
    """What to do about bytes that are not UTF-8: stop and say where, or put U+FFFD there."""

    def run(self) -> int:
        from trainshort.data.dataset import is_dataset_folder, open_dataset
        from trainshort.data.dataset_request import data_folder
        from trainshort.data.preparation import describe, prepare
        from trainshort.data.prepare_state import PrepareProgress

        config = DataConfig.parse(
            {"corpus": self.corpus, "tokenizer": self.tokenizer, "vocab_size": self.vocab_size, "folder": self.out}
        )
        folder = data_folder(config)
        there = is_dataset_folder(folder)
        try:
            prepared = prepare(config, workers=self.workers, errors=self.errors)
        except KeyboardInterrupt:
            PrepareProgress(True).say(f"\nStopped. The same command continues in {folder}.")
            return 130
        if there:
            PrepareProgress(True).say(f"Already prepared. {describe(open_dataset(prepared.folder))}.")
        return 0


@dataclass(frozen=True)
class Train:
    """Train a model: RECIPE's settings, changed by any option, into a new run folder.

    Under torchrun the same command trains on many processes.

    Examples:
      trainshort train demo-alibi
      trainshort train demo-alibi --model.position t5 --train.steps 100 --out runs/t5
      trainshort train runs/t5 --resume
      torchrun --nproc_per_node=2 -m trainshort train demo-alibi --parallel fsdp --optim.name adamw
    """

    recipe: Annotated[str, Arg(positional=True)]
    """Recipe (trainshort list recipes), run folder, or path of a config.json."""
    out: Path
    """Run folder; refused if it exists, unless resumed."""
    config: RunConfig
    """The recipe's settings, changed by those that were given."""
    resume: bool = False
    """Go on from the last whole checkpoint; start if there is none."""
    quiet: bool = False
    """Show no progress."""

    @classmethod
    def parse(cls, words: list[str]) -> "Train":
        """The recipe comes first, since its values are the defaults that the other words change."""
        if not words or not words[0] or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
            raise InputError(
                "Name a recipe first: trainshort train RECIPE [options]. trainshort list recipes shows all."
            )
        base, out = (RunConfig(), Path("runs/RECIPE")) if words[0].startswith("-") else find_recipe(words[0])
        base = with_method(base, words)
        own = [
            replace(one, default=out) if one.field == "out" else one
            for one in options_from_dataclass(cls)
            if one.field != "config"
        ]
        settings = options_from_config(base, leave=WRITTEN)
        given = RunParser("trainshort train", [*own, *settings], cls.__doc__ or "", base.model.position).parse(words)
        config = chosen_config(base, {one.field: given.pop(one.field) for one in settings if one.field in given})
        _refuse_another_text(config, base)
        given.setdefault("out", out)
        return cls(config=config, **given)

    def run(self) -> None:
        from trainshort.train.loop import train
        from trainshort.train.parallel import get_rank
        from trainshort.utils.terminal import StopRequest, perplexity

        stop = StopRequest(last=True)
        result = train(self.config, self.out, resume=self.resume, quiet=self.quiet, stop=stop)
        if get_rank():
            return
        told = ""
        if result.valid_nll is not None and result.valid_count:
            loss = result.valid_nll / result.valid_count
            told = f" Validation loss {loss:.4f}, perplexity {perplexity(loss):.4g}."
        print_line(f"{result.run}: {result.steps} steps, {result.tokens:,} tokens.{told} Best: {result.best}")


def find_recipe(name: str) -> tuple[RunConfig, Path]:
    """A recipe's settings and default run folder; `name` may also be a run folder, or the path of a config.json."""
    from trainshort.experiments.recipes import recipes

    path = Path(name)
    if name in recipes or not (path.exists() or path.suffix == ".json"):
        return recipes.get(name)(), Path("runs") / name
    if path.is_dir():
        return load_config(path / "config.json"), path
    if path.suffix == ".json":
        return load_config(path), path.parent if path.name == "config.json" else Path("runs") / path.stem
    hint = f"To train on a text: trainshort train demo-alibi --data.corpus {name}."
    raise InputError(f"{name} is a file, and neither a recipe nor a run folder nor a config.json. {hint}")


def _refuse_another_text(config: RunConfig, base: RunConfig) -> None:
    """Prepared data has its corpus and tokenizer; another one beside it would be passed over in silence."""
    asked = [name for name in ("corpus", "tokenizer") if getattr(config.data, name) != getattr(base.data, name)]
    if config.data.folder is not None and asked:
        raise InputError(
            f"--data.folder {config.data.folder} is prepared data with a corpus and tokenizer of its own; leave out "
            f"--data.{asked[0]}, or leave out --data.folder to have the text prepared."
        )
