"""Groups that begin and end anywhere against pooling the whole sequence at once."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse.cache.groups import PartialGroup, complete, remainder

ROWS, WIDTH = 2, 8  # sequences, and tokens of a call, of which the first ones are valid
complete = jax.jit(complete, static_argnums=4)
remainder = jax.jit(remainder, static_argnums=5)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
  st.sampled_from([2, 3, 5]),
  st.lists(st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)), max_size=6),
)
def test_every_complete_group_comes_out_once_with_its_own_tokens(ratio, calls):
  # Token p of sequence b contributes the number 1000 b + p, and its score is minus that.
  zeros = jnp.zeros((ROWS, ratio - 1, 1))
  partial, length = PartialGroup(zeros, zeros), np.zeros(ROWS, int)
  seen = [{} for _ in range(ROWS)]
  for counts in map(np.asarray, calls):
    positions = length[:, None] + np.arange(WIDTH)
    values = 1000 * np.arange(ROWS)[:, None] + positions
    values = np.where(np.arange(WIDTH) < counts[:, None], values, -7)[..., None]  # padding
    kv = jnp.asarray(values, jnp.float32)
    arguments = (jnp.asarray(x, jnp.int32) for x in (length, counts))
    call, (before, count) = PartialGroup(kv, -kv), arguments
    grouped = complete(partial, call, before, count, ratio)
    # Of the call, its last tokens are enough.
    first = jnp.maximum(count - (ratio - 1), 0)
    at = first[:, None] + jnp.arange(ratio - 1)
    tail = jax.tree.map(lambda x: jnp.take_along_axis(x, at[..., None], axis=1), call)  # noqa: B023
    whole = remainder(partial, call, before, jnp.zeros_like(first), count, ratio)
    partial = remainder(partial, tail, before, first, count, ratio)
    used = np.arange(ratio - 1) < (length + counts)[:, None] % ratio
    np.testing.assert_array_equal(whole.kv_BxRxC[used], partial.kv_BxRxC[used])
    for b in range(ROWS):
      for n in np.flatnonzero(grouped.done_BxN[b]):
        group = int(grouped.ids_BxN[b, n])
        assert group not in seen[b]
        seen[b][group] = np.asarray(grouped.kv_BxNxRxC[b, n, :, 0])
        np.testing.assert_array_equal(grouped.score_BxNxRxC[b, n, :, 0], -seen[b][group])
    length = length + counts
  for b in range(ROWS):
    assert sorted(seen[b]) == list(range(length[b] // ratio))
    for group, tokens in seen[b].items():
      np.testing.assert_array_equal(tokens, 1000 * b + group * ratio + np.arange(ratio))
