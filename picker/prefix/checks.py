"""What can be said of an event that stores blocks, before it is looked at together with others."""

from __future__ import annotations

from picker.prefix.counts import Counts
from picker.prefix.events import Stored
from picker.prefix.sources import Source, Sources

# Kinds of attention whose blocks are good for any prompt that begins with them. Others (sliding
# windows, Mamba states) hold only what the end of a prompt needs.
FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
MAX_SIZES = 8  # block sizes in use at the same time: a prompt is looked up once for each
MAX_SKIPPED = 64  # groups of a source that are known to be no full attention
MAX_ADAPTERS = 4096  # whose names are kept


class Checks:
    """Refuses what is wrong in itself, and leaves out what is of no use."""

    def __init__(self, sources: Sources, counts: Counts) -> None:
        self.adapters: set[str] = set()  # that blocks were told of
        self._sources = sources
        self._counts = counts

    def accepts(self, source: Source, event: Stored) -> bool:
        """Whether an event is to be applied. If not, it is counted why."""
        hashes, parent, size = event.hashes, event.parent, event.block_size
        count = len(hashes)
        if event.kind not in FULL_ATTENTION:
            self._counts.skipped += count
            if len(source.skipped) < MAX_SKIPPED:
                source.skipped.add(event.group)
            return False
        reason = None
        if (event.tokens and len(event.tokens) != count * size) or (
            event.extra_keys and len(event.extra_keys) != count
        ):
            reason = "misaligned"
        elif count == 1:
            if hashes[0] == parent:
                reason = "self-parent"
        else:
            different = set(hashes)
            if len(different) != count:
                reason = "repeated"
            elif parent in different:
                reason = "self-parent"
        if reason is None and event.tokens and size not in source.sizes:
            sizes = self._sources.block_sizes()
            if size not in sizes and len(sizes) >= MAX_SIZES:
                reason = "block size"
            else:
                source.sizes.add(size)
                source.block_size = size
                self._sources.revision += 1
        if reason is not None:
            self._counts.refuse(reason, count)
            return False
        if event.lora_name is not None and len(self.adapters) < MAX_ADAPTERS:
            self.adapters.add(event.lora_name)
        if source.main is None:
            source.main = event.group
        return count > 0
