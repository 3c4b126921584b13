"""Pieces of prompts: nothing lost, few widths, a whole window at the end where that is asked."""

from hypothesis import given
from hypothesis import strategies as st

from hysparse.inference import plan

sizes = st.integers(1, 600)


@given(size=sizes, smallest=sizes, largest=sizes)
def test_a_bucket_holds_its_size_and_is_one_of_few(size, smallest, largest):
  smallest, size = min(smallest, largest), min(size, largest)
  legal = {min(smallest << i, largest) for i in range(11)}
  width = plan.bucket(size, smallest, largest)
  assert width in legal and size <= width
  assert not any(size <= other < width for other in legal)


@st.composite
def prompts(draw):
  """(tokens, largest); about whole chunks is as likely as anything else."""
  largest = draw(st.integers(1, 200))
  about = st.builds(lambda n, more: n * largest + more, st.integers(1, 4), st.integers(0, 2))
  return draw(st.one_of(sizes, about)), largest


@given(prompts(), st.integers(1, 64))
def test_pieces_cover_the_prompt_in_order(prompt, smallest):
  tokens, largest = prompt
  pieces = plan.chunks(tokens, largest, smallest=smallest)
  end = 0
  for piece in pieces:
    assert piece.start == end and 1 <= piece.count <= piece.width <= largest
    assert piece.width == plan.bucket(piece.count, min(smallest, largest), largest)
    end += piece.count
  assert end == tokens
  assert [piece.more for piece in pieces] == [True] * (len(pieces) - 1) + [False]


@given(prompts())
def test_only_the_first_piece_is_no_whole_one(prompt):
  tokens, largest = prompt
  pieces = plan.chunks(tokens, largest)
  assert all(piece.count == largest for piece in pieces[1:])
  assert pieces[-1].count >= min(tokens, largest), "the decoder sees as much under replay"
  assert len(pieces) == -(-tokens // largest)


def test_a_prompt_a_little_longer_than_a_chunk():
  pieces = plan.chunks(130, 128)
  assert [(piece.start, piece.count, piece.width) for piece in pieces] == [
    (0, 2, 16),
    (2, 128, 128),
  ]
