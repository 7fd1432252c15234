"""Choose the folder of a dataset, describe what the user requested, and compare two requests."""

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
    """Return the folder in which the prepared dataset is stored.

    The folder is `config.folder` if that setting is given. Otherwise the folder is named after the corpus and the
    tokenizer. The vocabulary size is added for tokenizers that are trained with a chosen vocabulary size.

    Args:
        config: The settings of the dataset.

    Returns:
        The path of the folder. The folder does not have to exist.

    Example:
        >>> data_folder(DataConfig(corpus="sotu", tokenizer="bpe", vocab_size=2048))
        PosixPath('data/sotu-bpe2048')
        >>> data_folder(DataConfig(corpus="texts/novels/", tokenizer="bytes"))
        PosixPath('data/novels-bytes')
    """
    if config.folder is not None:
        return config.folder

    # A corpus is a text file, a folder of text files, or the name of a known corpus.
    corpus = config.corpus.rstrip("/")
    corpus_path = Path(corpus)
    if corpus_path.is_file():
        corpus_name = corpus_path.stem
    elif corpus_path.is_dir():
        corpus_name = corpus_path.name
    else:
        corpus_name = corpus

    vocab_size_suffix = ""
    if has_vocab_size(config.tokenizer):
        vocab_size_suffix = str(config.vocab_size)

    safe_corpus_name = _replace_special_characters(corpus_name)
    safe_tokenizer_name = _replace_special_characters(short_name(config.tokenizer))
    return Path("data") / f"{safe_corpus_name}-{safe_tokenizer_name}{vocab_size_suffix}"


def short_name(tokenizer: str) -> str:
    """Return the short name of a tokenizer.

    Args:
        tokenizer: The name of a registered tokenizer, or the path of a tokenizer.json.

    Returns:
        The registered name, or a name that is derived from the path: "gpt2" for "gpt2/tokenizer.json".
    """
    if tokenizer in tokenizers:
        return tokenizer
    return tokenizer_name(Path(tokenizer))


def has_vocab_size(tokenizer: str) -> bool:
    """Return whether a tokenizer is trained with a vocabulary size that the user chooses."""
    return tokenizer in tokenizers and tokenizers.get(tokenizer).sized


def _replace_special_characters(name: str) -> str:
    """Replace characters by hyphens, except letters, digits, underscores and periods. The result is not empty."""
    safe_name = re.sub(r"[^\w.]+", "-", name).strip("-.")
    return safe_name or "text"


def make_request(config: DataConfig, corpus: Corpus) -> DataRequest:
    """Describe which dataset the user requested, with the checksums of all files that influence the dataset.

    A stored dataset is reused only if it was prepared for the same request.

    Args:
        config: The settings of the dataset.
        corpus: The corpus that the settings name.

    Raises:
        InputError: If the tokenizer is unknown, or if a file cannot be read.
    """
    return DataRequest(
        corpus=config.corpus,
        fingerprint=corpus.fingerprint,
        content=content_sha256(corpus.paths) if corpus.paths else None,  # None for a corpus that is not stored in files
        tokenizer=config.tokenizer,
        tokenizer_sha256=_require_tokenizer(config.tokenizer),
        vocab_size=config.vocab_size if has_vocab_size(config.tokenizer) else None,
    )


def _require_tokenizer(tokenizer: str) -> str | None:
    """Check that a tokenizer exists.

    Args:
        tokenizer: The name of a registered tokenizer, or the path of a tokenizer.json.

    Returns:
        The SHA-256 of the tokenizer.json, or None for a registered tokenizer.

    Raises:
        InputError: If there is no such tokenizer.
    """
    sha256 = _tokenizer_file_sha256(tokenizer)
    if sha256 is not None or tokenizer in tokenizers:
        return sha256

    known_names = tokenizers.names()
    choices = f"Use {', '.join(known_names)} or the path of a tokenizer.json."
    path = Path(tokenizer)
    looks_like_path = path.suffix == ".json" or len(path.parts) > 1
    if looks_like_path and not path.exists():
        raise InputError(f"Tokenizer file not found: {path}. {choices}")
    raise InputError(f"Unknown tokenizer '{tokenizer}'.{did_you_mean(tokenizer, known_names)} {choices}")


def check_same_request(folder: Path, stored: DataRequest, config: DataConfig, state: str) -> None:
    """Raise `InputError` if a folder was prepared for other settings, or if the text or the tokenizer has changed.

    Args:
        folder: The folder of the dataset.
        stored: The request for which the folder was prepared: its corpus, tokenizer and vocabulary size.
        config: The current settings.
        state: A verb phrase for the error message, such as "was prepared".
    """
    cache = ChecksumCache(folder)
    differences = _find_differences(stored, config, cache)
    if differences:
        raise InputError(
            f"{folder} {state} from {'; '.join(differences)}. Choose another folder with --out, or delete this folder."
        )
    cache.save()


def _find_differences(stored: DataRequest, config: DataConfig, cache: ChecksumCache) -> list[str]:
    """Describe the differences between a stored request and the current settings, for an error message."""
    corpus_difference = _find_corpus_difference(stored, config, cache)
    tokenizer_difference = _find_tokenizer_difference(stored, config)
    return [difference for difference in (corpus_difference, tokenizer_difference) if difference is not None]


def _find_corpus_difference(stored: DataRequest, config: DataConfig, cache: ChecksumCache) -> str | None:
    """Describe how the corpus differs from the corpus of a stored request, or return None if it is the same.

    A corpus that was renamed or moved is the same if its content is the same. A corpus that is not available any more
    counts as unchanged, because a dataset can be used without its corpus.

    Args:
        stored: The request for which a dataset was prepared.
        config: The current settings.
        cache: The record of files that were verified before, so that unchanged files are not read again.
    """
    corpus = _find_local_corpus(config)
    has_same_name = stored.corpus == config.corpus
    if corpus is None:
        return None if has_same_name else f"corpus '{stored.corpus}', not '{config.corpus}'"

    # The names and the sizes of the files are compared first, because the comparison of the content reads all files.
    is_same = corpus.fingerprint == stored.fingerprint
    if is_same and stored.content is not None:
        is_same = cache.matches("corpus", corpus.paths, stored.content)
    if is_same:
        return None
    if has_same_name:
        return f"an earlier state of '{config.corpus}', whose files have changed"
    return f"corpus '{stored.corpus}', not '{config.corpus}'"


def _find_tokenizer_difference(stored: DataRequest, config: DataConfig) -> str | None:
    """Describe how the tokenizer differs from the tokenizer of a stored request, or return None if it is the same."""
    sha256 = _tokenizer_file_sha256(config.tokenizer)
    has_same_name = stored.tokenizer == config.tokenizer
    is_same_file = sha256 is not None and sha256 == stored.tokenizer_sha256
    if not has_same_name and not is_same_file:
        return f"tokenizer '{stored.tokenizer}', not '{config.tokenizer}'"
    # A tokenizer.json that does not exist any more counts as unchanged.
    if stored.tokenizer_sha256 is not None and sha256 is not None and not is_same_file:
        return f"an earlier state of the tokenizer '{config.tokenizer}'"
    if stored.vocab_size is not None and stored.vocab_size != config.vocab_size:
        return f"vocabulary {stored.vocab_size}, not {config.vocab_size}"
    return None


def _find_local_corpus(config: DataConfig) -> Corpus | None:
    """Return the corpus that the settings name, or None if its files do not exist any more.

    The result is also None for a streamed corpus, whose files are on the Hugging Face Hub.
    """
    try:
        corpus = find_corpus(config.corpus)
    except InputError:
        return None
    return None if corpus.streamed else corpus


def _tokenizer_file_sha256(tokenizer: str) -> str | None:
    """Return the SHA-256 of a tokenizer.json, or None for a registered name or a file that does not exist."""
    if tokenizer in tokenizers:
        return None
    path = Path(tokenizer)
    return io.sha256(path) if path.is_file() else None
