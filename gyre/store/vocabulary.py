"""A tokenizer's vocabulary as rows: the bytes of every token, by which SQL reads token ids as text."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, exists, select, update
from sqlalchemy.orm import Session

from gyre.store.models import Run, TokenPiece

log = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NUL = "\u2400".encode()


def token_pieces(tokenizer: dict[str, Any]) -> dict[int, bytes]:
    """The bytes that each token of a `tokenizer.json` stands for; joined in order they are what was said, in UTF-8.

    For byte-level tokenizers (GPT-2's, Llama 3's, Qwen's …) and for SentencePiece's with byte fallback (Llama 2's …).
    A byte 0 becomes U+2400, since SQL's text has no room for it. Raises ValueError for another kind of tokenizer.
    """
    kinds = _kinds(tokenizer.get("decoder") or {})
    if "ByteLevel" in kinds:
        convert = _byte_level
    elif "ByteFallback" in kinds:
        convert = _sentence_piece
    else:
        raise ValueError(f"tokenizer.json: its decoder ({', '.join(kinds) or 'none'}) is not of bytes; text needs one")
    model = tokenizer["model"]["vocab"]
    by_id = (
        {i: piece for i, (piece, _) in enumerate(model)}
        if isinstance(model, list)
        else {v: k for k, v in model.items()}
    )
    pieces = {i: convert(piece) for i, piece in by_id.items()}
    pieces |= {added["id"]: convert(added["content"]) for added in tokenizer.get("added_tokens", [])}
    return {i: piece.replace(b"\0", _NUL) for i, piece in pieces.items()}


def load_vocabulary(session: Session, run_id: str, policy: Path) -> str | None:
    """Store the vocabulary of the checkpoint folder `policy` and name it in the run's row. Idempotent.

    Returns its name, the SHA-256 of tokenizer.json. None, and text stays unreadable in SQL, where the folder has none
    or one of another kind than `token_pieces` knows (then with a warning: no reason to stop a run).
    """
    path = policy / "tokenizer.json"
    if not path.is_file():
        return None
    data = path.read_bytes()
    name = hashlib.sha256(data).hexdigest()
    if not session.scalar(select(exists().where(TokenPiece.vocabulary == name))):
        try:
            pieces = token_pieces(json.loads(data))
        except ValueError as error:
            log.warning("%s: %s; token ids of run %s cannot be read as text in SQL", path, error, run_id)
            return None
        _copy(session.connection(), name, pieces)
    session.execute(update(Run).where(Run.id == run_id).values(vocabulary=name))
    return name


def _copy(connection: Connection, name: str, pieces: dict[int, bytes]) -> None:
    # Into a table of its own first: another run may be loading the same vocabulary.
    cursor = connection.connection.cursor()
    cursor.execute("CREATE TEMPORARY TABLE new_pieces (LIKE token_pieces) ON COMMIT DROP")
    with cursor.copy("COPY new_pieces (vocabulary, id, piece) FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(["text", "int4", "bytea"])
        for i, piece in pieces.items():
            copy.write_row((name, i, piece))
    cursor.execute("INSERT INTO token_pieces SELECT * FROM new_pieces ON CONFLICT DO NOTHING")
    cursor.execute("DROP TABLE new_pieces")
    cursor.close()


def _kinds(decoder: dict[str, Any]) -> list[str]:
    """Types of a decoder and of those that it is made of."""
    return [decoder["type"], *(k for d in decoder.get("decoders", []) for k in _kinds(d))] if decoder else []


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTES[c] for c in piece)
    except KeyError:
        return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_characters()
