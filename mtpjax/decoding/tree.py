"""The shape of a draft: a chain, several candidates, or any static tree. Pure Python on numbers known at compile time.

A window holds the last committed token at offset 0, the root, and the drafted tokens at offsets 1, 2, ... behind it.
`parents` says for each drafted token which offset it follows: a chain is (0, 1, 2, ...), three candidates of depth two
are (0, 0, 0, 1, 2, 3). Nodes stand level by level, so that the first `count` of them are a smaller tree: that is how a
row proposes less than the others.

The whole tree is scored in one target pass: each node sees the committed text, its ancestors and itself (SpecInfer,
2305.09781), and has the position of its level. Rejected: trees that change shape at run time (each shape would be
another mask, another gather and another compiled loop).
"""

from functools import lru_cache

import numpy as np

Parents = tuple[int, ...]


def chain(depth: int) -> Parents:
    """One candidate: each token follows the one before."""
    return tuple(range(depth))


def candidates(count: int, depth: int) -> Parents:
    """`count` chains of `depth` tokens that share nothing but the root."""
    return tuple(0 if level == 0 else (level - 1) * count + i + 1 for level in range(depth) for i in range(count))


def check_parents(parents: Parents) -> None:
    """ValueError unless every node follows an earlier one and nodes stand level by level."""
    if not all(0 <= parent < offset for offset, parent in enumerate(parents, 1)):
        raise ValueError(f"parents is {parents}, expected for each drafted token the offset of an earlier one")
    found = levels(parents)
    if list(found) != sorted(found):
        raise ValueError(f"parents is {parents}, expected nodes level by level; theirs are {found[1:]}")


@lru_cache(maxsize=256)
def levels(parents: Parents) -> tuple[int, ...]:
    """Level of each offset of the window: the root's is 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return tuple(found)


def depth_of(parents: Parents) -> int:
    """Length of the longest path."""
    return max(levels(parents))


def is_chain(parents: Parents) -> bool:
    """Whether there is one candidate only."""
    return parents == chain(len(parents))


def level_ends(parents: Parents) -> np.ndarray:
    """How many nodes the first 0, 1, ... depth levels hold together, int32 [depth + 1]."""
    counts = np.bincount(levels(parents))
    return (np.cumsum(counts) - 1).astype(np.int32)


def children(parents: Parents) -> np.ndarray:
    """Offsets of each offset's children in order, int32 [W, C], padded with 0: the root is nobody's child."""
    W = len(parents) + 1
    found = [[offset for offset in range(1, W) if parents[offset - 1] == node] for node in range(W)]
    table = np.zeros((W, max([1, *map(len, found)])), np.int32)
    for node, kids in enumerate(found):
        table[node, : len(kids)] = kids
    return table


def ancestor_mask(parents: Parents) -> np.ndarray:
    """Which offsets each offset sees: its ancestors and itself, bool [W, W]."""
    W = len(parents) + 1
    mask = np.eye(W, dtype=bool)
    for offset in range(1, W):
        mask[offset] |= mask[parents[offset - 1]]
    return mask
