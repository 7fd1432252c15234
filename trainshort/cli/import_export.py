"""`trainshort import`, `export`, `verify`, `convert`, `doctor` and `harness`: exchange models with other programs."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainshort.cli.parser import REQUIRED, Arg, check_minimum, options_from_config, read_command
from trainshort.cli.train import PROGRAM_SETTINGS, apply_settings
from trainshort.config.run_config import OptimConfig, RunConfig, TrainConfig
from trainshort.errors import InputError
from trainshort.utils.terminal import (
    escape_control_characters,
    escape_for_output,
    new_console,
    print_line,
    print_status,
)

if TYPE_CHECKING:
    from trainshort.interop.export.verify import Verification


@dataclass(frozen=True)
class Import:
    """Import an ALiBi model as a run folder, to evaluate it, generate text or continue its training

    The command reads the checkpoints of the paper's authors (fairseq), and MPT, BLOOM, Falcon-RW, replit-code,
    Baichuan-13B, BTLM, Jais and Refact in safetensors. Code in a model folder is never executed.

    Examples:
      trainshort import alibi_wt103_L512.pt --dictionary dict.txt --out runs/authors-512
      trainshort import ./mpt-7b --out runs/mpt-7b
    """

    source: Annotated[str, Arg(metavar="MODEL", positional=True)]
    """Import this fairseq checkpoint file, Hugging Face folder or model on the hub"""
    out: Path
    """Write the run to this folder, which must not exist"""
    dictionary: Path | None = None
    """Read the tokenizer of a fairseq model from this dict.txt (without it, the run has no tokenizer)"""
    tokenizer: Path | None = None
    """Use this tokenizer.json instead of the tokenizer of the model"""
    trained_at: int | None = None
    """Set the training length, for models that do not state it"""

    def run(self) -> None:
        """Import the model and write the run folder."""
        from trainshort.interop.import_model import ImportRequest, import_model

        check_minimum(1, trained_at=self.trained_at)
        request = ImportRequest(
            source=self.source,
            dictionary=self.dictionary,
            tokenizer=self.tokenizer,
            training_length=self.trained_at,
        )
        import_model(request, self.out)
        print_line(f'Imported to {self.out}. Try: trainshort generate {self.out} "Once upon a time"')


@dataclass(frozen=True)
class Export:
    """Export a run to Transformers, llama.cpp or CTranslate2, and verify the export

    The targets hf-mpt and hf-bloom are classes of Transformers. The target hf supports every model and requires `import
    trainshort.hf`. Settings that a target does not support are rewritten if the result is exact. Otherwise the export
    fails. The recipe `portable-128` trains a model that hf-mpt, gguf and ctranslate2 support without changes.

    Examples:
      trainshort export runs/demo-alibi --to gguf --out exported/gguf
      trainshort export runs/demo-alibi --to gguf --dtype q8_0 --out exported/small
      trainshort export runs/mine --to hf-mpt --out exported/mpt
    """

    run_folder: Annotated[Path, Arg(metavar="RUN", positional=True)]
    """Export this run folder or checkpoint"""
    to: str
    """Choose the target: hf-mpt, hf-bloom, hf, gguf or ctranslate2"""
    out: Path
    """Write the export to this folder, which must not exist"""
    dtype: str | None = None
    """Store the weights of a gguf file as f32, f16 or q8_0 (default: f32)"""
    verify: bool = True
    """Load the export in its program and compare the results"""

    def run(self) -> int:
        """Export the run, verify the export and return the exit code.

        The verification compares the outputs of the export with those of the run. If they differ, the exit code is 1.
        """
        from trainshort.interop.export import export
        from trainshort.interop.export.verify import verify

        notes = export(self.run_folder, self.to, self.out, self.dtype)
        for note in notes:
            print_status(f"{note}.")
        print_line(f"Exported to {self.out}.")
        if not self.verify:
            return 0
        return print_verification(verify(self.out))


@dataclass(frozen=True)
class Verify:
    """Compare an export with its run

    The command loads the export in the program that it was made for (Transformers, llama.cpp or CTranslate2). It
    compares the logits at 1, 2 and 8 times the training length, the text of greedy decoding and the tokens. The exit
    code is 1 if something differs.

    Examples:
      trainshort verify exported/gguf
      trainshort verify exported/gguf --run-folder runs/demo-alibi
    """

    folder: Annotated[Path, Arg(positional=True)]
    """Verify this folder, which `trainshort export` wrote"""
    run_folder: Path | None = None
    """Compare with this run folder (default: the folder that was exported)"""

    def run(self) -> int:
        """Verify the export and return the exit code."""
        from trainshort.interop.export.verify import verify

        return print_verification(verify(self.folder, self.run_folder))


def print_verification(verification: "Verification") -> int:
    """Print the result of a verification.

    Args:
        verification: The comparison of an export with its run.

    Returns:
        The exit code: 0 if the export equals the run, and 1 if something differs.
    """
    new_console().print(verification.table())
    if verification.problems:
        for problem in verification.problems:
            print_line(f"Differs: {problem}.")
        return 1

    # `tokenization` is None if the program has no tokenizer and only takes token ids.
    if verification.tokenization is None:
        token_text = "the program takes token ids only"
    else:
        token_text = "the tokens of difficult strings are equal"
    print_line(
        f"Verified in {verification.engine}: the logits are within their limits, greedy text is equal, {token_text}."
    )
    return 0


@dataclass(frozen=True)
class Doctor:
    """Check a Hugging Face ALiBi model (MPT, BLOOM, Falcon-RW) for known bugs

    The command builds a tiny copy of the model with the same class, data type and settings. It checks the length limit,
    ignored settings, rounded, doubled or missing biases, packed documents that attend to each other, and memory that
    grows with the square of the length. Only the settings and the names of the tensors are read. Code in the model
    folder is never executed. The exit code is 0 if no bug was found, and 1 otherwise.

    In Python, trainshort.doctor(model) checks a loaded model, and trainshort.patch(model) fixes most bugs.

    Examples:
      trainshort doctor ./mpt-7b
      trainshort doctor bigscience/bloom-560m --json
    """

    model: Annotated[str, Arg(positional=True)]
    """Check this model folder or model on the hub"""
    json: bool = False
    """Print the findings as JSON"""

    def run(self) -> int:
        """Check the model, print the findings (bugs) and return the exit code: 0 without findings, 1 otherwise."""
        from trainshort.interop.doctor import doctor

        findings = doctor(self.model)
        if self.json:
            print(escape_control_characters(findings.to_json()))
        else:
            # The names in a model folder could contain control characters of the terminal.
            print(escape_control_characters(str(findings)))
        return 0 if findings.ok else 1


@dataclass(frozen=True)
class Harness:
    """Run tasks of lm-evaluation-harness on a run or a Hugging Face model, and store the results in RUN/harness

    Most tasks download their data from the Hugging Face hub. Your own task is a YAML file in a folder, and its data can
    be local files (see docs/interop.md). Python functions in a task definition are executed.

    Examples:
      trainshort harness runs/demo-alibi --tasks lambada_openai arc_easy --limit 200
      trainshort harness runs/demo-alibi --tasks book --include-path tasks/
      trainshort harness exported/hf --tasks book --include-path tasks/ --length 1024
    """

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """Evaluate this run folder, checkpoint, Hugging Face folder or model on the hub"""
    tasks: Annotated[tuple[str, ...], Arg(comma_separated=True)]
    """Run these tasks, by their names in lm_eval"""
    include_path: Annotated[Path | None, Arg(metavar="FOLDER")] = None
    """Read your own task definitions from this folder"""
    length: int | None = None
    """Read this many tokens at once (default: the training length)"""
    limit: int | None = None
    """Use this many samples of each task (default: all)"""
    num_fewshot: int | None = None
    """Show this many examples before each question (default: the number of the task)"""
    batch: int = 8
    """Read this many sequences at once"""
    out: Path | None = None
    """Write the results to this folder (default: the run folder, or runs/NAME for Hugging Face models)"""

    def run(self) -> None:
        """Run the tasks, print a table of the metrics and store the results."""
        from trainshort.utils.io import check_folder_writable

        check_minimum(1, length=self.length, limit=self.limit, batch=self.batch)
        check_minimum(0, num_fewshot=self.num_fewshot)
        if self.include_path is not None and not self.include_path.is_dir():
            raise InputError(
                f"Invalid --include-path: expected a folder of task definitions (YAML), got {self.include_path}."
            )
        if self.out is not None:
            check_folder_writable(self.out)
        # Import torch only after the checks above.
        from rich.table import Table

        from trainshort.evaluate.targets import open_target
        from trainshort.interop.lm_eval import HarnessRequest, evaluate_tasks, save
        from trainshort.utils.machine import pick_device

        target = open_target(self.target, device=pick_device(None))
        if self.out is not None:
            target.folder = self.out
        request = HarnessRequest(
            tasks=self.tasks,
            include_path=self.include_path,
            length=self.length,
            limit=self.limit,
            num_fewshot=self.num_fewshot,
            batch_size=self.batch,
        )
        result = evaluate_tasks(target, request)
        path = save(result, target)

        table = Table("task", "metric", "value", "standard error", title=escape_for_output(target.name))
        for task, metrics in result["results"].items():
            for row in format_metric_rows(metrics):
                table.add_row(task, *row)
        new_console().print(table)
        print_line(f"Written: {path}")


def format_metric_rows(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the metrics of a task as table rows of metric, value and standard error.

    Args:
        metrics: The results of lm-evaluation-harness for one task. The keys have the form "metric,filter", such as
            "acc,none" for the value and "acc_stderr,none" for its standard error.
    """
    rows = []
    for key, value in metrics.items():
        metric, _, filter_name = key.partition(",")
        is_number = isinstance(value, int | float)
        is_standard_error = metric.endswith("_stderr")
        if not is_number or is_standard_error or not filter_name:
            continue
        standard_error = metrics.get(f"{metric}_stderr,{filter_name}")
        error_text = f"{standard_error:.2g}" if isinstance(standard_error, float) else ""
        rows.append((metric, f"{value:.4g}", error_text))
    return rows


# The default settings of the training after a conversion.
CONVERSION_DEFAULTS = RunConfig(
    optim=OptimConfig(lr=5e-4, warmup=20),
    train=TrainConfig(steps=200, batch=8, valid_every=50, save_every=50),
)

# Settings that the converted model determines. They are not options of `trainshort convert`.
MODEL_SETTINGS = ("model", "data.tokenizer", "data.vocab_size", "train.length")


@dataclass(frozen=True)
class Convert:
    """Convert a pretrained model with learned, sinusoidal, rotary or T5 positions to ALiBi

    The position method is replaced by ALiBi. Then the model is trained on your text for a short time, to recover from
    the change. The command supports GPT-2, GPT-NeoX, Llama, Mistral and Qwen2 in safetensors, and run folders. It
    measures the perplexity at 1, 2, 4 and 8 times the training length: before the conversion, right after it and after
    the training. The results are shown as a table and stored in RUN/conversion with a figure.

    Examples:
      trainshort convert ./gpt2 --to alibi --corpus book.txt --out runs/gpt2-alibi
      trainshort convert ./pythia-70m --to alibi --corpus texts/ --length 512 --steps 1000 --out runs/pythia-alibi
      trainshort convert runs/demo-rotary --to alibi --corpus sotu --out runs/turned
    """

    source: Annotated[str, Arg(metavar="MODEL", positional=True)]
    """Convert this Hugging Face folder, model on the hub or run folder"""
    to: str
    """Choose the new position method: alibi"""
    out: Path
    """Write the run to this folder, which must not exist unless --resume is given"""
    length: int | None = None
    """Train on sequences of this many tokens (default: the training length of the model)"""
    tokenizer: Path | None = None
    """Use this tokenizer.json instead of the tokenizer of the model"""
    max_tokens: int = 65_536
    """Measure perplexity on this many validation tokens"""
    resume: bool = False
    """Continue a conversion that was stopped"""
    quiet: bool = False
    """Show no progress"""
    settings: Any = None
    """The training settings that the user gave, by dotted names such as "train.steps"."""

    @classmethod
    def parse(cls, words: list[str]) -> "Convert":
        """Parse the command line. The settings of the training are options, besides the fields of this class.

        Args:
            words: The arguments after `trainshort convert`.
        """
        # The first setting of the config that is not excluded is `data.corpus`. The excluded settings are chosen by the
        # program or by the original model.
        corpus_option, *training_options = options_from_config(
            CONVERSION_DEFAULTS, exclude=(*PROGRAM_SETTINGS, *MODEL_SETTINGS)
        )
        required_corpus_option = replace(
            corpus_option, help="Train on this corpus, file, folder or glob", default=REQUIRED
        )
        return read_command(cls, words, [required_corpus_option, *training_options])

    def run(self) -> None:
        """Convert the model, train it, and measure its perplexity at each stage."""
        from trainshort.evaluate.targets import RunTarget
        from trainshort.evaluate.text import open_text
        from trainshort.interop.convert import STAGES, ConversionEvaluator
        from trainshort.train.loop import train
        from trainshort.utils.terminal import StopRequest

        original_model, config = self._prepare_run_folder()
        stop_request = StopRequest(process_ends=True)
        converted = RunTarget(self.out)
        text = open_text(converted, (), "valid", self.max_tokens)
        evaluator = ConversionEvaluator(self.out, text, config.train.length)

        # The perplexity of the model is measured at three stages: before the conversion, after the conversion
        # ("surgery"), and after the training. The training happens right before the last measurement.
        model_by_stage = {"before": original_model, "surgery": str(self.out), "trained": str(self.out)}
        for stage, model_path in model_by_stage.items():
            if stage == "trained":
                train(config, self.out, resume=True, quiet=self.quiet, stop=stop_request)
            if not self.quiet:
                print_status(f"Measuring the model {STAGES[stage]}, at {len(evaluator.plan.lengths)} lengths.")
            evaluator.measure(stage, model_path, converted.bos)

        written_paths = evaluator.finish()
        new_console().print(evaluator.table())
        print_line("Written: " + ", ".join(str(path) for path in written_paths))

    def _prepare_run_folder(self) -> tuple[str, RunConfig]:
        """Write the run folder with the converted model, if the folder does not exist yet.

        Returns:
            The path or hub name of the model before the conversion, and the settings of the training.

        Raises:
            InputError: If an option is invalid or the model cannot be converted.
        """
        from trainshort.data.corpora import find_corpus
        from trainshort.data.tokenizers.base import TOKENIZER_FILE
        from trainshort.interop.convert import (
            check_same_conversion,
            check_target_position,
            convert,
            open_conversion_source,
        )
        from trainshort.interop.import_model import ImportRequest
        from trainshort.train.run_folder import RunFolder, check_run_path_free

        check_target_position(self.to)
        check_minimum(1, length=self.length, max_tokens=self.max_tokens)
        find_corpus(self.settings["data.corpus"])  # A missing text is reported before the model is read.
        stored_config = check_run_path_free(self.out, resume=self.resume)
        if stored_config is not None:
            check_same_conversion(self.out, self.source)

        request = ImportRequest(self.source, tokenizer=self.tokenizer, training_length=self.length)
        conversion_source = open_conversion_source(request)
        model = conversion_source.source.weight_map.model  # The description of the converted model.
        length = self.length or model.training_length
        if length is None:
            raise InputError(f"The training length of {self.source} is unknown. Set it with --length.")

        tokenizer_path = (self.out / TOKENIZER_FILE).resolve()
        base = CONVERSION_DEFAULTS.replace(
            model=model.config, data={"tokenizer": str(tokenizer_path)}, train={"length": length}
        )
        config = apply_settings(base, self.settings)
        if not RunFolder(self.out).config.exists():
            convert(conversion_source, request, config, self.out)
            self._check_training_text(config)
        for note in model.notes:
            print_status(note[0].upper() + note[1:] + ".")
        return conversion_source.original_path, config

    def _check_training_text(self, config: RunConfig) -> None:
        """Tokenize the training text with the tokenizer in the new run folder, and check that the text is long enough.

        Raises:
            InputError: If the text cannot be used. The new run folder is removed.
        """
        from trainshort.data.batches import BatchStream
        from trainshort.data.preparation import open_or_prepare

        try:
            tokens = open_or_prepare(config.data, progress=not self.quiet).split("train")
            # The constructor raises InputError if the text is shorter than one sequence.
            BatchStream(tokens, length=config.train.length, batch_size=1, seed=0, drop_last=config.data.drop_last)
        except InputError:
            shutil.rmtree(self.out)
            raise
