"""Whatever the tokens, streamed text is the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from support.scripted_model import ByteTokenizer
from tengserve_backend.text.detokenizer import IncrementalDetokenizer
from tengserve_backend.text.stop import StopMatcher

WORDS = {256: "hello", 257: " wörld", 258: "😀", 259: "\n"}
TOKENIZER = ByteTokenizer(words=WORDS, special={260: "<|end|>"})


def streamed(ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(lambda window: TOKENIZER.decode(window, skip_special_tokens=True))
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@given(st.lists(st.integers(0, 260), max_size=80))
def test_joined_pieces_equal_the_whole_decoding(ids: list[int]) -> None:
    assert "".join(streamed(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40))
def test_no_piece_of_valid_text_holds_half_a_character(text: str) -> None:
    pieces = streamed(list(text.encode()))
    assert "".join(pieces) == text
    for piece in pieces:
        assert piece == "" or piece in text


def matched(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        shown += result.text
        if result.matched:
            return shown, True
    return shown + matcher.flush(), False


stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@given(stop_lists, st.lists(st.text("abc", max_size=5), max_size=12))
def test_the_cut_does_not_depend_on_the_tokens(stops: tuple[str, ...], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert matched(stops, pieces) == matched(stops, list(text)) == matched(stops, [text])


@given(stop_lists, st.lists(st.text("abc", max_size=5), max_size=12))
def test_the_answer_ends_where_the_first_complete_stop_string_starts(stops: tuple[str, ...], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert matched(stops, pieces) == expected


@given(stop_lists, st.lists(st.text("abc", max_size=5), max_size=12))
def test_what_is_shown_is_never_part_of_a_stop_string_and_never_late(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        result = matcher.push(piece)
        shown += result.text
        if result.matched:
            return
        held = text[len(shown) :]
        longest = max(
            (n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])), default=0
        )
        assert len(held) == longest
