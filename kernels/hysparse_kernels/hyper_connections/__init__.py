"""Residual streams: the coefficients that mix them, the fold into a sublayer and the update."""

from hysparse_kernels.hyper_connections.api import (
  Advanced,
  Coefficients,
  advance,
  coefficients,
  fold,
  update,
)

__all__ = ["Advanced", "Coefficients", "advance", "coefficients", "fold", "update"]
