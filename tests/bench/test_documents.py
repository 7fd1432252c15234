"""Tables of measurements in the documents are those of the stored results."""

import pytest

from trainshort.bench import documents


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_the_tables_agree_with_the_stored_results(name: str):
    text = (documents.ROOT / name).read_text(encoding="utf-8")
    assert documents.REGION.search(text), f"{name} has no measured table"
    assert documents.written(text) == text, f"run: python -m trainshort.bench.documents {name}"


def test_a_changed_number_is_noticed():
    text = (documents.ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert documents.written(text.replace("tokens/s", "tokens/h")) == text
    text = (documents.ROOT / "README.md").read_text(encoding="utf-8")
    assert text != text.replace("-->0.12", "-->0.11")
    assert documents.written(text.replace("-->0.12", "-->0.11")) == text


def test_an_unfinished_run_is_told():
    bench = documents.load(documents.RESULTS / "evaluate.json")
    assert ("stopped before its end" in documents.origin(bench, "evaluate")) == (not bench.finished)
