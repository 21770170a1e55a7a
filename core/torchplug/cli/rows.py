"""What the commands say about a catalogue row: where it comes from, and in what state it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torchplug.cli.tables import print_table

if TYPE_CHECKING:
    from torchplug.host.catalogue import Catalogue, PluginRow

OK: Final = "ok"
OWNER: Final = "owner"
PASSED_OVER: Final = "passed over"
CONFLICT: Final = "conflict"
BLOCKED: Final = "blocked"
MALFORMED: Final = "malformed"
NO_MODULE: Final = "no module"


class RowView(NamedTuple):
    """One row as shown. `status` is one of the words above; `note` says more where the word is not enough."""

    name: str
    distribution: str
    version: str
    entry_point: str
    status: str
    file: str
    note: str

    def as_dict(self, kind: str) -> dict[str, Any]:
        """JSON: `kind` is the key of the name, "architecture" or "wrapper"; what is not known is null."""
        values = {key: value or None for key, value in self._asdict().items()}
        return {kind: values.pop("name"), **values}


def view(row: PluginRow, catalogue: Catalogue) -> RowView:
    """One row as shown; its file is looked up without importing it."""
    status, note = _status(row, catalogue)
    file = str(row.file or "")
    return RowView(row.name, row.distribution or "", row.version or "", row.value, status, file, note)


def models(catalogue: Catalogue) -> list[RowView]:
    """Every model row, enabled or blocked, by architecture and then distribution."""
    from torchplug.host.catalogue import ModelPlugin

    return sorted(view(row, catalogue) for row in catalogue.rows() if isinstance(row, ModelPlugin))


def wrappers(catalogue: Catalogue) -> list[RowView]:
    """Every wrapper row: the enabled ones in the order in which they are attached, then the blocked ones."""
    from torchplug.host.catalogue import WrapperPlugin

    blocked = [row for row in catalogue.blocked if isinstance(row, WrapperPlugin)]
    return [view(row, catalogue) for row in (*catalogue.wrappers, *blocked)]


def print_rows(kind: str, rows: Sequence[RowView]) -> None:
    """A table of rows; `kind` heads the first column."""
    columns = (kind, "distribution", "version", "entry point", "status", "file")
    print_table(columns, [row[: len(columns)] for row in rows])


def _status(row: PluginRow, catalogue: Catalogue) -> tuple[str, str]:
    from torchplug.host import locate
    from torchplug.host.catalogue import ModelPlugin
    from torchplug.host.selection import normalized

    if row in catalogue.blocked:
        return BLOCKED, catalogue.why_blocked(row)
    if row.malformed_value:
        return MALFORMED, row.malformed_value
    if not locate.module_exists(row.module):
        return NO_MODULE, f"there is no module {row.module!r} on the import path"
    offers = catalogue.models.get(row.name, ()) if isinstance(row, ModelPlugin) else ()
    if len(offers) > 1:
        chosen = catalogue.owners.get(row.name)
        if chosen is None:
            return CONFLICT, f"{len(offers)} distributions offer it: choose with --owner {row.name}={row.distribution}"
        own = row.distribution is not None and normalized(row.distribution) == normalized(chosen)
        return (OWNER, "chosen with --owner") if own else (PASSED_OVER, f"{chosen} was chosen with --owner")
    return (MALFORMED, row.problem) if row.problem else (OK, "")
