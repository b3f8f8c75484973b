"""Adaptive depth: draft as far as pays, judged by each row's own past, over a few compiled widths.

A window costs what its width costs, however many drafts are kept, so depth must be chosen as a width. `Adaptive` holds
several drafters that share one memory and differ in depth; the loop holds a compiled step for each. Before each step
a row estimates, for every depth d on offer, the tokens a step would commit,

    tau(d) = 1 + sum over j <= d of prod over i <= j of r_i,      r_i = accepted at i / offered at i,

and takes the d with the most tokens per cost. The batch runs the widest that a running row asks for; the other rows
propose less, so that a row's output does not depend on its batch-mates.

Lossless, because the choice looks only at steps that are over. A depth that looked at the outcome it stops on would
not be: with p = (.7, .3), q = (.5, .5), verifying a draft of token 0 but throwing a draft of token 1 away, and sampling
p instead, yields (.85, .15).

The counts fade by `KEEP` a step towards an optimistic prior, so that a depth given up is tried again. A place is
offered when the window had it and everything before was accepted, whether or not something was proposed there: a
drafter that is silent costs the same window. Rejected: one depth for the batch from batch means (rows would depend on
each other); a host that picks between compiled loops (a synchronisation a step).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from mtpjax.decoding.drafters.base import Drafter, Memory
from mtpjax.decoding.tree import Parents
from mtpjax.errors import UserError
from mtpjax.records import Leaf

KEEP = 0.9
PRIOR_COUNT = 1.0
PRIOR_RATE = 0.8


@dataclass(frozen=True)
class Adaptive:
    """Drafters of growing depth that share a memory; stands wherever a `Drafter` does.

    Attributes:
        name: for messages and records.
        drafters: by depth, the shallowest first; one of depth 0 drafts nothing.
        costs: of a step with each, relative to one another. They take no part in equality: new costs compile nothing.
    """

    name: str
    drafters: tuple[Drafter, ...]
    costs: tuple[float, ...] = field(compare=False)

    @property
    def depth(self) -> int:
        """The deepest on offer."""
        return self.drafters[-1].depth

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each drafter."""
        return tuple(drafter.depth for drafter in self.drafters)

    @property
    def memory(self) -> Memory:
        """What all of them read."""
        return self.drafters[-1].memory

    @property
    def params_like(self) -> Callable[[], Any] | None:
        """Shapes of the parameters that all of them share."""
        return self.drafters[-1].params_like

    @property
    def shape(self) -> Parents:
        """Parents of the widest window."""
        return self.drafters[-1].shape


def adaptive(
    make: Callable[[int], Drafter], depths: Sequence[int] = (1, 3, 7), costs: Sequence[float] = ()
) -> Adaptive:
    """Adaptive depth over ``make(depth)`` for each of `depths`.

    Args:
        make: from a depth to a drafter, such as `ngram`; all must share one memory.
        depths: windows of depth + 1 tokens; few, since each is compiled. At least one.
        costs: of a step at each depth, in any unit: measure them. Default: 1 + depth / 8.

    Raises:
        UserError: depths that do not grow, drafters without a common memory, costs that are no positive numbers.
    """
    if not depths or list(depths) != sorted(set(depths)) or depths[0] < 1:
        raise UserError(f"depths is {tuple(depths)}, expected growing whole numbers from 1, such as (1, 3, 7)")
    drafters = tuple(make(depth) for depth in depths)
    if any(drafter.memory != drafters[0].memory for drafter in drafters):
        raise UserError("adaptive depth needs drafters that share one memory: make the memory once, outside `make`")
    costs = tuple(costs) or tuple(1 + depth / 8 for depth in depths)
    if len(costs) != len(depths) or not all(cost > 0 for cost in costs):
        raise UserError(f"costs is {costs}, expected a positive number for each of the depths {tuple(depths)}")
    return Adaptive(f"adaptive {drafters[0].name}", drafters, costs)


class Pace(struct.PyTreeNode):
    """What each row has seen of acceptance, fading.

    Attributes:
        costs: f32 [n], of a step with each drafter.
        offered: f32 [B, depth], steps that had each place in their window, with everything before it accepted.
        accepted: f32 [B, depth], of these, steps that accepted it.
    """

    costs: Leaf
    offered: Leaf
    accepted: Leaf


def begin(drafter: Adaptive, batch: int) -> Pace:
    """Nothing seen yet: the prior."""
    prior = jnp.full((batch, drafter.depth), PRIOR_COUNT)
    return Pace(jnp.asarray(drafter.costs, jnp.float32), prior, prior * PRIOR_RATE)


def choose(pace: Pace, depths: Sequence[int]) -> Array:
    """Which of the depths pays most for each row, int32 [B]."""
    reach = jnp.cumprod(pace.accepted / pace.offered, axis=1)
    tokens = 1 + jnp.cumsum(reach, axis=1)
    gain = tokens[:, jnp.asarray(depths) - 1] / pace.costs[None, :]
    return jnp.argmax(gain, axis=1).astype(jnp.int32)


def learn(pace: Pace, window_B: Array, accepted_B: Array) -> Pace:
    """After a step that allowed each row `window` drafts, of which it accepted some; 0 allowed teaches nothing."""
    place = jnp.arange(pace.offered.shape[1])[None, :]
    offered = (place < window_B[:, None]) & (place <= accepted_B[:, None])
    hit = offered & (place < accepted_B[:, None])
    back = (1 - KEEP) * PRIOR_COUNT
    return pace.replace(
        offered=KEEP * pace.offered + back + offered,
        accepted=KEEP * pace.accepted + back * PRIOR_RATE + hit,
    )
