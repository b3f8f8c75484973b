"""Text to ids and back, the same object whatever file it came from.

`Tokenizer` holds data (the bytes of every id, which ids are special, the ids that end a text) and one function,
`split`, that cuts text into ids; `mtpjax.io.vocab` makes it from a GGUF file or from tokenizer.json.

Decoding is ours in every case, and works on bytes: an id is a string of bytes, a text is their concatenation read as
UTF-8. A library decoder that returns text per id can't be used for streaming, because one character may be spread over
several ids; on bytes, `StreamDecoder` is an incremental UTF-8 decoder and its chunks join to exactly what `decode`
returns. Bytes that are no UTF-8 become U+FFFD in both.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtpjax.errors import UserError
from mtpjax.io.chat import render
from mtpjax.models.fields import shown


@dataclass(frozen=True)
class Tokenizer:
    """Encoder and decoder of one vocabulary.

    split: (text, special) -> ids; `special` turns control tokens written out in the text into their ids.
    pieces: the bytes of each id; an id that the file leaves unused has none.
    special: ids that `decode` leaves out.
    prefix: ids that the file puts before every text (a begin-of-text token, or nothing).
    stop_ids: ids that end an answer: end of text, end of turn.
    dummy_space: the encoder puts a space before the text (SentencePiece), which decoding takes away again.
    template: source of the chat template, None if the file has none.
    """

    split: Callable[[str, bool], list[int]] = field(repr=False)
    pieces: tuple[bytes, ...] = field(repr=False)
    special: frozenset[int] = field(repr=False)
    prefix: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    dummy_space: bool = False
    template: str | None = field(default=None, repr=False)

    @property
    def vocab_size(self) -> int:
        """Number of ids; a model's embedding may have more rows, as padding."""
        return len(self.pieces)

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """Ids of `text`.

        `special`: read control tokens in the text as such (False: as plain characters, for text of unknown origin).
        `bos`: put the file's prefix first; None means yes, unless the text itself starts with it, as text rendered by
        a chat template does. An end-of-text token that some files append isn't: a prompt is there to be continued.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"text {shown(text)} holds half of a surrogate pair, expected valid Unicode") from None
        ids = self.split(text, special)
        if bos is None:
            bos = not self.prefix or tuple(ids[: len(self.prefix)]) != self.prefix
        return [*self.prefix, *ids] if bos else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False) -> str:
        """Text of `ids`. `continuation`: they go on from other text, so a first space is kept (see `dummy_space`)."""
        decoder = self.stream(skip_special, continuation)
        return decoder.push(ids) + decoder.flush()

    def stream(self, skip_special: bool = True, continuation: bool = False) -> "StreamDecoder":
        """A decoder to feed ids as they come; its chunks join to what `decode` would return."""
        return StreamDecoder(self, skip_special, continuation)

    def id_to_bytes(self, token: int) -> bytes:
        """The bytes of one id, special or not. UserError for an id outside the vocabulary."""
        if not 0 <= token < len(self.pieces):
            raise UserError(f"token id {token} is outside the vocabulary of {len(self.pieces)}")
        return self.pieces[token]

    def chat(self, messages: str | Sequence[Mapping[str, Any]], *, answer: bool = True, **variables: Any) -> str:
        """The prompt for a conversation: the file's chat template applied to `messages`.

        A string is one message of the user. `answer` opens the assistant's turn; `variables` go to the template.
        UserError when the file has no template, or the template fails or does something that isn't allowed.
        """
        if self.template is None:
            raise UserError("this model has no chat template; pass the prompt as plain text (without --chat)")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"message {shown(message)} isn't a mapping with a role and a content")
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        texts = {key: "" if i is None else self.pieces[i].decode("utf-8", "replace") for key, i in named.items()}
        plain = [dict(message) for message in messages]
        return render(self.template, {"messages": plain, "add_generation_prompt": answer, **texts, **variables})


class StreamDecoder:
    """Decodes ids as they come, holding back the bytes of a character that isn't complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continuation: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.dummy_space and not continuation

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, possibly "". UserError for an id outside the vocabulary."""
        data = b"".join(self._tokenizer.id_to_bytes(i) for i in ids if i not in self._skip)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: "", or U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)
