"""Who may administer: a file of tokens."""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

MIN_TOKEN = 16  # characters; shorter ones can be guessed


class Tokens:
    """The lines `NAME TOKEN` of a file. It is read for each question, so a change holds at once.

    Args:
        path: of the file; empty lines and those that start with # say nothing.

    Raises:
        ValueError: a line is none, or the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read()

    def actor(self, token: str) -> str | None:
        """Whose token it is; None: nobody's. It takes as long for one that is nearly right.

        Raises:
            ValueError: the file cannot be used any more.
        """
        asked = sha256(token.encode()).digest()
        found = None
        for name, digest in self._read():
            if compare_digest(digest, asked):
                found = name
        return found

    def _read(self) -> list[tuple[str, bytes]]:
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            raise ValueError(f"{self._path}: cannot be read: {problem}") from problem
        found = []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or len(words[1]) < MIN_TOKEN:
                raise ValueError(
                    f"{self._path}:{number}: write NAME TOKEN, the token of {MIN_TOKEN} characters "
                    "or more"
                )
            found.append((words[0], sha256(words[1].encode()).digest()))
        return found
