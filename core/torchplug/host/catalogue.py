"""The catalogue: which installed distribution offers which architecture or wrapper, from entry-point metadata alone.

Nothing here imports a plugin. One scan of the installed metadata serves both groups; a distribution's name and version
are read only for rows that are shown, selected by distribution or in conflict. What goes wrong is explained by
`torchplug.host.ownership` and `torchplug.host.metadata`, which are imported when it does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import importlib_metadata

from torchplug.host.selection import Selection, normalized

if TYPE_CHECKING:
    from pathlib import Path

    from importlib_metadata import EntryPoint

    from torchplug.host.trust import Allowlist

MODELS: Final = "torchplug.models.v1"
"""Entry-point group of model plugins: name = architecture, value = `package.module:Class`."""

WRAPPERS: Final = "torchplug.plugins.v1"
"""Entry-point group of wrapper plugins: value = a module or `package.module:instance`."""


class PluginRow:
    """One entry point of a plugin distribution. Everything but the entry point itself is read on demand.

    Attributes:
        name: The entry point's name.
        value: Its value, as written.
        entry_point: The entry point; `entry_point.load()` imports the plugin.
    """

    __slots__ = ("_identity", "entry_point", "name", "value")

    form: ClassVar[str] = "package.module:attribute"
    """What a value has to look like."""

    def __init__(self, entry_point: EntryPoint) -> None:
        self.entry_point = entry_point
        self.name: str = entry_point.name
        self.value: str = entry_point.value
        self._identity: tuple[str | None, str | None] | None = None

    @property
    def distribution(self) -> str | None:
        """Name of the distribution, as its metadata spells it; None where the metadata does not tell."""
        return self._read_identity()[0]

    @property
    def version(self) -> str | None:
        """Version of the distribution; None where the metadata does not tell."""
        return self._read_identity()[1]

    def _read_identity(self) -> tuple[str | None, str | None]:
        if self._identity is None:
            self._identity = identity(self.entry_point.dist)
        return self._identity

    @property
    def origin(self) -> str:
        """`name==version` of the distribution, for people."""
        name, version = self._read_identity()
        return f"{name or 'unnamed distribution'}{f'=={version}' if version else ''}"

    @property
    def module(self) -> str:
        """The module in the value, e.g. `my_plug.model`."""
        return self.value.partition("[")[0].partition(":")[0].strip()

    @property
    def attribute(self) -> str:
        """The attribute in the value, e.g. `MyModel`; empty where the value names a module only."""
        return self.value.partition("[")[0].partition(":")[2].strip()

    @property
    def file(self) -> Path | None:
        """The file that holds the module, found without importing it or its parents; None where it cannot be found."""
        from torchplug.host.locate import module_file

        return None if self.malformed_value else module_file(self.module)

    @property
    def malformed_value(self) -> str | None:
        """What is wrong with the entry point's value, or None."""
        attribute = self.attribute if ":" in self.value.partition("[")[0] else "none"
        if not (_dotted(self.module) and _dotted(attribute)):
            return f"the value {self.value!r} is not {self.form}"
        return None

    @property
    def problem(self) -> str | None:
        """What is wrong with the entry point's own text, or None. It is never fatal for other entry points."""
        if not self.name or not self.name.replace("-", "_").replace(".", "_").isidentifier():
            return f"the name {self.name!r} is not letters, digits, '_', '-' and '.', beginning with a letter"
        return self.malformed_value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.value!r}, {self.origin})"


class ModelPlugin(PluginRow):
    """A distribution's offer of one architecture."""

    __slots__ = ()

    form = "package.module:Class"

    @property
    def architecture(self) -> str:
        """The string of config.json's `architectures` that this plugin serves."""
        return self.name

    @property
    def malformed_value(self) -> str | None:
        bare = None if self.attribute else f"the value {self.value!r} is not {self.form}"
        return super().malformed_value or bare


class WrapperPlugin(PluginRow):
    """A distribution's wrapper plugin: a module, or an instance in one."""

    __slots__ = ()

    form = "package.module or package.module:instance"


class Catalogue:
    """What the installed plugins offer, under a selection.

    Args:
        selection: Which distributions are enabled (grammar: `torchplug.host.selection`); None reads TORCHPLUG_PLUGINS.
        owners: For an architecture that several distributions offer, the name of the one that serves it.
        allowlist: Which distributions are trusted (`torchplug.host.trust`); None reads TORCHPLUG_ALLOWLIST, and where
            that is not set all are.

    Attributes:
        models: Enabled offers of each architecture. More than one offer is a conflict until an owner is chosen.
        blocked: Rows that the selection disables, or whose distribution is not trusted.
        allowlist: The trusted distributions, or None (open).
        unreadable: Metadata that could not be read: (where, what happened).
        warnings: Texts for the user, e.g. a name in the selection that no plugin has. Never fatal.
    """

    def __init__(
        self,
        *,
        selection: str | None = None,
        owners: Mapping[str, str] | None = None,
        allowlist: str | None = None,
    ) -> None:
        self.allowlist: Allowlist | None = None
        if allowlist is not None or "TORCHPLUG_ALLOWLIST" in os.environ:
            from torchplug.host.trust import Allowlist

            self.allowlist = Allowlist.in_force(allowlist)
        self.selection = Selection.in_force(selection)
        self.owners: Mapping[str, str] = dict(owners or {})
        self.blocked: list[ModelPlugin | WrapperPlugin] = []
        self.warnings: list[str] = []
        entry_points, self.unreadable = read_entry_points()
        models: dict[str, list[ModelPlugin]] = {}
        wrappers: list[WrapperPlugin] = []
        everything = self.selection.text is None and self.allowlist is None
        for entry_point in entry_points:
            group = entry_point.group
            if group != MODELS and group != WRAPPERS:
                continue
            row = ModelPlugin(entry_point) if group == MODELS else WrapperPlugin(entry_point)
            if not everything and not self._enables(row.distribution):
                self.blocked.append(row)
            elif isinstance(row, WrapperPlugin):
                wrappers.append(row)
            elif not _repeats(row, offers := models.setdefault(row.name, [])):
                offers.append(row)
        self.models: Mapping[str, tuple[ModelPlugin, ...]] = {name: tuple(offers) for name, offers in models.items()}
        self._wrappers = wrappers
        self._wrappers_in_order: tuple[WrapperPlugin, ...] | None = None
        if not everything or self.owners or self.unreadable:
            from torchplug.host.ownership import warnings_of

            self.warnings = warnings_of(self)

    @property
    def wrappers(self) -> tuple[WrapperPlugin, ...]:
        """Enabled wrapper plugins, innermost first: by the order of the selection, then distribution, then name."""
        if self._wrappers_in_order is None:
            position = self.selection.position
            self._wrappers_in_order = tuple(
                sorted(
                    self._wrappers,
                    key=lambda row: (position(row.distribution), normalized(row.distribution or ""), row.name),
                )
            )
        return self._wrappers_in_order

    def _enables(self, distribution: str | None) -> bool:
        trusted = self.allowlist is None or self.allowlist.trusts(distribution)
        return trusted and self.selection.enables(distribution)

    def why_blocked(self, row: PluginRow) -> str:
        """Why a row is among the blocked ones."""
        if self.allowlist is not None and not self.allowlist.trusts(row.distribution):
            return f"its distribution is not on the allowlist {self.allowlist}"
        return f"disabled by the selection {self.selection}"

    def rows(self) -> Iterator[ModelPlugin | WrapperPlugin]:
        """Every row, enabled or blocked."""
        for offers in self.models.values():
            yield from offers
        yield from self._wrappers
        yield from self.blocked

    def owner(self, architecture: str) -> ModelPlugin:
        """The plugin that serves an architecture.

        Args:
            architecture: As in config.json, or `dist:Arch` to choose the distribution here and now.

        Raises:
            PluginError: Nobody enabled offers it, or several do and none was chosen, or the entry point is malformed.
                The text explains which, from a full scan of the installed metadata, and says what to do.
        """
        offers = self.models.get(architecture)
        chosen = self.owners.get(architecture)
        if offers is None and ":" in architecture:
            chosen, _, architecture = architecture.partition(":")
            offers = self.models.get(architecture)
        if offers and chosen is not None:
            wanted = normalized(chosen)
            offers = tuple(row for row in offers if row.distribution and normalized(row.distribution) == wanted)
        if not offers or len(offers) > 1 or offers[0].malformed_value:
            from torchplug.host.ownership import refusal

            raise refusal(self, architecture, chosen)
        return offers[0]


def read_entry_points() -> tuple[Iterable[EntryPoint], list[tuple[str, str]]]:
    """Entry points of all installed distributions, and what could not be read: (where, what happened).

    One call without a group serves both of ours: measured, it costs what a call with one group costs, and two calls
    1.3 to 1.8 times as much. A distribution that cannot be read makes importlib_metadata fail as a whole; then they are
    read one by one.
    """
    try:
        return importlib_metadata.entry_points(), []
    except Exception:
        return _one_by_one()


def installed_distributions(unreadable: list[tuple[str, str]]) -> Iterator[Any]:
    """Every distribution in the order of the import path, duplicates included; a finder that fails is noted."""
    context = importlib_metadata.DistributionFinder.Context()
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_distributions", None)
        if find is not None:
            try:
                yield from find(context)
            except Exception as error:
                unreadable.append((f"finder {type(finder).__name__}", f"{type(error).__name__}: {error}"))


def _one_by_one() -> tuple[list[EntryPoint], list[tuple[str, str]]]:
    unreadable: list[tuple[str, str]] = []
    found: list[EntryPoint] = []
    seen: set[str] = set()
    # As importlib_metadata does: the first distribution of a name counts, and those without any metadata come last.
    for distribution in sorted(installed_distributions(unreadable), key=lambda each: not has_metadata(each)):
        name = lookup_name(distribution)
        if name and name in seen:
            continue
        seen.add(name)
        try:
            found.extend(distribution.entry_points)
        except Exception as error:
            unreadable.append((str(metadata_path(distribution) or name), f"{type(error).__name__}: {error}"))
    return found, unreadable


def identity(distribution: Any) -> tuple[str | None, str | None]:
    """Name and version of a distribution, None where unknown; the name may come from its directory."""
    try:
        metadata = distribution.metadata
        name, version = metadata.get("Name"), metadata.get("Version")
    except Exception:
        # A package without or with unreadable METADATA; whoever shows the row shows what is known.
        name = version = None
    return name or stem_name(distribution), version


def metadata_path(distribution: Any) -> Path | None:
    """The `.dist-info` or `.egg-info` of a distribution; None for one that does not come from files.

    importlib_metadata has no public name for it; pip, too, reads `_path`.
    """
    path: Path | None = getattr(distribution, "_path", None)
    return path


def stem_name(distribution: Any) -> str | None:
    """The name in `name-version.dist-info`, or None."""
    stem, dot, kind = getattr(metadata_path(distribution), "name", "").rpartition(".")
    return stem.partition("-")[0] or None if dot and kind in ("dist-info", "egg-info") else None


def lookup_name(distribution: Any) -> str:
    """The name by which importlib_metadata tells two copies of one distribution; empty where there is none."""
    return normalized(stem_name(distribution) or identity(distribution)[0] or "")


def has_metadata(distribution: Any) -> bool:
    """Whether there is METADATA or PKG-INFO. importlib_metadata prefers copies that have it."""
    try:
        return bool(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO"))
    except Exception:
        return False


def _repeats(row: ModelPlugin, offers: list[ModelPlugin]) -> bool:
    """The same line twice in one distribution's metadata is one offer."""
    return any(row.value == other.value and row.entry_point.dist is other.entry_point.dist for other in offers)


def _dotted(text: str) -> bool:
    """`a.b.c`. importlib_metadata's own pattern lets `a..b` and `1.2` pass."""
    return all(part.isidentifier() for part in text.split("."))
