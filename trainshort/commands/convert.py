"""`trainshort convert`: a model with other positions becomes an ALiBi model, and is trained on to recover."""

from pathlib import Path
from typing import Any

from trainshort.commands.parser import REQUIRED, Option, Parser, of_settings
from trainshort.config import DataConfig, OptimConfig, RunConfig, TrainConfig

BASE = RunConfig(
    optim=OptimConfig(lr=5e-4, warmup=20),
    train=TrainConfig(steps=200, batch=8, valid_every=50, save_every=50),
)
"""Settings of the training that follows the surgery, as far as the command line says nothing."""
OF_THE_MODEL = ("tokenizer", "vocabulary", "length")
"""Settings that the model brings."""


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

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.source, self.to, self.out = str(chosen["source"]), str(chosen["to"]), Path(chosen["out"])
        self.length, self.tokenizer, self.max_tokens = chosen["length"], chosen["tokenizer"], chosen["max_tokens"]
        self.resume, self.quiet = bool(chosen["resume"]), bool(chosen["quiet"])
        self.settings = {name: value for name, value in chosen.items() if "." in name}

    @classmethod
    def parse(cls, words: list[str]) -> "Convert":
        made = [
            *of_settings(BASE.data, "data.", leave=OF_THE_MODEL),
            *of_settings(BASE.optim, "optim."),
            *of_settings(BASE.train, "train.", leave=OF_THE_MODEL),
        ]
        text = Option(
            "data.corpus", str, "Text to train on: corpus name, file, folder or glob.", REQUIRED, "data.corpus"
        )
        made = [text if one.name == "data.corpus" else one for one in made]
        return cls(Parser("trainshort convert", [*_own(), *made], cls.__doc__ or "").parse(words))

    def run(self) -> None:
        from rich.console import Console

        from trainshort.evaluate.target import RunTarget
        from trainshort.evaluate.text import open_text
        from trainshort.interop.converting import STAGES, Recovery
        from trainshort.interrupt import StopRequest
        from trainshort.terminal import say
        from trainshort.train import train

        before, config = self._begun()
        stop = StopRequest(last=True)
        first = RunTarget(self.out)
        stages = Recovery(self.out, open_text(first, (), "valid", self.max_tokens), config.train.length)
        for stage, name in (("before", before), ("surgery", str(self.out)), ("trained", str(self.out))):
            if stage == "trained":
                train(config, self.out, resume=True, quiet=self.quiet, stop=stop)
            if not self.quiet:
                say(f"Measuring the model {STAGES[stage]}, at {len(stages.plan.lengths)} lengths.")
            stages.measure(stage, name, first.bos)
        written = stages.finish()
        Console().print(stages.table())
        print("Written: " + ", ".join(map(str, written)))

    def _begun(self) -> tuple[str, RunConfig]:
        """The run folder with the converted model in it: where the model can be read as it was, and the settings."""
        from trainshort.data.corpus import find_corpus
        from trainshort.data.tokenizer import FILE
        from trainshort.errors import InputError
        from trainshort.interop.converting import convert, open_patient, refuse_target
        from trainshort.interop.importing import ImportRequest
        from trainshort.runs import RunFolder, refuse_existing
        from trainshort.terminal import say

        refuse_target(self.to)
        find_corpus(self.settings["data.corpus"])  # a text that is not there is told before anything is read
        refuse_existing(self.out, resume=self.resume)
        request = ImportRequest(self.source, tokenizer=self.tokenizer, trained_at=self.length)
        patient = open_patient(request)
        model, tokenizer = patient.source.reading.model, str((self.out / FILE).resolve())
        length = self.length or model.length
        if length is None:
            raise InputError(f"{self.source} does not say at which length it was trained. Give --length.")
        config = self._config(model.config, tokenizer, length)
        if not RunFolder(self.out).config.exists():
            convert(patient, request, config, self.out)
        for note in model.notes:
            say(note[0].upper() + note[1:] + ".")
        return patient.before, config

    def _config(self, model: Any, tokenizer: str, length: int) -> RunConfig:
        from trainshort.commands.run_options import chosen_config

        base = BASE.model_copy(
            update={
                "model": model,
                "data": DataConfig(tokenizer=tokenizer),
                "train": BASE.train.model_copy(update={"length": length}),
            }
        )
        return chosen_config(base, self.settings)


def _own() -> list[Option]:
    """What the command takes beside the settings of the training."""
    source = "A Hugging Face model's folder, its name on the hub, or a run folder."
    length = "Tokens in a training sequence. Default: as many as the model was made for."
    other = "Another tokenizer.json than the model's own."
    cut = "Measure on the first so many validation tokens."
    again = "Go on with a conversion that was stopped."
    return [
        Option("source", str, source, field="source", metavar="MODEL", positional=True),
        Option("to", str, "The positions to put in: alibi.", field="to"),
        Option("out", Path, "The run folder to make; refused if it exists, unless resumed.", field="out"),
        Option("length", int | None, length, None, "length"),
        Option("tokenizer", Path | None, other, None, "tokenizer"),
        Option("max-tokens", int, cut, 65_536, "max_tokens"),
        Option("resume", bool, again, False, "resume"),
        Option("quiet", bool, "Show no progress.", False, "quiet"),
    ]
