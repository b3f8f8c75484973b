"""What is asked of `generate`, checked before any work: prompts, settings of each row, and the shapes they need."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.adaptive import Adaptive
from mtpjax.decoding.drafters import DRAFTERS, Drafter, none
from mtpjax.decoding.drafters.params import check_params
from mtpjax.decoding.sampling import GREEDY_BELOW, Law
from mtpjax.decoding.target import Target
from mtpjax.decoding.tree import is_chain
from mtpjax.decoding.verify import RULES, Rule
from mtpjax.errors import UserError

MAX_DEPTH = 64
STOP_SLOTS = 8
CHUNKS = (64, 256)


@dataclass(frozen=True)
class Request:
    """One batch, ready for the loops: host arrays, static choices, and shapes rounded up to buckets.

    Attributes:
        tokens: int32 [B, S], prompts padded on the right; S is a bucket.
        prompt_length: int32 [B].
        limit: int32 [B], largest length of each row.
        law: sampling settings [B].
        stop_ids: int32 [n], padded with -1.
        seed: uint32 [B].
        drafter: the drafter, `none()` for plain decoding.
        rule: the acceptance rule.
        chunk: prompt tokens per prefill pass; divides S.
        max_depth: int32 [B], the deepest draft of each row.
        drafter_params: the drafter's parameters; None for one without.
        logprobs: whether the log-probability of each emitted token is kept.
    """

    tokens: np.ndarray
    prompt_length: np.ndarray
    limit: np.ndarray
    law: Law
    stop_ids: np.ndarray
    seed: np.ndarray
    drafter: Drafter | Adaptive
    rule: Rule
    chunk: int
    max_depth: np.ndarray
    drafter_params: Any = None
    logprobs: bool = False


def make_request(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    drafter: str | Drafter | Adaptive | None = None,
    depth: int | None = None,
    rule: str | Rule = "rejection",
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] = (),
    max_depth: int | Sequence[int] | None = None,
    drafter_params: Any = None,
    logprobs: bool = False,
) -> Request:
    """Check everything a person may get wrong, one line each (`UserError`), and lay the batch out."""
    B = len(prompts)
    if B == 0:
        raise UserError("no prompts were given: pass at least one")
    numbers = settings_per_row(
        B, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    _check_prompts(target, prompts)
    chosen_drafter = find_drafter(drafter, depth)
    chosen_rule = find_rule(rule)
    _check_shape(target, chosen_drafter, chosen_rule)
    wanted = chosen_drafter.params_like
    check_params(chosen_drafter.name, drafter_params, None if wanted is None else wanted())
    deepest = chosen_drafter.depth if max_depth is None else max_depth
    if not chosen_rule.samples and any(t >= GREEDY_BELOW for t in numbers["temperature"]):
        raise UserError(
            f"rule {chosen_rule.name!r} takes the arg-max and cannot sample: set temperature=0, or use rule='rejection'"
        )
    length = np.array([len(p) for p in prompts], np.int32)
    limit = np.minimum(length + np.array(numbers["max_new_tokens"], np.int64), target.max_context).astype(np.int32)
    chunk = CHUNKS[0] if length.max() <= 2 * CHUNKS[0] else CHUNKS[1]
    tokens = np.zeros((B, bucket(int(limit.max()) + len(chosen_drafter.shape) + 1)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    law = Law(
        jnp.asarray(numbers["temperature"], jnp.float32),
        jnp.asarray(numbers["top_k"], jnp.int32),
        jnp.asarray(numbers["top_p"], jnp.float32),
        jnp.asarray(numbers["min_p"], jnp.float32),
    )
    return Request(
        tokens=tokens,
        prompt_length=length,
        limit=limit,
        law=law,
        stop_ids=_stop_array(stop_ids),
        seed=np.array(numbers["seed"], np.uint32),
        drafter=chosen_drafter,
        rule=chosen_rule,
        chunk=chunk,
        max_depth=np.array(_per_row("max_depth", deepest, B, int, 0, 2**31 - 1), np.int32),
        drafter_params=drafter_params,
        logprobs=logprobs,
    )


def _check_shape(target: Target, drafter: Drafter | Adaptive, rule: Rule) -> None:
    """Refuse a tree that the rule or the target's cache can't serve."""
    if is_chain(drafter.shape):
        return
    if not rule.trees:
        able = ", ".join(name for name, known in RULES.items() if known.trees)
        raise UserError(
            f"rule {rule.name!r} verifies one candidate but drafter {drafter.name!r} proposes a tree: "
            f"use candidates=1, or a rule among: {able}"
        )
    if target.keep_path is None:
        raise UserError(
            f"drafter {drafter.name!r} proposes a tree but the target has no keep_path: supply it, or use candidates=1"
        )


def settings_per_row(
    B: int,
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float],
    top_k: int | Sequence[int],
    top_p: float | Sequence[float],
    min_p: float | Sequence[float],
    seed: int | Sequence[int],
) -> dict[str, list]:
    """The numbers of a request, one for each of B rows; needs no model. UserError for one out of range."""
    numbers = {
        "max_new_tokens": _per_row("max_new_tokens", max_new_tokens, B, int, 0, 2**31 - 1),
        "temperature": _per_row("temperature", temperature, B, float, 0.0, 1e6),
        "top_k": _per_row("top_k", top_k, B, int, 0, 2**31 - 1),
        "top_p": _per_row("top_p", top_p, B, float, 0.0, 1.0),
        "min_p": _per_row("min_p", min_p, B, float, 0.0, 1.0),
    }
    if any(p == 0.0 for p in numbers["top_p"]):
        raise UserError("top_p is 0, expected a number above 0 and up to 1 (for greedy decoding set temperature=0)")
    seeds = [seed + row for row in range(B)] if isinstance(seed, int) and not isinstance(seed, bool) else seed
    return numbers | {"seed": _per_row("seed", seeds, B, int, 0, 2**32 - 1)}


def bucket(slots: int) -> int:
    """Capacity for at least `slots`: 256, 512, 768, 1024, 1536, 2048, 3072, ... so that few shapes are compiled.

    Attention reads only what is filled, so a bucket costs memory and not time.
    """
    size = CHUNKS[-1]
    while size < slots:
        if size >= 512 and size * 3 // 2 >= slots:
            return size * 3 // 2
        size *= 2
    return size


def find_drafter(drafter: str | Drafter | Adaptive | None, depth: int | None) -> Drafter | Adaptive:
    """A drafter by name at a depth (3 unless given); None, or depth 0, is plain decoding."""
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= MAX_DEPTH):
        raise UserError(f"depth is {depth!r}, expected a whole number from 0 (plain decoding) to {MAX_DEPTH}")
    if isinstance(drafter, Drafter | Adaptive):
        if depth is not None and depth != drafter.depth:
            raise UserError(f"depth is {depth} but the drafter given was made for {drafter.depth}: leave depth out")
        return drafter
    if drafter is None:
        if depth:
            raise UserError(f"depth is {depth} but no drafter was given: pass drafter='ngram', or depth=0")
        return none()
    if drafter not in DRAFTERS:
        raise UserError(f"unknown drafter {drafter!r}, expected one of: {', '.join(DRAFTERS)}")
    depth = 3 if depth is None else depth
    return DRAFTERS[drafter](depth) if depth else none()


def find_rule(rule: str | Rule) -> Rule:
    """An acceptance rule by name."""
    if isinstance(rule, Rule):
        return rule
    if rule not in RULES:
        raise UserError(f"unknown rule {rule!r}, expected one of: {', '.join(RULES)}")
    return RULES[rule]


def _check_prompts(target: Target, prompts: Sequence[Sequence[int]]) -> None:
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {row} is empty: expected at least one token")
        if len(prompt) > target.max_context:
            raise UserError(
                f"prompt {row} has {len(prompt)} tokens but the model's context is {target.max_context}: shorten it"
            )
        wrong = [i for i in prompt if not 0 <= i < target.vocab_size]
        if wrong:
            raise UserError(f"prompt {row} holds id {wrong[0]}, expected ids from 0 to {target.vocab_size - 1}")


def _per_row(name: str, value, B: int, kind: type, low: float, high: float) -> list:
    values = [value] * B if isinstance(value, int | float) or not isinstance(value, Sequence) else list(value)
    if len(values) != B:
        raise UserError(f"{name} has {len(values)} values for {B} prompts: pass one number, or one for each prompt")
    accepted = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    wanted = "a whole number" if kind is int else "a number"
    for v in values:
        if isinstance(v, bool) or not isinstance(v, accepted) or math.isnan(v) or not low <= v <= high:
            raise UserError(f"{name} is {v!r}, expected {wanted} from {low:g} to {high:g}")
    return [kind(v) for v in values]


def _stop_array(stop_ids: Sequence[int]) -> np.ndarray:
    unique = sorted(set(stop_ids))
    if any(isinstance(i, bool) or not isinstance(i, int | np.integer) or i < 0 for i in unique):
        raise UserError(f"stop_ids is {list(stop_ids)!r}, expected token ids, whole numbers from 0")
    slots = STOP_SLOTS * max(1, -(-len(unique) // STOP_SLOTS))
    return np.array(unique + [-1] * (slots - len(unique)), np.int32)
