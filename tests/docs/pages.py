"""README.md and docs/*.md as their tests read them.

A page stays an ordinary page. What the tests need to know beyond it:

- A ```bash or ```python block is run as it stands, in a directory of the page's own.
- A ```text block behind one is its output. A line of `...` stands for any lines, `...` within a
  line for anything; times, durations and request ids may differ, and so may the widths of a
  table's columns and which of the pods on ports 8001 to 8009 it was. In the table of `warmpath up`
  only who was cold and who was warm counts.
- `<!-- not run: REASON -->` above a block says that it is not run, and why; see NOT_RUN.
- A block that ends in a foreground `warmpath work`, `pick` or `up` is a server: it runs while the
  page does, or until another wants one of its ports. `make up` counts as the `warmpath up` in the
  Makefile. A server that is given `-c` reads the file that a block before it has written.
- Ports 8000 to 8099, 5500 to 5599, 9000 to 9099 and 9900 to 9999 stand for free ones, and
  `/home/you` for the reader's home.
- Pages are read in the folder of the repository, as far as `envoy/` is concerned.
- A ```yaml block whose first line is `# warmpath.yaml` is a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FIRST = [  # those that share servers stand together
    "README.md",
    *(f"docs/{name}.md" for name in ("serve", "api", "quick-start", "operate", "prefix")),
]
PAGES = [
    *(ROOT / name for name in _FIRST),
    *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / name for name in _FIRST}),
]
NOT_RUN = {
    "runs every test",
    "downloads a model",
    "needs a GPU",
    "takes minutes",
    "loads a second model",
    "needs a cluster",
    "needs another project",
    "installs packages",
}

_FENCE = re.compile(r"```(\w*)$")
_MARKER = re.compile(r"<!-- not run: (.+) -->$")
_VARYING = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", "TIME"),
    (r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\dZ", "TIME"),
    (r"\b\d\d:\d\d:\d\d\b", "TIME"),
    (r"\b[\d,]+(\.\d+)? m?s\b", "SECONDS"),
    (r"─+", "─"),
    (r" {2,}", "  "),
    (r"\b127\.0\.0\.1:800[1-9]\b", "POD"),
    # A turn of a conversation: by the picker, then by round robin, which may have luck.
    (r"\bworker-\d+  0  0/\d+  SECONDS  worker-.*", "COLD"),
    (r"\bworker-\d+  [1-9]\d*  [1-9]\d*/\d+  SECONDS  worker-.*", "WARM"),
    (r"\b\d+ of \d+ (prompt tokens came|by round robin)", r"N of M \1"),
    (r"\b\d+\.\d times sooner", "N times sooner"),
    (r"\b(chatcmpl|cmpl)-[0-9a-f]+", r"\1-ID"),
    (r'"created": ?\d+', '"created": TIME'),
]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    not_run: str | None  # the reason, if it is not to be run
    output: str | None  # what the page says it prints

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, continued lines joined, comments left out."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [" ".join(line.split()) for line in lines if line and not line.startswith("#")]

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "python") and self.not_run is None


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page in order, each with its output, which is no block of its own then."""
    blocks: list[Block] = []
    for line, language, code, not_run in _fences(page):
        previous = blocks[-1] if blocks else None
        if language == "text" and previous and previous.is_run and previous.output is None:
            blocks[-1] = Block(
                page, previous.line, previous.language, previous.code, None, output=code
            )
        else:
            blocks.append(Block(page, line, language, code, not_run, None))
    return blocks


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def matches(expected: str, actual: str) -> bool:
    """Whether a page's output block describes what was printed."""
    pattern = ""
    for line in _steady(expected).rstrip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*"
        else:
            pattern += ".*".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n"
    return re.fullmatch(pattern, _steady(actual).rstrip() + "\n") is not None


def _steady(text: str) -> str:
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text


def _fences(page: Path) -> Iterator[tuple[int, str, str, str | None]]:
    lines = page.read_text().splitlines()
    start, language, not_run = 0, None, None
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if language is None and fence:
            start, language = number, fence[1]
        elif line == "```":
            yield start + 1, str(language), "\n".join(lines[start : number - 1]) + "\n", not_run
            language = not_run = None
        elif language is None and line.strip():
            marker = _MARKER.match(line)
            not_run = marker[1] if marker else None
    assert language is None, f"{page}: the block at line {start} does not end"
