"""One of each thing that a plug-in can bring: a backend, a corpus, a tokenizer, an analysis."""

from rich.console import Group

from trainshort.attention import AttentionCall
from trainshort.config.registries import backends
from trainshort.data.corpora import corpora, find_corpus
from trainshort.data.tokenizers.base import SavedTokenizer, tokenizers
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, analyses


@backends.register("echo")
class Echo:
    """The reference under another name."""

    @staticmethod
    def unsupported_reason(call: AttentionCall) -> str | None:
        return "is for tests with at most 99 keys" if call.k.shape[2] > 99 else None

    @staticmethod
    def run(call: AttentionCall):
        return backends.get("reference").run(call)


@corpora.register("owl")
def owl():
    """The text of a file named owl.txt here."""
    return find_corpus("owl.txt")


@tokenizers.register("letters")
class Letters(SavedTokenizer):
    summary = "a token is a letter"
    sized = True

    @classmethod
    def build(cls, texts, vocab_size, size):
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        found = sorted({letter for text in texts for letter in text})[: vocab_size - 1]
        saved = Tokenizer(models.WordLevel({"?": 0} | {x: i + 1 for i, x in enumerate(found)}, unk_token="?"))
        saved.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        return cls(saved, "letters")


def count(lab: AnalysisContext) -> dict:
    return {"summary": f"there are {len(lab.tokens)} tokens"}


analyses.register("count")(Analysis("how many tokens are there?", count, lambda result: Group(result["summary"])))
