"""What is read of quotas, at the moment when a metrics page is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from picker.exposition import Spec, write
from picker.quota.admission import Quotas

COUNTS = {  # by attribute of admission.Numbers
    "granted": Spec("counter", "warmpath_quota_granted_total", (), "Requests that may pass."),
    "leased": Spec(
        "counter", "warmpath_quota_leased_total", (), "Of these, from a lease: no store was asked."
    ),
    "degraded": Spec(
        "counter", "warmpath_quota_degraded_total", (), "Of these, while the store was down."
    ),
    "shadowed": Spec(
        "counter",
        "warmpath_quota_shadowed_total",
        (),
        "Of these, those that a limit in shadow would have refused.",
    ),
    "barred": Spec(
        "counter",
        "warmpath_quota_barred_total",
        (),
        "Requests of subjects that are blocked, or have expired.",
    ),
    "unavailable": Spec(
        "counter",
        "warmpath_quota_unavailable_total",
        (),
        "Requests that were refused because the store was down.",
    ),
}
DENIED = Spec(
    "counter",
    "warmpath_quota_denied_total",
    ("limit",),  # its name: what, and window
    "Requests over a limit.",
)
STORE_UP = Spec("gauge", "warmpath_quota_store_up", (), "1 while the store of quotas answers.")
OWED = Spec(
    "gauge", "warmpath_quota_owed_settlements", (), "Ended requests that the store is yet to learn."
)
LOST = Spec(
    "counter",
    "warmpath_quota_lost_settlements_total",
    (),
    "Those that were given up, because too many waited for the store.",
)


class QuotaGauges:
    """Writes them; keeps nothing."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def page(self) -> Iterator[str]:
        """All of it as Prometheus' text, in small pieces."""
        quotas = self._quotas
        for attribute, spec in COUNTS.items():
            yield from write(spec, [((), getattr(quotas.numbers, attribute))])
        denied = sorted(quotas.numbers.denied.items())
        yield from write(DENIED, [((name,), count) for name, count in denied])
        yield from write(STORE_UP, [((), int(quotas.store_up))])
        yield from write(OWED, [((), quotas.owed)])
        yield from write(LOST, [((), quotas.lost)])
