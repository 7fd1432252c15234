"""`trainshort prepare`: text to token files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from trainshort.commands.parser import Arg
from trainshort.config import DataConfig

_SETTINGS = DataConfig.model_fields


def _help(name: str) -> Arg:
    return Arg(help=_SETTINGS[name].description)


@dataclass(frozen=True)
class Prepare:
    """Turn a corpus into a folder of tokens, train/valid/test.bin and meta.json.

    Interrupted, the same command continues. A folder made from other settings is refused.

    Examples:
      trainshort prepare sotu
      trainshort prepare texts/ --tokenizer bytes
      trainshort prepare 'logs/*.jsonl' --vocabulary 8192 --out data/logs --workers 8
      trainshort prepare wikitext-103 --tokenizer words --vocabulary 267744
      trainshort prepare bookcorpus --tokenizer bert/tokenizer.json
    """

    corpus: Annotated[str, Arg(metavar="CORPUS", positional=True)]
    """Corpus name (see `trainshort list corpora`), file, folder, glob, or hub dataset as owner/name[:config]."""
    tokenizer: Annotated[str, _help("tokenizer")] = _SETTINGS["tokenizer"].default
    vocabulary: Annotated[int, _help("vocabulary")] = _SETTINGS["vocabulary"].default
    out: Path | None = None
    """Folder to write. Default: data/<corpus>-<tokenizer><vocabulary>."""
    workers: int | None = None
    """Processes that encode. Default: one per core, fewer for small corpora; the result is the same."""
    errors: Literal["strict", "replace"] = "strict"
    """What to do about bytes that are not UTF-8: stop and say where, or put U+FFFD there."""

    def run(self) -> int:
        from trainshort.data import open_data, prepare
        from trainshort.data.meta import is_data
        from trainshort.data.pipeline import describe
        from trainshort.data.request import data_folder
        from trainshort.data.stages import Stages

        config = DataConfig.read(
            {"corpus": self.corpus, "tokenizer": self.tokenizer, "vocabulary": self.vocabulary, "folder": self.out}
        )
        folder = data_folder(config)
        there = is_data(folder)
        try:
            prepared = prepare(config, workers=self.workers, errors=self.errors)
        except KeyboardInterrupt:
            Stages(True).say(f"\nStopped. The same command continues in {folder}.")
            return 130
        if there:
            Stages(True).say(f"Already prepared. {describe(open_data(prepared.folder))}.")
        return 0
