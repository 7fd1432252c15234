"""How fast text becomes tokens, in MB of text per second of one core: `python -m benchmarks.prepare`.

One thread, on the embedded corpus, with an empty memory of words at the start, as `trainshort prepare` begins. The same
tokens by a plain call of the tokenizers library are timed beside it. CPU time is counted, so that other work on the
machine does not show.
"""

import os
import time
from collections.abc import Callable

VOCABULARIES = (2048, 32_768)


def main() -> None:
    # Before the library is loaded: it reads these once.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    from trainshort.data.corpus import find_corpus
    from trainshort.data.tokenizer import ByteTokenizer, SavedTokenizer
    from trainshort.data.vocabulary import count_words, train_bpe

    texts = [document.text for document in find_corpus("sotu").documents()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{megabytes:.1f} MB of text, one core")

    def rate(name: str, work: Callable[[], object]) -> None:
        started = time.process_time()
        work()
        seconds = time.process_time() - started
        print(f"  {name:<34} {megabytes / seconds:8.1f} MB/s   {seconds:6.2f} s")

    for size in VOCABULARIES:
        trained: list[SavedTokenizer] = []
        rate(f"bpe {size}: training", lambda size=size, trained=trained: trained.append(train_bpe(texts, size)))
        bpe = trained[0]
        rate(f"bpe {size}: encoding", lambda bpe=bpe: [bpe.encode_document(text) for text in texts])
        library = bpe.library
        rate(
            f"bpe {size}: the library alone",
            lambda library=library: [library.encode(text, add_special_tokens=False).ids for text in texts],
        )
    words = count_words(texts, 32_768)
    rate("words: encoding", lambda: [words.encode_document(text) for text in texts])
    rate("bytes: encoding", lambda: [ByteTokenizer().encode_document(text) for text in texts])


if __name__ == "__main__":
    main()
