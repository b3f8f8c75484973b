"""Stop texts: a row ends where its decoded text completes one of them, wherever token and block borders lie.

Tokens do not respect the borders of a text, so the ids are decoded as they come and the text is searched: only the part
that is new, and as much before it as a stop text may reach back.
"""

from collections.abc import Sequence

from mtpjax.errors import UserError
from mtpjax.io.tokenizer import Tokenizer


class StopStrings:
    """Watches the text of each row of a batch.

    Attributes:
        texts: the stop texts.
        watch: what `drive.rounds` is to be given: `look`, or None when there is nothing to look for.
    """

    def __init__(self, tokenizer: Tokenizer, texts: str | Sequence[str], rows: int) -> None:
        self.texts = (texts,) if isinstance(texts, str) else tuple(texts)
        if not all(isinstance(text, str) and text for text in self.texts):
            raise UserError(f"stop is {list(self.texts)!r}, expected texts that are not empty")
        self.watch = self.look if self.texts else None
        self._decoders = [tokenizer.stream(continuation=True) for _ in range(rows)] if self.texts else []
        self._said = [""] * rows
        self._begins: list[int | None] = [None] * rows

    def look(self, row: int, ids: Sequence[int]) -> int | None:
        """How many of a row's new ids there are up to the one that completes a stop text; None if none does."""
        if not self.texts:
            return None
        reach = max(map(len, self.texts)) - 1
        for count, i in enumerate(ids, 1):
            start = max(len(self._said[row]) - reach, 0)
            self._said[row] += self._decoders[row].push([i])
            found = [at for at in (self._said[row].find(text, start) for text in self.texts) if at >= 0]
            if found:
                self._begins[row] = min(found)
                return count
        return None

    def cut(self, row: int, pieces: list[str]) -> list[str]:
        """The pieces of a row's text up to where the stop text begins; as many as before, the last ones empty."""
        left = self._begins[row]
        if left is None:
            return pieces
        kept = []
        for piece in pieces:
            kept.append(piece[:left])
            left -= len(kept[-1])
        return kept

    def safe(self, row: int, text: str) -> int:
        """How much of the text so far can't become part of a stop text."""
        begins = self._begins[row]
        if begins is not None:
            return begins
        heads = (stop[:n] for stop in self.texts for n in range(1, len(stop)))
        return len(text) - max((len(head) for head in heads if text.endswith(head)), default=0)
