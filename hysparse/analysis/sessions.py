"""How many sessions fit on a machine.

    capacity("configs/v41_flash.py", devices=16, hbm=80e9, contexts={32_768: 0.9, 1_048_576: 0.1})

Weights are spread over all devices; Engram tables are in host memory. A session is whole on one
device (on `replicas` of them, if attention is tensor parallel), and its cache is what
`table.footprint` counts: everything resident, with the padding of its last page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hysparse_kernels.arguments import whole

from hysparse import config as config_lib
from hysparse import parameters
from hysparse.analysis import units
from hysparse.analysis.frames import frame
from hysparse.analysis.table import footprint
from hysparse.footprint.kept import Kept
from hysparse.footprint.read import Precision, Source, read

if TYPE_CHECKING:
  import pandas

  from hysparse.analysis.look import Plot

_RESERVE = 0.1


@dataclasses.dataclass(frozen=True)
class Capacity:
  """Sessions on a machine.

  Attributes:
    model: the model.
    devices, hbm: how many, and bytes of memory of each.
    replicas: devices that hold the same sessions.
    weights: bytes of all weights on the devices.
    host: bytes of weights in host memory.
    reserve: share of each device's memory that is left for activations and the rest.
    shares: of the sessions, by their context in tokens; they sum to 1.
    session: resident bytes of a session of each context, on one device.
  """

  model: Kept
  devices: int
  hbm: float
  replicas: int
  weights: float
  host: float
  reserve: float
  shares: dict[int, float]
  session: dict[int, int]

  @property
  def room(self) -> float:
    """Bytes of a device that are left for sessions."""
    return max(0.0, self.hbm * (1 - self.reserve) - self.weights / self.devices)

  @property
  def mean(self) -> float:
    """Bytes of a session, by the shares."""
    return sum(share * self.session[context] for context, share in self.shares.items())

  @property
  def sessions(self) -> int:
    """Sessions of this mix that fit; 0 if the longest alone is too large for a device."""
    if self.room < max(self.session.values()):
      return 0
    return int(self.room / self.mean) * (self.devices // self.replicas)

  @property
  def tokens(self) -> int:
    """Tokens of context that all of these sessions have."""
    return int(self.sessions * sum(share * n for n, share in self.shares.items()))

  @property
  def frame(self) -> pandas.DataFrame:
    rows = [
      {
        "context": context,
        "share": share,
        "bytes_a_session": self.session[context],
        "sessions": round(self.sessions * share),
        "sessions_if_all_were": int(self.room / self.session[context])
        * (self.devices // self.replicas),
      }
      for context, share in self.shares.items()
    ]
    return frame(rows, "context")

  def __str__(self) -> str:
    return (
      f"{self.model.name} on {self.devices} x {units.size(self.hbm)}: weights"
      f" {units.size(self.weights / self.devices)} a device"
      + (f" ({units.size(self.host)} in host memory)" if self.host else "")
      + f", {self.reserve:.0%} kept free, {units.size(self.room)} for sessions of"
      f" {units.size(self.mean)}: {self.sessions:,} sessions, {self.tokens:,} tokens"
    )

  __repr__ = __str__

  def _repr_html_(self) -> str:
    formats = {"share": "{:.1%}".format, "bytes_a_session": "{:,}".format}
    return f"<p>{self}</p>" + self.frame.to_html(border=0, formatters=formats)

  def plot(self) -> Plot:
    """What fills a device, and sessions against the context they all would have."""
    from hysparse.analysis import look

    figure = look.figure(10, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    parts = {
      "weights": (self.weights / self.devices, look.GREY),
      "kept free": (self.hbm * self.reserve, look.LIGHTER),
      "sessions": (self.room, look.LIGHT),
    }
    start = 0.0
    for name, (size, colour) in parts.items():
      left.bar([0], [size], bottom=start, color=colour, width=0.9)
      left.text(0, start + size / 2, f"{name}: {units.size(size)}", ha="center", va="center")
      start += size
    left.set_xticks([0], [f"one device of {units.size(self.hbm)}"])
    look.byte_axis(left)
    left.set_ylabel("bytes")
    left.set_title("what fills it", fontsize="medium")

    longest = self.model.max_positions or 1 << 20
    contexts = [n for n in (1 << power for power in range(12, 21)) if n <= longest]
    devices = self.devices // self.replicas
    fit = [int(self.room / _session(self.model, n)) * devices for n in contexts]
    right.plot(
      contexts, [n or None for n in fit], "o-", color=look.GREY, label="if all had so many tokens"
    )
    mean = sum(share * n for n, share in self.shares.items())
    label = f"{self.sessions:,} of {units.tokens(mean)} tokens" + (
      " on average, as asked" if len(self.shares) > 1 else ""
    )
    right.plot([mean], [self.sessions], "D", color=look.BLACK, label=label)
    look.context_axis(right, contexts)
    right.set_yscale("log")
    right.set_ylim(bottom=0.5)
    right.set_ylabel(f"sessions on {self.devices} devices")
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    return look.Plot(figure)


def capacity(
  config_or_path: Source,
  *,
  devices: int,
  hbm: float,
  contexts: int | Mapping[int, float],
  weights: float | None = None,
  reserve: float = _RESERVE,
  replicas: int = 1,
  precision: Precision = None,
  page: int | None = None,
) -> Capacity:
  """Counts sessions of these contexts.

  Args:
    config_or_path, precision, page: as in `table.footprint`.
    devices: that share the weights.
    hbm: bytes of memory of each.
    contexts: tokens of every session, or the share (or number) of sessions by their tokens.
    weights: bytes of the weights on all devices together. By default those of the released form of
      our models; other families' must be given.
    reserve: share of the memory that sessions do not get.
    replicas: devices that hold the same sessions; must divide `devices`.

  Raises:
    ConfigError: an argument that does not fit, or weights that fill the devices.
  """
  model = read(config_or_path, precision=precision, page=page)
  for name, value in (("devices", devices), ("replicas", replicas)):
    whole(name, value, error=config_lib.ConfigError)
  if devices % replicas:
    raise config_lib.ConfigError(f"replicas: is {replicas}; must divide devices ({devices})")
  _number("hbm", hbm, above=0)
  _number("reserve", reserve, least=0, below=1)
  if weights is not None:
    _number("weights", weights, least=0)
  mix = {contexts: 1.0} if isinstance(contexts, int) else contexts
  if not isinstance(mix, Mapping):
    raise config_lib.ConfigError(f"contexts: is {contexts!r}; must be tokens, or shares by tokens")
  for context, share in mix.items():
    _number(f"contexts: the share of {context}", share, least=0)
  if not sum(mix.values()):
    raise config_lib.ConfigError(f"contexts: is {contexts!r}; needs a share above 0")
  total = sum(mix.values())
  host = 0.0
  if weights is None:
    weights, host = weight_bytes(model)
  result = Capacity(
    model, devices, hbm, replicas, weights, host, reserve,
    shares={context: share / total for context, share in mix.items()},
    session={context: _session(model, context) for context in mix},
  )  # fmt: skip
  if not result.room:
    raise config_lib.ConfigError(
      f"devices: weights take {units.size(weights / devices)} of each; {units.size(hbm)} with"
      f" {reserve:.0%} kept free leave nothing for sessions"
    )
  return result


def _number(name, value, *, least=-math.inf, above=-math.inf, below=math.inf) -> None:
  """
  Raises:
    ConfigError: no finite number of this range.
  """
  real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  if real and least <= value < below and value > above:
    return
  low = f"above {above}" if above > -math.inf else f"{least} or more"
  high = f" and below {below}" if below < math.inf else ""
  raise config_lib.ConfigError(f"{name}: is {value!r}; must be a number, {low}{high}")


def weight_bytes(model: Kept) -> tuple[float, float]:
  """Bytes of one of our models as it is released: on devices, and in host memory (Engram tables).

  A model that the released form cannot hold counts two bytes a parameter.

  Raises:
    ConfigError: another family's model.
  """
  if model.config is None:
    raise config_lib.ConfigError(
      f"weights: are not counted for {model.name} ({model.family}): give their bytes"
    )
  # Imported here, because it brings jax with it.
  from hysparse.conversion import tensors

  try:
    sizes = [
      (t.leaf.path.endswith("engram/table"), t.nbytes) for t in tensors.tensors(model.config)
    ]
  except config_lib.ConfigError:
    counts = parameters.parameters(model.config)
    sizes = [(part == "engram_tables", 2 * count) for part, count in counts.items()]
  host = sum(size for table, size in sizes if table)
  return sum(size for _, size in sizes) - host, host


def _session(model: Kept, context: int) -> int:
  return footprint(model, context=context).tier("resident")
