"""Tokenizes conversations and finds the spans that the assistant wrote.

A Hugging Face tokenizer's chat template renders the text. The assistant's turns are located by the template's
``{% generation %}`` marks, or by rendering the conversation up to each turn (`ray_ulysses.data.tokenize.turns`).
Messages of weight 0 are not supervised.

A conversation's tools are passed to the template. If the rendered text is the same without the tools, the conversation
is refused: the model would learn tool calls without the definitions that they depend on.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.sources.rows import WEIGHT, RowError, strings
from ray_ulysses.data.tokenize.chat_template import ChatTemplate, Messages, Tools
from ray_ulysses.data.tokenize.dividing import unwritable_text_refused
from ray_ulysses.data.tokenize.options import EncodingOptions, TrainOn
from ray_ulysses.data.tokenize.spans import EncodedDocument, Int64Array
from ray_ulysses.data.tokenize.turns import (
    REASONING,
    WrittenChat,
    assistant_turns,
    has_quoted_arguments,
    marked_turns,
    other_arguments,
    written_turns,
)
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as RustTokenizer

_BYTE_ROLES = ("system", "user", "assistant", "tool")
_TOOLS_HINT = "leave --tools-field out, or use a tokenizer whose chat template writes them"
# Maps Unicode planes 0 and 1 to the private-use planes 15 and 16.
_SHIFT, _NUM_MOVED, _NUM_CODES = 0xF0000, 0x20000, 0x110000
# Some templates render any role between "<|" and "|>". Only these roles may form a special token in this way.
_ROLES = frozenset(
    (
        *("system", "developer", "user", "assistant", "model", "tool", "function", "observation", "ipython"),
        *("environment", "tool_call", "tool_response"),
    )
)
# Transformers copies the reasoning field to its alternative names before rendering.
_FIELDS = frozenset(("role", "content", WEIGHT, *REASONING))
_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))
_WORD = re.compile(r"[\w.-]+")


class _ForgedTokenError(RowError):
    """Raised if text in a conversation would become a special token; no other form of its tool calls is tried."""


class ByteChat:
    r"""The chat format of the byte tokenizer.

    Each message is encoded as the role, a line feed, the content, and the end token, which no text can spell:
    ``user\nHello<256>assistant\nHi<256>``. Assistant contents and their end tokens are supervised. The roles are
    system, user, assistant and tool.

    Attributes:
        fingerprint: Hash that changes whenever the same conversation would produce different tokens.
        description: How turns are found and which are supervised, for the summary that ``prepare`` prints.
        template: Text of the chat template; None, because bytes need no template.
    """

    def __init__(self, end_token_id: int, options: EncodingOptions | None = None) -> None:
        """Set the token that ends a message; raise UserError for options that require a chat template."""
        options = options or EncodingOptions()
        for name in options.chat_settings:
            if name != "train_on":
                raise UserError(
                    f"--{name.replace('_', '-')}: --tokenizer=bytes has its own chat format; remove the option"
                )
        self._end = np.array([end_token_id], dtype=np.int64)
        self._train_on = options.train_on
        self.fingerprint = "bytes-chat-v1" + ("" if options.train_on == "all" else f"-{options.train_on}")
        self.description = f"as bytes; {_LEARNED[options.train_on]}"
        self.template = None

    def encode(self, messages: Messages, tools: Tools = ()) -> list[EncodedDocument]:
        """Tokenize a conversation; raise RowError if it has tools, unknown roles, or messages without content."""
        if tools:
            raise RowError(f"the byte tokenizer can't encode tools; {_TOOLS_HINT}")
        learned = learned_turns(messages, self._train_on)
        parts: list[NDArray[np.int64]] = []
        starts, stops, at = [], [], 0
        for number, message in enumerate(messages):
            role, content = message["role"], message.get("content")
            if role not in _BYTE_ROLES:
                raise RowError(f"message {number} has role '{role}'; byte chats support only {', '.join(_BYTE_ROLES)}")
            if content is None:
                raise RowError(f"message {number} ({role}) has no content")
            if lost := next((name for name in ("tool_calls", *REASONING) if message.get(name)), None):
                raise RowError(f"message {number} ({role}): the byte tokenizer can't encode {lost}")
            header, body = (np.frombuffer(text.encode(), np.uint8) for text in (f"{role}\n", content))
            parts += [header.astype(np.int64), body.astype(np.int64), self._end]
            if number in learned:
                starts.append(at + header.size)
                stops.append(at + header.size + body.size + 1)
            at += header.size + body.size + 1
        return [
            EncodedDocument(
                ids=np.concatenate(parts),
                starts=np.array(starts, np.int64),
                stops=np.array(stops, np.int64),
                turn_ends=frozenset(self._end.tolist()) if starts else frozenset(),
            )
        ]


class TemplateChat:
    """The chat format defined by a Hugging Face tokenizer's chat template.

    Args:
        template: The chat template.
        tokenizer: The tokenizer. This class modifies its settings.
        special: Special tokens by id.
        eos_token_id: Id of the end-of-sequence token.
        options: Settings for finding and supervising turns.
        frame: Non-special tokens, by id, that begin or end documents. Texts must not contain these tokens either.
        unknown: Id of the unknown token, or None.

    Raises:
        UserError: ``turns=marks`` is set, but the template has no marks.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: RustTokenizer,
        special: dict[int, str],
        eos_token_id: int,
        options: EncodingOptions,
        frame: Mapping[int, str],
        unknown: int | None,
    ) -> None:
        self._template, self._tokenizer, self._options = template, tokenizer, options
        self._refused = {**special, **frame}
        # Unknown tokens in a text are harmless, unless the same token also begins or ends documents.
        self._traced = {one for one in self._refused if one != unknown or one == eos_token_id or one in frame}
        self._placeholders = _Placeholders(template.names, template.literals, self._refused.values())
        # The template itself may write special tokens. Messages that spell a special token are refused.
        self._tokenizer.encode_special_tokens = False
        self._eos_token_id = eos_token_id
        turns = options.turns
        if turns == "auto":
            turns = "marks" if template.has_marks else "split"
        found = _FOUND[turns]
        if options.turns == "auto" and template.has_marks:
            found += ", or by rendering up to each turn where the marks omit a part of it"
        if turns == "marks" and not template.has_marks:
            raise UserError(
                "--turns=marks: the chat template has no {% generation %} marks; use a template that has them "
                "(--chat-template), or --turns split, which finds the turns by rendering"
            )
        self._turns = turns
        digest = hashlib.sha256(template.source.encode()).hexdigest()[:32]
        self.fingerprint = stable_hash([digest, options.turns, options.train_on])
        self.description = f"{found}; {_LEARNED[options.train_on]}"
        self.template = template.source

    def encode(self, messages: Messages, tools: Tools = ()) -> list[EncodedDocument]:
        """Tokenize a conversation into one document, or into several if its turns require separate texts.

        Raises:
            RowError: Text would become a special token, or the template refuses the conversation or omits its tools.
        """
        self._refuse_forgery(messages, tools)
        forms = [messages, *other_arguments(messages)]
        refused: RowError | None = None
        for form in forms:
            try:
                if form is forms[-1] or not has_quoted_arguments(form, self._template.render(form, tools)):
                    return self._written(form, tools)
            except _ForgedTokenError:
                raise
            except RowError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _written(self, messages: Messages, tools: Tools) -> list[EncodedDocument]:
        learned = learned_turns(messages, self._options.train_on)
        render = partial(self._template.render, tools=tools)
        special = list(self._refused.values())
        if tools and render(messages) == self._template.render(messages, ()):
            raise RowError(f"the chat template omits the tools; {_TOOLS_HINT}")
        tokens = partial(self._tokens, messages=messages, tools=tools)
        by_rendering = partial(written_turns, messages, learned, render, special=special)
        if self._turns == "marks":
            marked = partial(self._template.render_marked, tools=tools)
            try:
                written = marked_turns(messages, learned, render, marked, special)
            except RowError:
                if self._options.turns != "auto":
                    raise
            else:
                return [tokens(written, has_marks=True)]
        return [tokens(one) for one in by_rendering(must_be_whole=self._turns == "whole")]

    def _tokens(
        self, written: WrittenChat, *, messages: Messages, tools: Tools, has_marks: bool = False
    ) -> EncodedDocument:
        encoding = self._encode(written.text)
        # Each access to ids or offsets builds a list of all elements.
        ids = np.asarray(encoding.ids, dtype=np.int64)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        self._refuse_forged_tokens(written, ids, offsets, messages, tools)
        is_special = np.isin(ids, [*self._refused])
        spans: list[tuple[int, int]] = []
        ends: list[int | None] = []
        for first, last in written.ranges:
            # A span contains the tokens that begin in the range, and the token that contains the range's first
            # character.
            begin = int(np.searchsorted(offsets[:, 1], first, side="right"))
            end = int(np.searchsorted(offsets[:, 0], last, side="left"))
            if not has_marks and begin < end and is_special[begin] and offsets[begin, 0] < first:
                # The generation prompt's last token includes white space that belongs to the turn.
                begin += 1
            if begin >= end:
                continue
            marker = _turn_end(is_special, offsets, written.text, begin, end, last, has_marks=has_marks)
            if marker == end and not written.whole_turns and ids[end] != self._eos_token_id:
                marker = None
            # The line feed that a template writes after an end token is not supervised unless the template marks it.
            end = end if marker is None else max(end, marker + 1) if has_marks else marker + 1
            # The previous span may already include an end token that the template marks separately.
            begin = max(begin, spans[-1][1]) if spans else begin
            if begin < end:
                spans.append((begin, end))
                ends.append(marker)
        starts, stops = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        is_open = np.array([marker is None for marker in ends], np.bool_)
        is_open[:-1] &= stops[:-1] != starts[1:]
        return EncodedDocument(
            ids=ids,
            starts=starts,
            stops=stops,
            turn_ends=frozenset(int(ids[marker]) for marker in ends if marker is not None),
            num_open=int(is_open.sum()),
            ends_open=bool(is_open.size and is_open[-1] and stops[-1] == ids.size),
        )

    def _encode(self, text: str) -> Encoding:
        with unwritable_text_refused(text):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def _refuse_forgery(self, messages: Messages, tools: Tools) -> None:
        named = [(f"message {number} ({message['role']})", message) for number, message in enumerate(messages)]
        for name, value in [*named, *((f"tool {number}", tool) for number, tool in enumerate(tools))]:
            for text in strings(value):
                for token in self._refused.values():
                    if token in text:
                        raise RowError(f"{name} contains the text of the special token '{token}'")

    def _refuse_forged_tokens(
        self, written: WrittenChat, ids: Int64Array, offsets: Int64Array, messages: Messages, tools: Tools
    ) -> None:
        """Refuse special tokens that the template or the tokenizer forms from the conversation's strings."""
        text, places = written.text, np.flatnonzero(np.isin(ids, [*self._traced]))
        meant = [(int(ids[place]), int(offsets[place, 0]), int(offsets[place, 1])) for place in places]
        for token_id, first, last in meant:
            token = self._refused[token_id]
            if text[first:last].strip() != token.strip():
                # The tokenizer's normalizer created the special token.
                raise RowError(f"'{text[first:last]}' is tokenized as the special token '{token}'")
        forged = self._first_forged(written, meant, messages, tools)
        if forged is not None:
            token = self._refused[forged]
            raise _ForgedTokenError(f"the chat template turns text into the special token '{token}'")

    def _first_forged(
        self, written: WrittenChat, meant: list[tuple[int, int, int]], messages: Messages, tools: Tools
    ) -> int | None:
        """Return the first special token that depends on the conversation's strings, or None.

        Such a token changes when placeholders replace the strings. ``meant`` lists each special token in the text with
        the index of its first character and the index after its last character.
        """
        text, plain = written.text, _shown(written.text)

        def shadow_of(chat: tuple[Messages, Tools]) -> str:
            return written.with_others(chat[0], partial(self._template.render, tools=chat[1]))

        def changed(shadow: str) -> int | None:
            return next((one for one, first, last in meant if shadow[first:last] != text[first:last]), None)

        for chat in self._placeholders.hide_words(messages, tools):
            with suppress(RowError):
                shadow = shadow_of(chat)
                if _shown(shadow) == plain and (forged := changed(shadow)) is not None:
                    return forged
        hidden = []
        for kept in self._placeholders.kept_inside:
            chat = self._placeholders.hide(messages, tools, kept)
            with suppress(RowError):
                shadow = shadow_of(chat)
                if _shown(shadow) == plain:
                    return changed(shadow)
                hidden.append(chat)
        if not hidden:
            raise RowError(
                "the chat template rejects placeholder strings, so forged special tokens would go undetected"
            )
        # The template writes placeholders differently, for example escaped. Compare only the sequence of special
        # tokens.
        own, forged = self._specials(written, messages, tools), None
        for chat in hidden:
            pairs = zip_longest(own, self._specials(written, *chat))
            forged = next((one if one is not None else other for one, other in pairs if one != other), None)
            if forged is None:
                return None
        return forged

    def _specials(self, written: WrittenChat, messages: Messages, tools: Tools) -> list[int]:
        """Return the special tokens in the text's pieces when the pieces are rendered from the given messages."""
        texts = [self._template.render(messages[:stop], tools, asks=asks) for stop, asks, _ in written.pieces]
        ids = [one for text in texts for one in self._encode(text).ids]
        return [one for one in ids if one in self._traced]


ChatFormat = ByteChat | TemplateChat
"""A tokenizer's chat format."""

_FOUND = {
    "marks": "turns found by the template's marks",
    "split": "turns found by rendering up to each turn",
    "whole": "turns found by rendering up to each turn, only where one text contains all turns",
}
_LEARNED: dict[TrainOn, str] = {"all": "all assistant turns are supervised", "last": "the last turn is supervised"}


def _turn_end(
    is_special: NDArray[np.bool_], offsets: Int64Array, text: str, begin: int, end: int, last: int, *, has_marks: bool
) -> int | None:
    """Return the index of the special token that ends a turn, or None if no special token ends the turn.

    The end token may lie outside the template's marks, or may be the token that begins the next message. Without marks,
    white space between the turn and its end token is supervised too.
    """
    special = np.flatnonzero(is_special[begin:end]) + begin
    if special.size and not text[offsets[special[-1], 1] : last].strip():
        return int(special[-1])
    if is_special[end - 1]:
        return None
    while not has_marks and end < is_special.size and not is_special[end] and text[slice(*offsets[end])].isspace():
        end += 1
    return end if end < is_special.size and is_special[end] else None


def learned_turns(messages: Messages, train_on: TrainOn) -> Sequence[int]:
    """Return the indices of the assistant messages to supervise: all with a nonzero weight, or the last of these."""
    turns = [number for number in assistant_turns(messages) if messages[number].get(WEIGHT) != 0]
    return turns if train_on == "all" else turns[-1:]


class _Placeholders:
    """Replaces a conversation's strings with placeholders, to find which rendered characters come from the strings.

    A placeholder has one private-use character per character of its string, so a template that copies, cuts or joins
    strings renders a text of the same length. The characters that differ between the two texts come from the strings.

    Strings that a template compares with constants are kept: keys, and words that are an entire string, such as the
    type ``string`` in a JSON schema. ``kept_inside`` lists patterns of substrings to keep, from none to all of the
    template's constants, such as the ``</think>`` at which a template splits a message's content.

    Args:
        names: Names in the template's expressions.
        literals: String constants in the template's expressions.
        special: Special tokens, no part of which may come from a string.
    """

    def __init__(self, names: Collection[str], literals: Collection[str], special: Collection[str]) -> None:
        words = {literal for literal in literals if _WORD.fullmatch(literal)}
        self._keys = words.union(names)
        # Templates change the case of words that they compare, as Gemma's template does with "string".
        self._words = {word.lower() for word in words} | _TYPES
        lowered = "\n".join(special).lower()
        self._parts = {word for word in self._words.union(name.lower() for name in self._keys) if word in lowered}
        visible = [one for one in literals if one.strip() and not any(token in one for token in special)]
        # Templates may join strings. Keep a part of a special token only as a last resort, and only at one end of a
        # string.
        parts = {one for one in visible if any(one.strip() in token for token in special)}
        inside = _any_of(one for one in visible if one not in parts)
        forms = (inside, rf"\A{_any_of(parts)}|{inside}", rf"{_any_of(parts)}\Z|{inside}")
        self.kept_inside = (None, *(re.compile(f"({form})") for form in forms))

    def hide(self, messages: Messages, tools: Tools, kept: re.Pattern[str] | None) -> tuple[Messages, Tools]:
        """Return the conversation and its tools, with placeholders for strings. ``kept`` is one of ``kept_inside``."""

        def of_value(text: str) -> str:
            if text.lower() in self._words:
                return text
            parts = [text] if kept is None else kept.split(text)
            parts[::2] = [_translated(part, _tables()[0]) for part in parts[::2]]
            return "".join(parts)

        def of_key(key: str) -> str:
            return key if key in self._keys else of_value(key)

        return _replaced(messages, tools, of_value, of_key)

    def hide_words(self, messages: Messages, tools: Tools) -> Iterator[tuple[Messages, Tools]]:
        """Yield the conversation once per kept word that is part of a special token, with that word replaced.

        If a template only compares the word, the rendered text changes; if it copies the word, the text stays the same.
        """
        others = [{key: value for key, value in message.items() if not _is_role(key, value)} for message in messages]
        for word in sorted(self._parts.intersection(text.lower() for text in strings([*others, *tools]))):

            def hidden(text: str, word: str = word) -> str:
                return _translated(text, _tables()[0]) if text.lower() == word else text

            yield _replaced(messages, tools, hidden, hidden)


def _is_role(key: str, value: Any) -> bool:
    return key == "role" and value.lower() in _ROLES


def _replaced(
    messages: Messages, tools: Tools, of_value: Callable[[str], str], of_key: Callable[[str], str]
) -> tuple[Messages, Tools]:
    """Replace the strings of a conversation and its tools, except known fields and roles."""

    def field(key: str, value: Any) -> tuple[str, Any]:
        kept = value if _is_role(key, value) else _with_strings(value, of_value, of_key)
        return key if key in _FIELDS else of_key(key), kept

    replaced = [dict(field(key, value) for key, value in message.items()) for message in messages]
    return replaced, [_with_strings(tool, of_value, of_key) for tool in tools]


def _with_strings(value: Any, of_value: Callable[[str], str], of_key: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return of_value(value)
    if isinstance(value, Mapping):
        return {of_key(key): _with_strings(item, of_value, of_key) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_with_strings(item, of_value, of_key) for item in value]
    return value


def _any_of(literals: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, sorted(literals, key=len, reverse=True))) or '(?!)'})"


def _shown(text: str) -> str:
    return _translated(text, _tables()[1])


def _translated(text: str, table: NDArray[np.uint32]) -> str:
    translated: NDArray[np.uint32] = table[np.frombuffer(text.encode("utf-32-le"), "<u4")]
    return translated.tobytes().decode("utf-32-le")


@functools.cache
def _tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return two tables: from characters to placeholders, and from placeholders to characters."""
    hidden, back = np.arange(_NUM_CODES, dtype="<u4"), np.arange(_NUM_CODES, dtype="<u4")
    hidden[:_NUM_MOVED] += _SHIFT
    # A template may strip white space, and JSON escapes control characters, quotes and backslashes.
    for code in range(_NUM_MOVED):
        if code < ord(" ") or chr(code).isspace() or chr(code) in '"\\':
            hidden[code] = code
    back[_SHIFT:] -= _SHIFT
    return hidden, back
