"""Stop texts: they are found across token boundaries, and no other text is lost."""

from hypothesis import given
from hypothesis import strategies as st

from trainshort.generate.sampling import StopStrings


def test_possible_beginning_of_a_stop_text_is_held_back():
    stop_strings = StopStrings(["END"])
    texts = [stop_strings.push(text) for text in ("the E", "N", "T", " END.", "more")]
    assert texts == ["the ", "", "ENT", " ", ""]
    assert stop_strings.is_stopped
    assert stop_strings.finish() == ""


def test_finish_returns_the_text_that_was_held_back():
    stop_strings = StopStrings(["END"])
    assert stop_strings.push("the EN") == "the "
    assert stop_strings.finish() == "EN"
    assert not stop_strings.is_stopped


def test_text_ends_at_the_first_of_several_stop_texts():
    stop_strings = StopStrings(["cd", "bc"])
    assert stop_strings.push("abcd") == "a"


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_is_complete_up_to_a_stop_text(parts, stop_texts):
    full_text = "".join(parts)
    contains_stop_text = any(stop_text in full_text for stop_text in stop_texts)
    stop_strings = StopStrings(stop_texts)
    passed_text = "".join([stop_strings.push(part) for part in parts])
    assert stop_strings.is_stopped == contains_stop_text
    if contains_stop_text:
        # If stop texts overlap, the parts determine which of them is complete first.
        assert full_text.startswith(passed_text)
        rest = full_text[len(passed_text) :]
        assert any(rest.startswith(stop_text) for stop_text in stop_texts)
    else:
        assert passed_text + stop_strings.finish() == full_text
