"""A plug-in for tests that registers a backend, a corpus, a tokenizer and an analysis."""

from rich.console import Group

from trainshort.attention import AttentionCall
from trainshort.config.registries import backends
from trainshort.data.corpora import corpora, find_corpus
from trainshort.data.tokenizers.base import SavedTokenizer, tokenizers
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, analyses


@backends.register("echo")
class Echo:
    """The reference backend under another name."""

    @staticmethod
    def unsupported_reason(call: AttentionCall) -> str | None:
        num_keys = call.k.shape[2]
        return "is for tests with at most 99 keys" if num_keys > 99 else None

    @staticmethod
    def run(call: AttentionCall):
        return backends.get("reference").run(call)


@corpora.register("owl")
def owl():
    """The text of the file owl.txt in the current folder."""
    return find_corpus("owl.txt")


@tokenizers.register("letters")
class Letters(SavedTokenizer):
    """A tokenizer whose tokens are the letters of the text. The token 0 stands for unknown letters."""

    summary = "each letter is a token"
    sized = True

    @classmethod
    def build(cls, texts, vocab_size, size):
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        letters = {letter for text in texts for letter in text}
        known_letters = sorted(letters)[: vocab_size - 1]
        vocabulary = {"?": 0}
        for token_id, letter in enumerate(known_letters, start=1):
            vocabulary[letter] = token_id

        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        return cls(tokenizer, "letters")


def count_tokens(context: AnalysisContext) -> dict:
    """Return the result of the analysis "count"."""
    return {"summary": f"there are {len(context.tokens)} tokens"}


def show_count(result: dict) -> Group:
    """Return what the command `analyze` prints for a result of the analysis "count"."""
    return Group(result["summary"])


analyses.register("count")(Analysis("How many tokens does the text have?", count_tokens, show_count))
