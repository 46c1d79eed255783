"""Divides a stream of documents in two at a number of bytes of text."""

from __future__ import annotations

from collections.abc import Iterator

from data.corpus_reader import Document


def text_bytes(document: Document) -> int:
    return len(document.prompt.encode()) + len(document.text.encode())


def divide(documents: Iterator[Document], kept: int) -> tuple[Iterator[Document], Iterator[Document]]:
    """The documents before and after the first ``kept`` bytes of text. The first part must be used up first.

    A document on the border is cut after the line that reaches it, one with a prompt stays whole on the first side.
    """
    second_half: list[Document] = []

    def first() -> Iterator[Document]:
        room = kept
        while room > 0 and (document := next(documents, None)) is not None:
            size = text_bytes(document)
            if size > room and not document.prompt:
                head, tail = _cut_after_line(document.text, room)
                document = Document(head)
                if tail:
                    second_half.append(Document(tail))
            room -= size
            yield document

    def second() -> Iterator[Document]:
        yield from second_half
        yield from documents

    return first(), second()


def _cut_after_line(text: str, position: int) -> tuple[str, str]:
    """``text`` cut after the first end of line at or past ``position`` bytes; uncut if there is none."""
    data = text.encode()
    end = data.find(b"\n", max(0, position - 1)) + 1 or len(data)
    return data[:end].decode(), data[end:].decode()
