"""Laws computed without the code under test: the processed law by sorting, and the joint law of whole sequences."""

from collections.abc import Sequence

import numpy as np


def processed(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The law of one place in float64, by sorting: temperature, top-k, top-p, min-p. Assumes no ties."""
    if temperature == 0.0:
        return np.eye(len(logits))[np.argmax(logits)]
    z = logits.astype(np.float64) / temperature
    order = np.argsort(-z)
    p = np.exp(z - z.max())
    keep = np.ones(len(z), bool)
    if top_k:
        keep[order[top_k:]] = False
    p = np.where(keep, p, 0)
    if top_p < 1:
        share = np.cumsum(p[order]) / p.sum()
        keep[order[1:][share[:-1] >= top_p]] = False
        p = np.where(keep, p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def sequence_law(
    table: np.ndarray, prompt: Sequence[int], length: int, stop_ids: Sequence[int] = (), **settings: float
) -> np.ndarray:
    """Probability of every output of at most `length` tokens from a table of logits [V, V, V] (see `table_target`).

    Sequences are numbers in base V + 1, first token highest; digit V stands behind a stop id: f64 [(V + 1)^length].
    """
    V = table.shape[0]
    p = np.array([[processed(table[a, b], **settings) for b in range(V)] for a in range(V)])
    law = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for said, chance in law.items():
            if said and (said[-1] == V or said[-1] in stop_ids):
                longer[(*said, V)] = chance
                continue
            before, last = (0, *prompt, *said)[-2:]
            for token in range(V):
                longer[(*said, token)] = chance * p[before, last, token]
        law = longer
    out = np.zeros((V + 1) ** length)
    for said, chance in law.items():
        out[encode(np.array([said]), V)[0]] = chance
    return out


def encode(sequences: np.ndarray, V: int) -> np.ndarray:
    """Sequences int [N, length] of tokens 0..V as numbers in base V + 1."""
    length = sequences.shape[1]
    return sequences @ (V + 1) ** np.arange(length - 1, -1, -1)
