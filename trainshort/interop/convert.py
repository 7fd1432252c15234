"""Surgery: a model with learned, sinusoidal, rotary or other positions becomes one with ALiBi.

Its positions are dropped and slopes set; every other weight stays what it is. What it had learned to do with the old
positions is wrong then, which a short training mends (commands/interop.py); `Recovery` measures what was lost and won.

Positions that were added to the embeddings leave their mean there: the layers were trained with it, and a vector that
is added to every row of the embeddings moves all logits alike, also where the output is the same matrix.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from trainshort.config.registries import convertible
from trainshort.config.run_config import RunConfig, load_config
from trainshort.errors import InputError
from trainshort.evaluate import results, significance
from trainshort.evaluate.evaluation import new_evaluation
from trainshort.evaluate.plot import lengths_figure
from trainshort.evaluate.results import Evaluation
from trainshort.evaluate.sweep import Sweep, run_sweep
from trainshort.evaluate.targets import Target, open_target
from trainshort.evaluate.text import Text
from trainshort.interop.formats.base import ImportedModel, TensorSource, WeightMap, parameter_shapes
from trainshort.interop.import_model import ImportRequest, ImportSource, download_snapshot, open_folder, write_run
from trainshort.model.positions import PositionMethod
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import find_checkpoint, is_hugging_face, load_model
from trainshort.train.run_data import run_tokenizer
from trainshort.train.run_folder import RunFolder
from trainshort.utils.figures import can_draw_figures, draw_figures
from trainshort.utils.io import make_folder, read_json_object

TO = "alibi"
TIMES = (1, 2, 4, 8)
FOLDER = "conversion"
"""In the run folder: one evaluation for each stage, and the picture of all."""
STAGES = {"before": "before surgery", "surgery": "right after", "trained": "trained on"}


@dataclass(frozen=True)
class ConversionSource:
    """A model to be converted, and where it can be run as it was."""

    source: ImportSource
    position: str
    before: str
    """The name or folder that opens it for evaluation."""


def open_conversion_source(request: ImportRequest) -> ConversionSource:
    """The model that was asked for; one that has ALiBi, or that nobody knows, is refused in a sentence."""
    path = Path(request.source).expanduser()
    if path.is_dir() and not is_hugging_face(path):
        if request.tokenizer is not None:
            raise InputError(f"--tokenizer is for a Hugging Face model; the run {path} has its own. Leave it out.")
        return _own(path)
    if path.is_file():
        raise InputError(f"{path} is a file. Give a run folder, a Hugging Face model's folder, or its name on the hub.")
    folder = path if path.is_dir() else download_snapshot(request.source)
    source = open_folder(folder, request, convertible)
    if source.tokenizer is None:
        raise InputError(f"{folder} has no tokenizer.json, which training on needs. Give --tokenizer FILE.")
    return ConversionSource(source, convertible.get(source.format_name).position, str(folder))


def _own(path: Path) -> ConversionSource:
    """A run of ours with other positions than ALiBi."""
    checkpoint = find_checkpoint(path)
    config = load_config(checkpoint / "config.json")
    config.model.require_causal("The conversion to ALiBi")
    if config.model.position == TO:
        raise InputError(f"{path} has ALiBi already. Train it on as it is: trainshort train {path} --resume.")
    model = load_model(checkpoint)
    changed = config.model.replace(position=TO)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    shapes = parameter_shapes(changed)
    mean = _mean_position(model, config.train.length)
    if mean is not None:
        weights["vocabulary.embedding.weight"] = weights["vocabulary.embedding.weight"] + mean
    notes = () if mean is None else ("the mean of its positions goes into the embeddings",)
    dropped = tuple(sorted(weights.keys() - shapes.keys()))
    reading = WeightMap(
        ImportedModel(changed, config.train.length, notes),
        weights,
        shapes,
        {name: TensorSource((name,)) for name in shapes},
        dropped,
    )
    tokenizer = run_tokenizer(checkpoint.parent.parent)
    files = [checkpoint / "config.json", *sorted((checkpoint / "model").iterdir())]
    return ConversionSource(ImportSource("trainshort", files, reading, tokenizer), config.model.position, str(path))


@torch.no_grad()
def _mean_position(model: TransformerLM, length: int) -> torch.Tensor | None:
    """What the positions add to an embedding on average; None where they add nothing, or it cannot be put there."""
    config, method = model.config, model.position
    if type(method).embed is PositionMethod.embed or config.adaptive is not None or config.embedding_norm:
        return None
    added = method.embed(torch.zeros(1, length, config.width), torch.arange(length)[None])[0].mean(0)
    return added / (config.embedding_factor * (config.width**0.5 if config.embedding_scale else 1))


def convert(patient: ConversionSource, request: ImportRequest, config: RunConfig, out: Path) -> None:
    """Write the run folder of the converted model, before any training."""
    record = {"source": request.source, "converted": {"from": patient.position, "to": config.model.position}}
    write_run(patient.source, config, out, lambda _: record)


def refuse_another(out: Path, source: str) -> None:
    """Stop if the run folder that is to be gone on with is no conversion of this model."""
    imported = RunFolder(out).imported
    record = read_json_object(imported) if imported.exists() else {}
    if "converted" not in record:
        raise InputError(f"{out} is a run, and no conversion that was stopped. Choose another --out.")
    if record.get("source") != source:
        raise InputError(f"{out} is a conversion of {record.get('source')}, not of {source}. Choose another --out.")


class Recovery:
    """Perplexity by length at each stage of a conversion, stored in the run folder as it is found."""

    def __init__(self, run: Path, text: Text, length: int) -> None:
        self.run, self.text, self.length = run, text, length
        lengths = [times * length for times in TIMES if times * length <= len(text.tokens)] or [length]
        self.plan = Sweep(text.tokens, lengths)
        self.found: dict[str, Evaluation] = {}

    def path(self, stage: str) -> Path:
        return self.run / FOLDER / f"{stage}.json"

    def measure(self, stage: str, name: str, bos: int) -> None:
        """Evaluate a model at all lengths, unless an earlier session did; `bos` is read before the first token."""
        path = self.path(stage)
        if path.exists():
            self.found[stage] = results.load(path)
            if len(self.found[stage].rows) == len(self.plan.lengths):
                return
        make_folder(path.parent)
        target: Target = open_target(name, trained_at=self.length)
        target.bos = bos
        evaluation = new_evaluation(target, self.text, self.plan, "float32")
        self.found[stage] = run_sweep(target, self.plan, evaluation, path)

    def finish(self) -> list[Path]:
        """The picture, and the extrapolation card of what the model is now; returns the files."""
        last = self.found["trained"]
        made = significance.make_summary(last, str(self.path("trained").relative_to(self.run)))
        written = [self.path(stage) for stage in self.found]
        if made and significance.save_summary(made, self.run):
            written.append(self.run / significance.SUMMARY_FILE)
        drawn = [
            one.model_copy(update={"target": one.target | {"name": STAGES[stage]}}) for stage, one in self.found.items()
        ]
        if can_draw_figures():
            written += draw_figures([lengths_figure(drawn)], self.run / FOLDER / "lengths")
        return written

    def table(self) -> Table:
        """Perplexities, a row for each length."""
        table = Table("tokens", *(STAGES[stage] for stage in self.found), title="perplexity")
        for length in self.plan.lengths:
            mark = " = L" if length == self.length else ""
            table.add_row(f"{length:,}{mark}", *(_shown(one, length) for one in self.found.values()))
        return table


def _shown(evaluation: Evaluation, length: int) -> str:
    row = evaluation.row(length)
    if row is None:
        return ""
    return f"{row.perplexity:.4g}" if row.status == "scored" else row.status


def refuse_target(to: str) -> None:
    if to != TO:
        raise InputError(f"--to is {TO}, got '{to}': other positions are not put in here.")
