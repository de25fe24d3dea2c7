"""Rows end between words, and the text stays what it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.cli.terminal.text_rows import num_cells
from neurogrid.cli.terminal.word_wrap import MAX_WORD_CHARS, WordWrap

PIECES = st.lists(st.text("ab漢字。「 \u0301\n", max_size=12), max_size=12)
WIDTHS = st.integers(2, 12)


def wrapped(*pieces: str, width: int) -> str:
    wrap = WordWrap()
    text = "".join(wrap.push(piece, width) for piece in [*pieces, "\n"])
    assert wrap.is_clean
    return text.removesuffix("\n")


def inserted(text: str, out: str) -> list[int]:
    """Where line breaks were put into the text; fails if anything else is different."""
    places, at = [], 0
    for character in out:
        if at < len(text) and character == text[at]:
            at += 1
        else:
            assert character == "\n"
            places.append(at)
    assert at == len(text)
    return places


@given(PIECES, WIDTHS)
def test_the_text_is_kept_and_rows_fit_whatever_the_pieces(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    out = wrapped(text, width=width)
    assert wrapped(*pieces, width=width) == out
    inserted(text, out)
    for line in out.split("\n"):
        longest = max((num_cells(word, 1000) for word in line.split(" ")), default=0)
        assert num_cells(line, 1000) <= width or longest > width


@given(PIECES, st.data())
def test_a_width_that_changes_loses_nothing(pieces: list[str], data: st.DataObject) -> None:
    wrap = WordWrap()
    out = "".join(wrap.push(piece, data.draw(WIDTHS)) for piece in pieces)
    inserted("".join(pieces) + "\n", out + wrap.push("\n", 5))


@given(st.lists(st.text("ab ", max_size=6), max_size=12), WIDTHS)
def test_no_break_is_inside_of_a_word_that_fits(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    for place in inserted(text, wrapped(*pieces, width=width)):
        assert " " in text[place - 1 : place + 1]


def test_the_word_that_is_written_is_kept_back_and_no_more() -> None:
    wrap = WordWrap()
    assert wrap.push("The quick bro", 20) == "The quick "
    assert wrap.push("wn fox", 20) == "brown "
    assert wrap.push("es", 20) == ""
    assert wrap.push(" jump", 20) == "\nfoxes "  # 'The quick brown foxes' has 21 columns
    assert wrap.push("\n", 20) == "jump\n"


def test_a_word_longer_than_a_row_comes_as_it_is_written() -> None:
    wrap = WordWrap()
    assert wrap.push("a https", 8) == "a "
    assert wrap.push("://", 8) == ""
    assert wrap.push("x", 8) == "\nhttps://x"
    assert wrap.push("yz", 8) == "yz"
    assert wrap.push(" and", 8) == " "  # behind it on the terminal's next row
    assert wrap.push(" so", 8) == "and "


def test_combining_characters_without_end_are_not_kept_back() -> None:
    assert len(WordWrap().push("a" + "\u0301" * MAX_WORD_CHARS, 80)) == MAX_WORD_CHARS + 1


def test_scripts_without_spaces_break_between_characters() -> None:
    assert wrapped("漢字漢字漢字", width=9) == "漢字漢字\n漢字"
    assert wrapped("漢字漢字。漢", width=9) == "漢字漢\n字。漢"  # no row begins with what closes
    assert wrapped("漢字漢「字」", width=9) == "漢字漢\n「字」"
