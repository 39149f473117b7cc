"""Incremental decoding, token by token."""

import pytest
from tokenizers import Tokenizer, decoders, models

from support.scripted_model import ByteTokenizer
from tengserve_backend.text.detokenizer import REPLACEMENT, IncrementalDetokenizer


def decoder(tokenizer: ByteTokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def stream(decode, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


def test_a_character_over_several_tokens_comes_out_whole():
    text = "歪😀é"
    pieces = stream(decoder(ByteTokenizer()), list(text.encode()))
    assert pieces == ["", "", "歪", "", "", "", "😀", "", "é", ""]


def test_an_incomplete_character_at_the_end_shows_as_replacement():
    pieces = stream(decoder(ByteTokenizer()), list("a歪".encode())[:-1])
    assert pieces == ["a", "", "", REPLACEMENT]


def test_broken_bytes_without_end_are_given_out_and_the_text_after_them_is_right():
    ids = [0x80] * 200 + list("歪 done".encode())
    assert "".join(stream(decoder(ByteTokenizer()), ids)) == bytes(ids).decode("utf-8", "replace")


def test_work_is_linear_even_for_broken_bytes():
    decoded = 0
    tokenizer = ByteTokenizer()

    def counting(ids):
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids, skip_special_tokens=True)

    stream(counting, [0x80] * 1000)
    assert decoded < 1000 * 100


def test_a_real_replacement_character_passes():
    text = f"a{REPLACEMENT}b"
    assert "".join(stream(decoder(ByteTokenizer()), list(text.encode()))) == text


def test_special_tokens_leave_no_trace():
    tokenizer = ByteTokenizer(special={256: "<|end|>"})
    assert stream(decoder(tokenizer), [97, 256, 98]) == ["a", "", "b", ""]


@pytest.fixture
def sentencepiece():
    """A tokenizer that writes spaces as U+2581 and strips the first, with bytes as fallback."""
    vocab = {"▁am": 0, "▁a": 1, "▁French": 2, "er": 3}
    vocab |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_words_keep_their_space_except_the_first(sentencepiece):
    # MindIE native API, /infer, the sample of a stream: "am", " a", " French".
    assert stream(sentencepiece.decode, [0, 1, 2, 3]) == ["am", " a", " French", "er", ""]


def test_byte_fallback_characters_in_a_row_come_out_whole(sentencepiece):
    ids = [4 + byte for byte in "中国😀".encode()]
    assert stream(sentencepiece.decode, ids) == ["", "", "中", "", "", "国", "", "", "", "😀", ""]
