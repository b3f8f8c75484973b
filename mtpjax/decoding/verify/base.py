"""The acceptance-rule seam: one pure function from laws and a draft to what is committed.

A rule for chains is written as its parts (`Chain`): how likely each drafted token is to be kept, how the coins settle
the number accepted, and the law of the next token. `verify` and the exact enumeration of a rule's law both call them,
so what is proved is what runs.

A rule's numbers (a threshold, say) are arguments of the compiled loop, never constants in it: `Rule.settings` takes no
part in equality, so rules that differ in numbers alone are one static argument and share one compiled loop. Rejected:
numbers caught by a closure (a compile for each), and a field for every rule's numbers beside temperature and top-k (a
new rule would change the sampling room).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flax import struct
from jax import Array

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.records import Leaf

Settings = Mapping[str, Array]


class Verdict(struct.PyTreeNode):
    """What a rule decided for each row.

    Attributes:
        accepted: int32 [B], how many drafted tokens are accepted.
        path: int32 [B, depth], the window offsets of the accepted tokens in order; for a chain 1, 2, ...
        next_token: int32 [B], the token the target adds behind them.
        tv: f32 [B, depth], of a lossy rule: at each place, the total variation between the law of the token committed
            there, given that the drafts before it were accepted, and the target's; 0 where nothing was proposed. None
            for a lossless rule.
        logprob: f32 [B, depth + 1], of each token committed, the accepted ones and the next, under the target's law
            before temperature and cuts; the loop fills it in where log-probabilities are asked for, else None.
    """

    accepted: Leaf
    path: Leaf
    next_token: Leaf
    tv: Leaf | None = None
    logprob: Leaf | None = None


@dataclass(frozen=True)
class Chain:
    """The parts of a rule for chains, pure functions of processed laws p f32 [B, W, V] with W = depth + 1.

    Attributes:
        accept: ``(p, proposal, settings) -> f32 [B, depth]``: the chance that each place's coin falls for its token.
        settle: ``bool [B, depth] -> int32 [B]``: from the coins to the number accepted.
        remainder: ``(p, proposal, accepted_B, settings) -> f32 [B, V]``: weights of the next token, not normalised.
        tv: ``(p, proposal, settings) -> f32 [B, depth]``: see `Verdict.tv`; None for a lossless rule.
    """

    accept: Callable[[Array, Proposal, Settings], Array]
    settle: Callable[[Array], Array]
    remainder: Callable[[Array, Proposal, Array, Settings], Array]
    tv: Callable[[Array, Proposal, Settings], Array] | None = None


@dataclass(frozen=True)
class Rule:
    """An acceptance rule; hashable, so that it is a static argument of the compiled loop.

    Attributes:
        name: its key in `RULES`.
        verify: ``(p_BWV, proposal, key_B, settings) -> Verdict``, on processed laws only.
        lossless: whether what it commits has the target's own law; if not, it reports `Verdict.tv`.
        samples: whether it serves rows with a temperature; if not, it is lossless for greedy rows only.
        trees: whether it verifies several candidates; if not, a chain only.
        chain: its parts, if it is a rule for chains made of them.
        settings: its numbers. They reach `verify` as f32 scalars in the state and take no part in equality: a changed
            number compiles nothing.
    """

    name: str
    verify: Callable[[Array, Proposal, Array, Settings], Verdict]
    lossless: bool
    samples: bool
    trees: bool = False
    chain: Chain | None = None
    settings: Mapping[str, float] = field(default_factory=dict, compare=False)
