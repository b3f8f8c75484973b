"""How much a text repeats itself, and how long two texts agree. Plain counting on token ids.

- ``rep(ids, l)``: share of tokens that already stand among the l tokens before them (rep/l of Welleck et al. 2019).
- ``seq_rep(ids, n)``: 1 - unique n-grams / n-grams of one continuation (seq-rep-n, ibid.).
- ``distinct(texts, n)``: unique n-grams / n-grams of all texts together (Li et al. 2016).

Lossless verification can't change any of them by more than a near-tie does: a change means a lossy rule, or a fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Ids = Sequence[int]


@dataclass(frozen=True)
class Agreement:
    """Leading tokens of an output against a reference's.

    equal: leading tokens that are the same. compared: tokens of the shorter of the two; a row with a smaller budget is
    compared as far as it goes. margin: logits between the reference's two best tokens where they first differ.
    """

    equal: int
    compared: int
    margin: float | None = None

    @property
    def share(self) -> float:
        """Share of the compared tokens that lead up to the first difference; 1 where there is none."""
        return self.equal / self.compared if self.compared else 1.0

    @property
    def first_difference(self) -> int | None:
        """Place of the first token that differs, None where none does."""
        return self.equal if self.equal < self.compared else None


def agreement(ids: Ids, reference: Ids, margins: Sequence[float] = ()) -> Agreement:
    """Compare two outputs; `margins` are the reference's, one a token."""
    compared = min(len(ids), len(reference))
    equal = next((i for i in range(compared) if ids[i] != reference[i]), compared)
    return Agreement(equal, compared, margins[equal] if equal < min(compared, len(margins)) else None)


def rep(ids: Ids, window: int) -> float:
    """Share of tokens that already stand among the `window` tokens before them; 0 for an empty text."""
    repeats = sum(ids[i] in ids[max(0, i - window) : i] for i in range(len(ids)))
    return repeats / len(ids) if ids else 0.0


def seq_rep(ids: Ids, n: int) -> float:
    """1 - unique n-grams / n-grams; 0 for a text shorter than n."""
    grams = _ngrams(ids, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Sequence[Ids], n: int) -> float:
    """Unique n-grams / n-grams over all texts; 0 where there are none."""
    grams = [gram for ids in texts for gram in _ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(texts: Sequence[Ids]) -> dict[str, float]:
    """The figures by name: rep-4 and seq-rep-4 as the mean over texts, distinct-1 and distinct-2 over all together."""
    count = max(len(texts), 1)
    return {
        "rep-4": sum(rep(ids, 4) for ids in texts) / count,
        "seq-rep-4": sum(seq_rep(ids, 4) for ids in texts) / count,
        "distinct-1": distinct(texts, 1),
        "distinct-2": distinct(texts, 2),
    }


def _ngrams(ids: Ids, n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
