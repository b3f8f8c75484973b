"""Bytes by kind: weights, scales, KV cache; what was asked for and what was allocated."""

from collections.abc import Sequence

import jax

from mtpjax.decoding.generate import target_of
from mtpjax.io.lm import LM
from mtpjax.quant.policy import ReportRow, precision_report


def memory_report(lm: LM, batch: int, capacity: int) -> list[ReportRow]:
    """Rows of `precision_report` for the parameters and the cache of `batch` rows of `capacity` tokens."""
    target = target_of(lm)
    cache = jax.eval_shape(lambda: target.init_cache(batch, capacity))
    return precision_report(lm.params, cache, asked=lm.precision)


def bytes_by_kind(rows: Sequence[ReportRow]) -> dict[str, int]:
    """Bytes of weights (everything of the model but scales), scales and cache."""
    kinds = {"weights": 0, "scales": 0, "cache": 0}
    for row in rows:
        kinds[row["group"] if row["group"] in kinds else "weights"] += row["bytes"]
    return kinds


def differences(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows that did not get what was asked."""
    return [row for row in rows if row["asked"] != row["got"]]
