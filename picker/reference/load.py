"""A configuration file of either kind: warmpath.yaml, or an EndpointPickerConfig."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from picker.config import Config, build
from picker.document import Document, read_text, shown
from picker.reference.translate import is_reference, translate

Data = dict[str, Any]


class Loaded(NamedTuple):
    config: Config
    notes: list[str]  # what of the file is ignored, each with its place
    is_reference: bool  # an EndpointPickerConfig


def load(
    path: Path,
    check: Callable[[Config], object] | None = None,
    *,
    beneath: Data | None = None,
    above: Data | None = None,
) -> Loaded:
    """The configuration in a file.

    Args:
        check: see picker.config.load.
        beneath: in warmpath.yaml's terms, what holds where the file does not say.
        above: what holds whatever the file says.

    Raises:
        ConfigError: the file cannot be read or used, in one line.
    """
    return parse(read_text(path), str(path), check, beneath=beneath, above=above)


def parse(
    text: str,
    name: str,
    check: Callable[[Config], object] | None = None,
    *,
    beneath: Data | None = None,
    above: Data | None = None,
) -> Loaded:
    """The configuration in a text; `name` is the file's, for errors. See `load`."""
    document = Document(text, name)
    notes: list[str] = []
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        raise document.error((), f"expected keys with values, got {shown(data)}")
    reference = is_reference(document)
    if reference:
        data, notes = translate(document)
    for more, wins in ((beneath, False), (above, True)):
        if more:
            data = _over(data, more) if wins else _over(more, data)
    return Loaded(build(document, data, check), notes, reference)


def _over(below: Any, above: Any) -> Any:
    """Keys of both; where both say something, `above` holds. A key without a value says nothing."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return below if above is None else above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}
