"""A YAML file as plain data that remembers its lines.

For files that people write: duplicate keys are errors, and what a small file may cost (depth,
aliases of aliases) is bounded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 4 << 20
MAX_NODES = 200_000  # with aliases followed
MAX_DEPTH = 50
MAX_SHOWN = 80  # characters of a value in an error

Place = tuple[str | int, ...]  # keys and indexes from the top


class ConfigError(ValueError):
    """A configuration that cannot be used: one line that says where, what, and what to do."""


class Document:
    """One parsed file: `data` of dicts, lists, str, int, float, bool and None."""

    def __init__(self, text: str, name: str) -> None:
        """
        Args:
            text: YAML; empty for a file that leaves everything at its default.
            name: the file's, for errors.

        Raises:
            ConfigError: it is no YAML, or more than is bearable.
        """
        self._name = name
        self._lines: dict[Place, int] = {}
        self._nodes = 0
        self._loader = yaml.SafeLoader("")
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{name}: a configuration has at most {MAX_BYTES >> 20} MiB")
        try:
            node = yaml.compose(text, yaml.SafeLoader)
            self.data: Any = None if node is None else self._value(node, ())
        except yaml.MarkedYAMLError as problem:
            mark = problem.problem_mark or problem.context_mark
            where = f"{name}:{mark.line + 1}" if mark else name
            raise ConfigError(f"{where}: this is not YAML: {_one_line(problem)}") from None
        except yaml.reader.ReaderError as problem:
            raise ConfigError(
                f"{name}: the character #x{problem.character:04x} may not stand in YAML"
            ) from None
        except RecursionError:
            raise ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels") from None
        finally:
            self._loader.dispose()

    def error(self, place: Place, what: str) -> ConfigError:
        """An error at a place: `file:line: key.path: what`."""
        line = self.line(place)
        where = self._name if line is None else f"{self._name}:{line}"
        return ConfigError(f"{where}: {dotted(place)}: {what}" if place else f"{where}: {what}")

    def line(self, place: Place) -> int | None:
        """Of the innermost part of a place that the file has, counted from 1."""
        while place and place not in self._lines:
            place = place[:-1]
        return self._lines.get(place)

    def at(self, place: Place) -> Any:
        """The value at a place; None where the file has none."""
        value = self.data
        for key in place:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def mentioned(self, message: str) -> Place:
        """The place whose key or text the first clause of a message quotes; else the top.

        Of several, the deepest: `prefix` may be a section and a scorer.
        """
        for word in re.findall(r"['`\"]([^'`\"]+)['`\"]", message.partition("; ")[0]):
            places = [
                place for place in self._lines if place and word in (str(place[-1]), self.at(place))
            ]
            if places:
                return max(places, key=len)
        return ()

    def _value(self, node: yaml.Node, place: Place) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise ConfigError(f"{self._name}: more than {MAX_NODES:,} values, aliases followed")
        if len(place) > MAX_DEPTH:
            raise ConfigError(f"{self._name}: nested deeper than {MAX_DEPTH} levels")
        self._lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(each, (*place, i)) for i, each in enumerate(node.value)]
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        try:
            return self._loader.construct_object(node)
        except (ValueError, yaml.YAMLError) as problem:
            raise self.error(place, f"{shown(node.value)}: {_one_line(problem)}") from None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.error(place, "a key must be a single word")
            key = str(key_node.value)  # as written: `on` and `1` are names here
            inner = (*place, key)
            self._lines[inner] = key_node.start_mark.line + 1
            if key in mapping:
                raise self.error(inner, "this key stands here twice; remove one")
            mapping[key] = self._value(value_node, inner)
        return mapping


def dotted(place: Place) -> str:
    """As people write it: `pool.endpoints[0].address`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def shown(value: object) -> str:
    """A value in an error, cut to what fits on a line."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown word: the nearest known one, or all of them."""
    names = sorted(known)
    if not names:
        return "it takes none"
    near = difflib.get_close_matches(word, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def read_text(path: Path) -> str:
    """A configuration file's text.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        return content.decode("utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: byte {problem.start} is not UTF-8") from None


def _one_line(problem: Exception) -> str:
    if isinstance(problem, yaml.MarkedYAMLError):
        return " ".join(f"{problem.context or ''} {problem.problem or ''}".split())
    return " ".join(str(problem).split())


def plain(value: Mapping[str, Any]) -> str:
    """Data as YAML text, keys in their order."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
