"""Mixture of experts: the router, the routed experts, and the two forces that balance them."""

from hysparse_kernels.moe.activation import swiglu
from hysparse_kernels.moe.api import moe
from hysparse_kernels.moe.balance import expert_load, sequence_balance_loss
from hysparse_kernels.moe.matrices import Separate
from hysparse_kernels.moe.router import SCORE_FUNCTIONS, Routing, route

__all__ = [
  "SCORE_FUNCTIONS",
  "Routing",
  "Separate",
  "expert_load",
  "moe",
  "route",
  "sequence_balance_loss",
  "swiglu",
]
