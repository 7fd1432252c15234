"""Convert a model with learned, sinusoidal, rotary or other positions to ALiBi.

The positions are dropped, and the ALiBi slopes are added. All other weights stay the same. The model was trained with
the old positions, so a short training must follow (see `trainshort.cli.import_export`). `ConversionEvaluator` measures
the perplexity before the conversion, after the conversion and after the training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.table import Table
from torch import Tensor

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

TARGET_POSITION = "alibi"
"""The position method of a converted model."""

LENGTH_MULTIPLES = (1, 2, 4, 8)
"""The input lengths of the evaluation, as multiples of the training length."""

EVALUATION_FOLDER = "conversion"
"""The folder in the run folder that holds one evaluation for each stage, and the figure."""

STAGES = {"before": "before the conversion", "surgery": "after the conversion", "trained": "after the training"}
"""The stages of a conversion: the name of the evaluation file, and the description in tables and figures."""


@dataclass(frozen=True)
class ConversionSource:
    """A model that will be converted to ALiBi.

    Attributes:
        source: The weights and the tokenizer, which are not copied yet, and the config of the converted model.
        position: The position method of the original model.
        original_path: The path of the original model, for its evaluation.
    """

    source: ImportSource
    position: str
    original_path: str


def open_conversion_source(request: ImportRequest) -> ConversionSource:
    """Open a model that will be converted to ALiBi.

    Args:
        request: The model: a run folder, the folder of a Hugging Face model, or the name of a model on the hub.

    Returns:
        The opened model. It is not copied yet.

    Raises:
        InputError: If the model already has ALiBi, is not supported, or has no tokenizer.
    """
    path = Path(request.source).expanduser()
    if path.is_file():
        raise InputError(f"{path} is a file. Give a run folder, or the folder or hub name of a Hugging Face model.")
    is_run = path.is_dir() and not is_hugging_face(path)
    if is_run:
        if request.tokenizer is not None:
            raise InputError(
                f"--tokenizer requires a Hugging Face model. The run {path} has a tokenizer. Omit --tokenizer."
            )
        return _open_run(path)

    folder = path if path.is_dir() else download_snapshot(request.source)
    # `convertible` is the registry of the model formats that can be converted.
    source = open_folder(folder, request, convertible)
    if source.tokenizer is None:
        raise InputError(f"{folder} has no tokenizer.json, which the training requires. Give --tokenizer FILE.")
    position = convertible.get(source.format_name).position
    return ConversionSource(source, position, str(folder))


def _open_run(path: Path) -> ConversionSource:
    """Open a run of trainshort that will be converted to ALiBi.

    Args:
        path: The run folder or one of its checkpoints.

    Raises:
        InputError: If the model of the run already has ALiBi, or is an encoder.
    """
    checkpoint = find_checkpoint(path)
    config = load_config(checkpoint / "config.json")
    config.model.require_causal("The conversion to ALiBi")
    if config.model.position == TARGET_POSITION:
        raise InputError(f"{path} already has ALiBi. To train it further, use: trainshort train {path} --resume.")
    model = load_model(checkpoint)
    alibi_config = config.model.replace(position=TARGET_POSITION)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    shapes = parameter_shapes(alibi_config)

    notes: tuple[str, ...] = ()
    mean_position = _mean_position(model, config.train.length)
    if mean_position is not None:
        # The layers were trained on embeddings plus positions, so the mean of the positions is added to the embeddings.
        # The embedding matrix may also be the output matrix. The added vector then changes all logits at a position by
        # the same number, so the probabilities stay the same.
        weights["vocabulary.embedding.weight"] = weights["vocabulary.embedding.weight"] + mean_position
        notes = ("the mean of the positions was added to the embeddings",)

    # Tensors of the old positions have no place in the new model and are dropped.
    weight_map = WeightMap(
        model=ImportedModel(alibi_config, config.train.length, notes),
        weights=weights,
        shapes=shapes,
        sources={name: TensorSource((name,)) for name in shapes},
        dropped_names=tuple(sorted(weights.keys() - shapes.keys())),
    )
    run_folder = checkpoint.parent.parent
    source_files = [checkpoint / "config.json", *sorted((checkpoint / "model").iterdir())]
    source = ImportSource("trainshort", source_files, weight_map, run_tokenizer(run_folder))
    return ConversionSource(source, config.model.position, str(path))


@torch.no_grad()
def _mean_position(model: TransformerLM, length: int) -> Float[Tensor, " width"] | None:
    """Return the mean of the position vectors that a model adds to its embeddings.

    Args:
        model: The original model.
        length: The number of positions to average, which is the training length.

    Returns:
        The mean, divided by the factors that the model applies to its embeddings. None if the position method adds
        nothing to the embeddings, or if the mean cannot be stored in the embedding matrix.
    """
    config = model.config
    method = model.position
    # A position method that adds nothing to the embeddings does not override `embed`.
    adds_to_embeddings = type(method).embed is not PositionMethod.embed
    # A norm after the embeddings, or narrower embeddings of rare words, cannot pass on an added vector.
    can_store_mean = config.adaptive is None and not config.embedding_norm
    if not adds_to_embeddings or not can_store_mean:
        return None
    # `embed` returns embeddings plus positions. With embeddings of zero, it returns the positions alone.
    zero_embeddings = torch.zeros(1, length, config.width)
    positions = torch.arange(length)[None]
    position_vectors = method.embed(zero_embeddings, positions)[0]  # (length, width)
    width_factor = config.width**0.5 if config.embedding_scale else 1
    return position_vectors.mean(0) / (config.embedding_factor * width_factor)


def convert(conversion: ConversionSource, request: ImportRequest, config: RunConfig, out: Path) -> None:
    """Write the run folder of a converted model. The model is not trained yet.

    A run folder holds a config, a tokenizer and checkpoints, here a checkpoint of step 0.

    Args:
        conversion: The model that is converted.
        request: The model as the user gave it, for `import.json`.
        config: The config of the run.
        out: The run folder. It must not exist, or must be empty.
    """

    def describe_conversion(run_folder: Path) -> dict[str, Any]:
        """Return the entries of `import.json` that only a converted model has."""
        return {"source": request.source, "converted": {"from": conversion.position, "to": config.model.position}}

    # `write_run` calls the function, and adds the entries that it returns to `import.json`.
    write_run(conversion.source, config, out, describe_conversion)


def check_same_conversion(out: Path, source: str) -> None:
    """Check that an existing run folder is a conversion of a model, before the conversion is resumed.

    Args:
        out: The run folder.
        source: The model that the user wants to convert.

    Raises:
        InputError: If the run folder holds another run.
    """
    record_path = RunFolder(out).imported  # import.json
    record = {}
    if record_path.exists():
        record = read_json_object(record_path)
    if "converted" not in record:
        raise InputError(f"{out} is a run, but not a conversion that can be resumed. Choose another --out.")
    if record.get("source") != source:
        raise InputError(f"{out} is a conversion of {record.get('source')}, not of {source}. Choose another --out.")


def check_target_position(position: str) -> None:
    """Raise `InputError` if models cannot be converted to a position method."""
    if position != TARGET_POSITION:
        raise InputError(f"Invalid --to: expected '{TARGET_POSITION}', got '{position}'.")


class ConversionEvaluator:
    """Measure the perplexity of a model at each stage of a conversion, at several input lengths.

    The evaluations are stored in the run folder. A resumed conversion does not repeat finished evaluations.

    Args:
        run: The run folder of the converted model.
        text: The text of the evaluation.
        length: The training length.

    Attributes:
        plan: The text and the input lengths to evaluate. Lengths that exceed the text are left out.
        evaluations: The finished evaluations by stage.
    """

    def __init__(self, run: Path, text: Text, length: int) -> None:
        """Choose the input lengths of the evaluation. `length` is the training length of the model."""
        self.run = run
        self.text = text
        self.length = length
        # 1, 2, 4 and 8 times the training length, but only input lengths for which the text has enough tokens.
        all_lengths = [multiple * length for multiple in LENGTH_MULTIPLES]
        lengths = [input_length for input_length in all_lengths if input_length <= len(text.tokens)]
        if not lengths:
            lengths = [length]  # The text is shorter than the training length.
        self.plan = Sweep(text.tokens, lengths)
        self.evaluations: dict[str, Evaluation] = {}  # The keys are those of `STAGES`, such as "before".

    def path(self, stage: str) -> Path:
        """Return the path of the JSON file with the evaluation of a stage, a key of `STAGES`."""
        return self.run / EVALUATION_FOLDER / f"{stage}.json"

    def measure(self, stage: str, name: str, bos: int) -> None:
        """Evaluate a model at all lengths, unless the stored evaluation of the stage is complete.

        Args:
            stage: The stage of the conversion, a key of `STAGES`: "before" is the original model, "surgery" is the
                model after the conversion to ALiBi, and "trained" is the model after the training.
            name: The path or the hub name of the model.
            bos: The id of the token that the model reads before the first token of the text.
        """
        path = self.path(stage)
        if path.exists():
            stored_evaluation = results.load(path)
            self.evaluations[stage] = stored_evaluation
            # The stored evaluation has one row for each input length.
            is_complete = len(stored_evaluation.rows) == len(self.plan.lengths)
            if is_complete:
                return
        make_folder(path.parent)
        # A target is a model that is evaluated.
        target: Target = open_target(name, trained_at=self.length)
        target.bos = bos
        evaluation = new_evaluation(target, self.text, self.plan, "float32")
        self.evaluations[stage] = run_sweep(target, self.plan, evaluation, path)

    def finish(self) -> list[Path]:
        """Write the extrapolation card of the trained model, and a figure of all stages of the conversion.

        The extrapolation card is a JSON file. It states up to which input length the model is as good as at the
        training length. The stages are: the original model, the converted model, and the trained model.

        Returns:
            The paths of all files of the conversion, including the evaluations.
        """
        paths = [self.path(stage) for stage in self.evaluations]
        source_name = str(self.path("trained").relative_to(self.run))
        summary = significance.make_summary(self.evaluations["trained"], source_name)
        # `make_summary` returns None if the evaluation allows no summary, for example if only one length was scored.
        if summary and significance.save_summary(summary, self.run):
            paths.append(self.run / significance.SUMMARY_FILE)
        if can_draw_figures():
            figure = lengths_figure(self._evaluations_with_stage_names())
            paths += draw_figures([figure], self.run / EVALUATION_FOLDER / "lengths")
        return paths

    def _evaluations_with_stage_names(self) -> list[Evaluation]:
        """Return copies of all evaluations, in which the name of the model is the description of the stage.

        A stage is a step of the conversion, such as "after the training". A figure shows the name in its legend.
        """
        evaluations = []
        for stage, evaluation in self.evaluations.items():
            target = evaluation.target | {"name": STAGES[stage]}  # The target describes the evaluated model.
            evaluations.append(evaluation.model_copy(update={"target": target}))
        return evaluations

    def table(self) -> Table:
        """Return a table of the perplexities, with one row for each input length and one column for each stage.

        The stages of a conversion are: the original model, the converted model, and the trained model.
        """
        stage_names = [STAGES[stage] for stage in self.evaluations]
        table = Table("tokens", *stage_names, title="perplexity")
        for length in self.plan.lengths:
            label = f"{length:,}"
            if length == self.length:
                label += " = L"  # L stands for the training length.
            perplexities = [_format_perplexity(evaluation, length) for evaluation in self.evaluations.values()]
            table.add_row(label, *perplexities)
        return table


def _format_perplexity(evaluation: Evaluation, length: int) -> str:
    """Return the perplexity at an input length as text, for a cell of a table.

    If the perplexity could not be measured, return the status that says why, such as "not finite". If the length was
    not evaluated, return an empty string.
    """
    row = evaluation.row(length)
    if row is None:
        return ""
    if row.status == "scored":
        return f"{row.perplexity:.4g}"
    return row.status
