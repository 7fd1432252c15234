"""What a data folder was asked to hold, where it lies, and whether another request is the same."""

import re
from pathlib import Path

from trainshort.config.run_config import DataConfig
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import ChecksumCache, DataRequest, content_sha256
from trainshort.data.documents import Corpus
from trainshort.data.tokenizers.base import tokenizer_name, tokenizers
from trainshort.errors import InputError
from trainshort.utils import io
from trainshort.utils.registry import did_you_mean


def data_folder(config: DataConfig) -> Path:
    """Where the data goes: the folder that was named, else data/<corpus>-<tokenizer><vocabulary>.

    sotu, bpe, 2048: data/sotu-bpe2048      texts/novels/, bytes: data/novels-bytes
    """
    if config.folder is not None:
        return config.folder
    corpus = config.corpus.rstrip("/")
    path = Path(corpus)
    short = path.stem if path.is_file() else path.name if path.is_dir() else corpus
    size = str(config.vocab_size) if has_vocab_size(config.tokenizer) else ""
    return Path("data") / f"{_plain(short)}-{_plain(short_name(config.tokenizer))}{size}"


def short_name(tokenizer: str) -> str:
    """bytes, words, bpe, or what a tokenizer file is called."""
    return tokenizer if tokenizer in tokenizers else tokenizer_name(Path(tokenizer))


def has_vocab_size(tokenizer: str) -> bool:
    """Whether a vocabulary of a size that is asked for is built."""
    return tokenizer in tokenizers and tokenizers.get(tokenizer).sized


def _plain(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-.") or "text"


def make_request(config: DataConfig, corpus: Corpus) -> DataRequest:
    return DataRequest(
        corpus=config.corpus,
        fingerprint=corpus.fingerprint,
        content=content_sha256(corpus.paths) if corpus.paths else None,
        tokenizer=config.tokenizer,
        tokenizer_sha256=_tokenizer_sha256(config.tokenizer),
        vocab_size=config.vocab_size if has_vocab_size(config.tokenizer) else None,
    )


def _tokenizer_sha256(tokenizer: str) -> str | None:
    """Of the tokenizer.json that was given; None where one is built by name."""
    given = _given_sha256(tokenizer)
    if given or tokenizer in tokenizers:
        return given
    path, known = Path(tokenizer), tokenizers.names()
    if not path.exists() and (path.suffix == ".json" or len(path.parts) > 1):
        raise InputError(f"There is no tokenizer {path}. Use {', '.join(known)} or the path of a tokenizer.json.")
    raise InputError(
        f"'{tokenizer}' is no tokenizer: use {', '.join(known)} or the path of a tokenizer.json."
        f"{did_you_mean(tokenizer, known)}"
    )


def check_same_request(folder: Path, old: DataRequest, config: DataConfig, state: str) -> None:
    """Raise when the folder was made from something else, and say what differs."""
    checked = ChecksumCache(folder)
    differences = _differences(old, config, checked)
    if differences:
        raise InputError(
            f"{folder} {state} from {'; '.join(differences)}. Choose another folder with --out, or delete this one."
        )
    checked.save()


def _differences(old: DataRequest, config: DataConfig, checked: ChecksumCache) -> list[str]:
    found = []
    corpus = _current(config)
    same = corpus is None or (  # names and sizes are compared first, then the content decides
        corpus.fingerprint == old.fingerprint
        and (old.content is None or checked.matches("corpus", corpus.paths, old.content))
    )
    if old.corpus != config.corpus and (corpus is None or not same):
        found.append(f"corpus '{old.corpus}', not '{config.corpus}'")
    elif not same:
        found.append(f"an earlier state of '{config.corpus}', whose files have changed")
    given = _given_sha256(config.tokenizer)
    if old.tokenizer != config.tokenizer and (given is None or given != old.tokenizer_sha256):
        found.append(f"tokenizer '{old.tokenizer}', not '{config.tokenizer}'")
    elif old.tokenizer_sha256 is not None and given not in (None, old.tokenizer_sha256):
        found.append(f"an earlier state of the tokenizer '{config.tokenizer}'")
    elif old.vocab_size is not None and old.vocab_size != config.vocab_size:
        found.append(f"vocabulary {old.vocab_size}, not {config.vocab_size}")
    return found


def _current(config: DataConfig) -> Corpus | None:
    """The corpus as it is now; None where it is gone or only the hub has it: prepared data outlives its source."""
    try:
        corpus = find_corpus(config.corpus)
    except InputError:
        return None
    return None if corpus.streamed else corpus


def _given_sha256(tokenizer: str) -> str | None:
    return io.sha256(Path(tokenizer)) if tokenizer not in tokenizers and Path(tokenizer).is_file() else None
