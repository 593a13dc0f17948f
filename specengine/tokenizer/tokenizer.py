"""The tokenizer: it encodes text and chat messages, and decodes token ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from specengine.tokenizer.backend_limits import check_growth, library_errors
from specengine.tokenizer.chat_template import CHAT_FORMATS, ChatTemplate, format_for_name
from specengine.tokenizer.detokenizer import Detokenizer, PieceDecoder
from specengine.tokenizer.folder_vocab import has_vocabulary, read_folder_vocabulary
from specengine.tokenizer.gguf_vocab import read_gguf_vocabulary
from specengine.tokenizer.vocabulary import Vocabulary

_SHORT = 10_000  # characters, which take about 6 ms


class Tokenizer:
    """Encodes and decodes text for any model file. Make one with `from_folder`, `find` or `from_gguf`.

    vocab_size: one more than the highest token id; the model's embedding may have more rows.
    eos_token_ids: tokens that end a text or a chat turn.
    A model without a chat template gets a built-in format if its name implies one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        self._source = vocabulary.source
        self.vocab_size: int = vocabulary.size
        self.bos_token_id: int | None = vocabulary.bos_token_id
        self.eos_token_ids: tuple[int, ...] = vocabulary.eos_token_ids
        for part in (self._backend.normalizer, self._backend.decoder):
            check_growth(part, self._source)
        self._prefix, self._suffix = self._frame_ids(vocabulary)
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: (token.content, token.special) for token_id, token in added.items()}
        # A token that is matched in normalised text takes the space that the normaliser put before it.
        self._matched = {token_id: self._normalized(token) for token_id, token in added.items()}
        self._decoder = PieceDecoder.from_backend(self._backend.decoder, self._source)
        self._pieces: dict[int, bytes] = {}

        template, special = vocabulary.chat_template, vocabulary.special_tokens
        self._template: ChatTemplate | None = None
        self._template_problem = ""
        # A template of a model contains BOS. The built-in formats do not, so the tokenizer adds it.
        self._chat_prefix: list[int] = self._prefix if template is None else []
        if template is not None:
            try:
                self._template = template.compile(special)
            except ValueError as error:  # stops chats alone
                self._template_problem = str(error)
        elif chat_format := format_for_name(vocabulary.model_name):
            self._template = ChatTemplate(CHAT_FORMATS[chat_format], f"chat format {chat_format!r}", special)

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> Tokenizer:
        """Reads a model folder: tokenizer.json, or else tokenizer.model, and the configs beside it.

        Raises FileNotFoundError if there is no tokenizer, and ValueError naming a corrupt or unsupported file.
        """
        return cls(read_folder_vocabulary(Path(path)))

    @classmethod
    def find(cls, path: str | PathLike[str]) -> Tokenizer | None:
        """Reads a model folder like `from_folder`, but returns None for a folder without a tokenizer."""
        folder = Path(path)
        if folder.is_dir() and not has_vocabulary(folder):
            return None
        return cls.from_folder(folder)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer of a GGUF file.

        metadata: GGUF keys with Python values; arrays are lists.
        Raises ValueError naming the key that is missing, malformed or unsupported.
        """
        return cls(read_gguf_vocabulary(metadata))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's template or a built-in format; None without any, and for a template that is not valid."""
        return self._template

    @property
    def has_chat_template(self) -> bool:
        """Returns whether chats have a template: the model's, even if it is not valid, or a built-in format."""
        return self._template is not None or bool(self._template_problem)

    @property
    def added_tokens(self) -> Mapping[int, tuple[str, bool]]:
        """Texts of the tokens that are matched before a text is split, by id, and whether each is special."""
        return self._added

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. Special tokens that are spelled out in it are recognised.

        add_special_tokens: adds the ids that the model expects around a text, usually BOS.
        Raises ValueError naming `text` if it is not a string of valid Unicode.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text has an unpaired surrogate at character {error.start}") from None
        with library_errors(f"text: {self._source} cannot encode it"):
            ids = self._encode(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decodes token ids. Bytes that are not UTF-8 become U+FFFD; ids without an entry become nothing."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.feed(ids) + detokenizer.finish()

    def detokenizer(self, skip_special_tokens: bool = True, hidden: Collection[int] = ()) -> Detokenizer:
        """Makes an incremental decoder for one text.  hidden: ids that have no text in any case."""
        piece = self._visible_piece if skip_special_tokens else self._piece
        if hidden:
            return Detokenizer(lambda token: b"" if token in hidden else piece(token), self._decoder.strip_spaces)
        return Detokenizer(piece, self._decoder.strip_spaces)

    def token_text(self, token_id: int) -> str:
        """Returns one token for display, with special tokens spelled out and U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, possibly a part of a character, with special tokens spelled out."""
        return self._piece(index(token_id))

    def first_difference(self, other: Tokenizer, count: int) -> int | None:
        """Returns the lowest shared id below `count` whose text differs in the other tokenizer, or None."""
        ours = self.entries()
        theirs = other.entries()
        shared = sorted(i for i in ours.keys() & theirs.keys() if i < count)
        return next((i for i in shared if ours[i] != theirs[i] and self.token_bytes(i) != other.token_bytes(i)), None)

    def entries(self) -> dict[int, str]:
        """Returns the vocabulary's entries by id, in the spelling of the file."""
        return {token_id: token for token, token_id in self._backend.get_vocab().items()}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt text of a conversation of `role` and `content` dicts. See ChatTemplate.render.

        Raises ValueError if there is no chat template, if it is not valid or fails, or if `messages[i]` is malformed.
        """
        if self._template is None:
            raise ValueError(self._template_problem or f"{self._source}: no chat template; give a plain prompt")
        return self._template.render(messages, add_generation_prompt, tools, variables, continue_final_message)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Encodes the text of `render_chat`. Special tokens are recognised, and BOS occurs only once."""
        text = self.render_chat(messages, add_generation_prompt, tools, variables, continue_final_message)
        ids = self.encode(text, add_special_tokens=False)
        prefix = self._chat_prefix
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def _encode(self, text: str) -> list[int]:
        if len(text) <= _SHORT:
            return self._backend.encode(text, add_special_tokens=False).ids
        # encode() keeps the interpreter's lock, a batch gives it to other threads, and leaves out offsets
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def _visible_piece(self, token_id: int) -> bytes:
        entry = self._added.get(token_id)
        return b"" if entry is not None and entry[1] else self._piece(token_id)

    def _read_piece(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"ids must be token ids, got {token_id}")
        if token_id in self._matched:
            content = self._matched[token_id]
            # Added tokens are plain text, even in a byte-level vocabulary.
            return content.encode("utf-8") if self._decoder.byte_level else self._decoder(content)
        token = self._backend.id_to_token(token_id) if token_id < self.vocab_size else None
        return b"" if token is None else self._decoder(token)

    def _normalized(self, token: AddedToken) -> str:
        normalizer = self._backend.normalizer
        if normalizer is None or not token.normalized:
            return token.content
        with library_errors(f"{self._source}: added token {token.content!r}"):
            return normalizer.normalize_str(token.content)

    def _frame_ids(self, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
        """Returns the ids before and after a text: from the configs if they decide, else from the backend."""
        with library_errors(f"{self._source}: cannot encode a letter"):
            bare, framed = (self._backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
        places = (at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        # A vocabulary may lack the letter; then all ids count as prefix, because BOS is likelier than EOS.
        start = next(places, 0) if bare else len(framed)
        prefix, suffix = framed[:start], framed[start + len(bare) :]
        if vocabulary.add_bos is not None:
            prefix = self._special("bos", vocabulary.bos_token_id) if vocabulary.add_bos else []
        if vocabulary.add_eos is not None:
            eos = next(iter(vocabulary.eos_token_ids), None)
            suffix = self._special("eos", eos) if vocabulary.add_eos else []
        return prefix, suffix

    def _special(self, name: str, token_id: int | None) -> list[int]:
        if token_id is None:
            raise ValueError(f"{self._source}: add_{name}_token is true but there is no {name} token")
        return [token_id]
