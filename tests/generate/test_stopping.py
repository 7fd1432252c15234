"""Stop texts are found across token boundaries, and nothing is shown too early or lost."""

from hypothesis import given
from hypothesis import strategies as st

from trainshort.generate.sampling import StopStrings


def test_held_back_as_long_as_it_may_be_one():
    stops = StopStrings(["END"])
    assert [stops.push(text) for text in ("the E", "N", "T", " END.", "more")] == ["the ", "", "ENT", " ", ""]
    assert stops.stopped
    assert stops.finish() == ""


def test_what_was_held_comes_at_the_end():
    stops = StopStrings(["END"])
    assert stops.push("the EN") + stops.finish() == "the EN"
    assert not stops.stopped


def test_the_first_of_several_counts():
    stops = StopStrings(["cd", "bc"])
    assert stops.push("abcd") == "a"


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_any_cut_gives_the_same_text(parts, stops):
    whole = "".join(parts)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    filter_ = StopStrings(stops)
    shown = "".join(filter_.push(part) for part in parts)
    assert filter_.stopped == bool(places)
    if places:
        # Cut into parts, a later-ending stop text may not be complete when an earlier-ending one is.
        assert whole.startswith(shown)
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)
    else:
        assert shown + filter_.finish() == whole
