"""SentencePiece BPE: the tokenizer of Llama 2, Mistral 7B and llama2.c models (`tokenizer.ggml.model` = llama).

Kudo & Richardson 2018 (1808.06226). Text becomes characters, spaces written as ▁; then, as long as two neighbours
join to a piece of the vocabulary, the pair whose piece has the highest score is joined, the leftmost among equals.
What is left and no piece is written as bytes, each a piece of its own (`<0x0A>`), or as the unknown token.

The scores *are* the merge order, so a BPE with a merge list can't express ties between two ways of making one piece;
hence the forty lines below and not `tokenizers` with a reconstructed list. Cost: O(n log n) by a heap of candidate
pairs over a doubly linked list of symbols; a stale candidate is recognised by the length it was computed for.
"""

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

SPACE: Final = "▁"
BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def spm_splitter(
    scores: Mapping[str, float | int],
    ids: Mapping[str, int],
    byte_ids: Mapping[int, int],
    unknown: int | None,
    always: Mapping[str, int],
    control: Mapping[str, int],
    *,
    dummy_space: bool,
) -> Callable[[str, bool], list[int]]:
    """The `split` function of a `Tokenizer`.

    scores and ids: of the pieces that text may become; byte_ids: id by byte value; `always` and `control`: tokens found
    in the text as they stand, the latter only when asked. `dummy_space`: a space is put before the text and after each
    such token.
    """
    patterns = {False: _alternatives(always), True: _alternatives({**always, **control})}
    named = {**always, **control}

    def split(text: str, special: bool) -> list[int]:
        pattern = patterns[special]
        result: list[int] = []
        for i, part in enumerate(pattern.split(text) if pattern else [text]):
            if i % 2:  # re.split puts the matches of its one group at odd places
                result.append(named[part])
            elif part:
                symbols = merge((" " if dummy_space else "") + part, scores)
                result.extend(_ids_of(symbols, ids, byte_ids, unknown))
        return result

    return split


def _alternatives(tokens: Mapping[str, int]) -> re.Pattern[str] | None:
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def merge(text: str, scores: Mapping[str, float | int]) -> list[str]:
    """The symbols left when no two neighbours join to a piece; spaces come back as ▁."""
    symbols = list(text.replace(" ", SPACE))
    n = len(symbols)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    heap: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < n and (score := scores.get(joined := symbols[left] + symbols[right])) is not None:
            heapq.heappush(heap, (-score, left, right, len(joined)))

    for i in range(n - 1):
        offer(i, i + 1)
    while heap:
        _, left, right, length = heapq.heappop(heap)
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
            continue  # one of the two was joined to something else since
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[left] < n:
            before[after[left]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in symbols if symbol]


def _ids_of(
    symbols: Sequence[str], ids: Mapping[str, int], byte_ids: Mapping[int, int], unknown: int | None
) -> list[int]:
    result: list[int] = []
    for symbol in symbols:
        data = symbol.replace(SPACE, " ").encode() if symbol not in ids else b""
        if symbol in ids:
            result.append(ids[symbol])
        elif all(byte in byte_ids for byte in data):
            result.extend(byte_ids[byte] for byte in data)
        elif unknown is not None:
            result.append(unknown)
    return result
