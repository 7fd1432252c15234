"""`trainshort train`: a recipe, changed by options, becomes a run folder."""

import inspect
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from trainshort.commands.settings import chosen_config, names, options, spelled_out, with_method
from trainshort.config import RunConfig, load_config
from trainshort.errors import InputError

SECTIONS = ("model", "data", "optim", "train")


class Train:
    """Train a model: RECIPE's settings, changed by any option, into a new run folder.

    Under torchrun the same command trains on many processes.

    Examples:
      trainshort train demo-alibi
      trainshort train demo-alibi --model.position t5 --train.steps 100 --out runs/t5
      trainshort train runs/t5 --resume
      torchrun --nproc_per_node=2 -m trainshort train demo-alibi --parallel fsdp
    """

    def __init__(self, config: RunConfig, out: Path, *, resume: bool, quiet: bool) -> None:
        self.config, self.out, self.resume, self.quiet = config, out, resume, quiet

    @classmethod
    def parse(cls, words: list[str]) -> "Train":
        """The recipe comes first, since its values are the defaults that the other words change."""
        if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
            raise InputError(
                "Name a recipe first: trainshort train RECIPE [options]. trainshort list recipes shows all."
            )
        recipe = None if words[0].startswith("-") else words[0]
        base, out = find_recipe(recipe) if recipe else (RunConfig(), Path("runs/RECIPE"))
        base = with_method(base, words)
        kind = _parser(base, recipe, out)
        words = spelled_out(words, names(kind(recipe=recipe)), base.model.position)
        chosen = tyro.cli(kind, args=words, prog="trainshort train", description=inspect.cleandoc(cls.__doc__ or ""))
        config = chosen_config(base, {section: getattr(chosen, section) for section in SECTIONS})
        return cls(config, chosen.out, resume=chosen.resume, quiet=chosen.quiet)

    def run(self) -> None:
        from trainshort.parallel import own_rank
        from trainshort.runs import perplexity
        from trainshort.train import train

        result = train(self.config, self.out, resume=self.resume, quiet=self.quiet)
        if own_rank():
            return
        told = ""
        if result.valid_nll is not None and result.valid_count:
            loss = result.valid_nll / result.valid_count
            told = f" Validation loss {loss:.4f}, perplexity {perplexity(loss):.4g}."
        print(f"{result.run}: {result.steps} updates, {result.tokens:,} tokens.{told} Best: {result.best}")


def find_recipe(name: str) -> tuple[RunConfig, Path]:
    """A recipe's settings and default run folder; `name` may also be a run folder, or the path of a config.json."""
    from trainshort.recipes import recipes

    path = Path(name)
    if name not in recipes and path.is_dir():
        return load_config(path / "config.json"), path
    if name not in recipes and (path.suffix == ".json" or path.exists()):
        return load_config(path), path.parent if path.name == "config.json" else Path("runs") / path.stem
    return recipes.get(name)(), Path("runs") / name


def _parser(base: RunConfig, recipe: str | None, out: Path) -> Any:
    """The dataclass tyro makes the parser from."""

    def described(kind: Any, text: str, *markers: Any) -> Any:
        return Annotated[kind, tyro.conf.arg(help=text), *markers]

    shown = "Recipe (trainshort list recipes), run folder, or path of a config.json."
    fields = [
        ("recipe", described(str, shown, tyro.conf.Positional), field(default=recipe) if recipe else field()),
        ("out", described(Path, "Run folder; refused if it exists, unless resumed."), field(default=out)),
        (
            "resume",
            described(bool, "Go on from the last whole checkpoint; start if there is none."),
            field(default=False),
        ),
        ("quiet", described(bool, "Show no progress."), field(default=False)),
    ]
    for section in SECTIONS:
        made = options(getattr(base, section))
        fields.append((section, type(made), field(default_factory=lambda made=made: made)))
    return make_dataclass("Train", fields, frozen=True)
