"""How near the result of a kernel must be to that of the plain definition."""

import jax.numpy as jnp
import numpy as np

# A few hundred float32 products, in another order, of values around 1.
TOLERANCE = 5e-6
# One rounding of bfloat16 more or less.
BFLOAT16_TOLERANCE = 2**-7


def close(got, want):
  """Equal integers; floats that differ by at most the tolerance of their dtype."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape and got.dtype == want.dtype
  if not jnp.issubdtype(want.dtype, jnp.floating):
    np.testing.assert_array_equal(got, want)
    return
  tolerance = TOLERANCE if want.dtype == np.float32 else BFLOAT16_TOLERANCE
  got, want = got.astype(np.float32), want.astype(np.float32)
  scale = max(1.0, np.abs(want[np.isfinite(want)]).max(initial=0.0))
  np.testing.assert_allclose(got, want, atol=tolerance * scale, rtol=0)
