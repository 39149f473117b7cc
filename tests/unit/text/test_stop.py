"""Stop strings on text."""

from tengserve_backend.text.stop import StopMatcher, Stopped


def test_nothing_of_the_stop_string_is_shown():
    matcher = StopMatcher(("DEFGHIJ",))
    shown = [matcher.push(character) for character in "ABCDEFGHIJ"]
    assert "".join(piece.text for piece in shown) == "ABC"
    assert [piece.matched for piece in shown] == [False] * 9 + [True]


def test_text_held_back_is_given_out_when_it_becomes_something_else():
    matcher = StopMatcher(("DEFGHIJ",))
    assert [matcher.push(text).text for text in ("ABC", "DEFG", "X")] == ["ABC", "", "DEFGX"]


def test_exactly_the_possible_beginning_is_held_back():
    matcher = StopMatcher(("abab!",))
    assert matcher.push("xabab") == Stopped("x", matched=False)
    # "ababa" cannot match any more, but its last "aba" can.
    assert matcher.push("ab") == Stopped("ab", matched=False)
    assert matcher.push("!") == Stopped("", matched=True)


def test_a_stop_string_inside_a_token_cuts_it():
    matcher = StopMatcher(("Pari",))
    assert matcher.push("is ") == Stopped("is ", matched=False)
    assert matcher.push("Paris") == Stopped("", matched=True)


def test_the_match_that_is_complete_first_wins():
    matcher = StopMatcher(("long stop", "g s"))
    assert matcher.push("a long stop") == Stopped("a lon", matched=True)


def test_held_text_is_flushed_at_another_end():
    matcher = StopMatcher(("stop",))
    assert matcher.push("a st").text == "a "
    assert matcher.flush() == "st"
    assert matcher.flush() == ""
