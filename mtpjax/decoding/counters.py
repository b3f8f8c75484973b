"""Acceptance counters in vLLM's terms, kept in the loop; only emitted tokens count."""

import jax.numpy as jnp
from flax import struct
from jax import Array

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.tree import levels
from mtpjax.decoding.verify.base import Verdict
from mtpjax.records import Leaf


class Counters(struct.PyTreeNode):
    """What speculation did, per row; only emitted tokens count.

    Attributes:
        passes: int32 [B], target passes while the row was running.
        emitted: int32 [B], tokens committed by those passes.
        drafts: int32 [B], passes in which something was proposed.
        drafted: int32 [B], proposed tokens, of all candidates.
        proposed_at: int32 [B, depth], how often something was proposed at each place.
        accepted_at: int32 [B, depth], how often each place was accepted.
        tv_at: f32 [B, depth], sum over the passes that committed a token at each proposed place of its law's total
            variation from the target's; 0 with a lossless rule.
    """

    passes: Leaf
    emitted: Leaf
    drafts: Leaf
    drafted: Leaf
    proposed_at: Leaf
    accepted_at: Leaf
    tv_at: Leaf


def zero_counters(batch: int, depth: int) -> Counters:
    """Nothing counted yet."""

    def zeros(*shape: int) -> Array:
        return jnp.zeros((batch, *shape), jnp.int32)

    tv_at = zeros(depth).astype(jnp.float32)
    return Counters(zeros(), zeros(), zeros(), zeros(), zeros(depth), zeros(depth), tv_at)


def count(counters: Counters, running_B: Array, proposal: Proposal, verdict: Verdict, emitted_B: Array) -> Counters:
    """Add one step; its window may be shallower than the counters."""
    depth = verdict.path.shape[1]
    place = jnp.arange(depth)[None, :]
    proposed = jnp.asarray(levels(proposal.parents))[proposal.count]  # how many places hold a proposal
    kept = jnp.minimum(verdict.accepted, emitted_B)
    tv_at = counters.tv_at
    if verdict.tv is not None:
        committed = jnp.minimum(emitted_B, proposed)  # the bonus has the target's law
        tv_at = tv_at.at[:, :depth].add(jnp.where(place < committed[:, None], verdict.tv, 0.0))
    return Counters(
        passes=counters.passes + running_B,
        emitted=counters.emitted + emitted_B,
        drafts=counters.drafts + (proposal.count > 0),
        drafted=counters.drafted + proposal.count,
        proposed_at=counters.proposed_at.at[:, :depth].add(place < proposed[:, None]),
        accepted_at=counters.accepted_at.at[:, :depth].add(place < kept[:, None]),
        tv_at=tv_at,
    )
