"""Why an architecture has no owner: the texts for a catalogue's misses, conflicts and warnings.

Imported when something is to be explained, so that a start-up without trouble does not pay for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torchplug.errors import PluginError, Problem
from torchplug.host.catalogue import Catalogue, ModelPlugin, PluginRow
from torchplug.host.selection import normalized


def refusal(catalogue: Catalogue, architecture: str, chosen: str | None) -> PluginError:
    """The error for an architecture that has no owner, several, or one whose entry point is malformed.

    Args:
        catalogue: Where it was looked up.
        architecture: The architecture, without a distribution.
        chosen: The distribution that `owners` or `dist:Arch` named.
    """
    offers = catalogue.models.get(architecture, ())
    suitable = [row for row in offers if chosen is None or _is_from(row, chosen)]
    if len(suitable) > 1:
        problems = [_conflict(catalogue, architecture, suitable)]
    elif suitable:
        problems = [_malformed(suitable[0])]
    else:
        problems = _absent(catalogue, architecture, chosen)
    return PluginError(f"architecture {architecture!r}", problems)


def warnings_of(catalogue: Catalogue) -> list[str]:
    """What the user should know of a catalogue: metadata that could not be read, and choices that match nothing."""
    unreadable = [
        f"the plugins of {where} are not seen, its metadata cannot be read: {says}"
        for where, says in catalogue.unreadable
    ]
    return unreadable + unmet_choices(catalogue)


def unmet_choices(catalogue: Catalogue) -> list[str]:
    """Names in the selection and in `owners` that match nothing, with what was probably meant."""
    texts = []
    distributions = _distinct(row.distribution for row in catalogue.rows())
    for name in catalogue.selection.unknown(distributions):
        texts.append(f"the selection {catalogue.selection} names {name!r}: {_unknown_distribution(catalogue, name)}")
    for architecture, distribution in catalogue.owners.items():
        offers = _all_offers(catalogue, architecture)
        if not offers:
            texts.append(
                f"owner {architecture}={distribution}: no installed plugin offers {architecture!r}"
                + did_you_mean(architecture, _architectures(catalogue))
            )
        elif not any(_is_from(row, distribution) for row in offers):
            texts.append(
                f"owner {architecture}={distribution}: {distribution!r} does not offer {architecture!r}; "
                f"it is offered by {_listed(row.distribution for row in offers)}"
            )
    return texts


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is near or contains `name`. Case does not count."""
    by_lower = {each.lower(): each for each in known}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.6)
    near = near or sorted((each for each in by_lower if len(wanted) > 2 and wanted in each), key=len)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def _conflict(catalogue: Catalogue, architecture: str, offers: Sequence[ModelPlugin]) -> Problem:
    offers = sorted(offers, key=lambda row: (normalized(row.distribution or ""), row.value))
    names = _distinct(row.distribution for row in offers)
    lines = "\n".join(f"    {row.origin}  {row.value}  ({row.file or 'file not found'})" for row in offers)
    if len(names) < len(offers):
        return Problem(
            "",
            f"one distribution offers it more than once, so no choice of yours can tell the offers apart:\n{lines}",
            f"report it to its author, who has to keep one; until then use another version of {_listed(names)}",
        )
    other = names[-1]
    selection = catalogue.selection.excluding(names[0])
    return Problem(
        "",
        f"{len(offers)} enabled distributions offer it, and none was chosen:\n{lines}",
        f"choose one with --owner {architecture}={other} (in Python: owners={{{architecture!r}: {other!r}}}),\n"
        f"or ask for it as {f'{other}:{architecture}'!r},\n"
        f'or switch the other off with --plugins "{selection}"',
    )


def _malformed(row: ModelPlugin) -> Problem:
    return Problem(
        f"entry point of {row.origin}",
        row.malformed_value or "",
        f"its author has to write `{row.name} = {row.form}`; until then use another version of it",
    )


def _absent(catalogue: Catalogue, architecture: str, chosen: str | None) -> list[Problem]:
    """Everything that may explain the absence; where nothing does, one problem that says what there is."""
    problems = [
        _blocked(catalogue, row)
        for row in catalogue.blocked
        if isinstance(row, ModelPlugin) and row.name == architecture and (chosen is None or _is_from(row, chosen))
    ]
    others = catalogue.models.get(architecture, ())
    if chosen is not None and others and not problems:
        names = _distinct(row.distribution for row in others)
        problems.append(
            Problem(
                "",
                f"distribution {chosen!r} was chosen and does not offer it; it is offered by {_listed(names)}"
                + did_you_mean(chosen, names),
                f"choose {_listed(names)}, or install a version of {chosen!r} that offers it",
            )
        )
    if problems:
        return problems

    from torchplug.host.metadata import Kind, scan

    findings = [
        found
        for installed in scan()
        if chosen is None or normalized(chosen) == normalized(installed.name or "")
        for found in installed.findings
        if architecture in found.hides or found.kind is Kind.UNREADABLE
    ]
    explained = any(architecture in found.hides for found in findings)
    explanations = [Problem(found.where, found.says, found.fix) for found in findings]
    if explained:
        return explanations
    hint = did_you_mean(architecture, _architectures(catalogue))
    return [
        Problem(
            "",
            f"no installed plugin offers it{hint}",
            "`torchplug list` shows what there is; `pip install` the distribution that offers it,\n"
            "and if that is installed already, `torchplug doctor` says why it is not seen",
        ),
        *explanations,
    ]


def _blocked(catalogue: Catalogue, row: ModelPlugin) -> Problem:
    if catalogue.allowlist is not None and not catalogue.allowlist.trusts(row.distribution):
        lists = " and ".join(catalogue.allowlist.sources)
        fix = f"if its code may run here, add {row.distribution or 'its name'!r} to {lists}"
        return Problem("", f"{row.origin} offers it, and {catalogue.why_blocked(row)}", fix)
    wider = catalogue.selection.including(row.distribution) if row.distribution else "*"
    environment = f", or change {catalogue.selection.source}" if catalogue.selection.source else ""
    return Problem(
        "",
        f"{row.origin} offers it, and the selection {catalogue.selection} blocks that distribution",
        f'enable it with --plugins "{wider}" (in Python: plugins={wider!r}){environment}',
    )


def _unknown_distribution(catalogue: Catalogue, name: str) -> str:
    for row in catalogue.rows():
        if normalized(row.name) == name:
            return f"that is a plugin's name; a selection names distributions, this one is {row.distribution!r}"
    known = _distinct(row.distribution for row in catalogue.rows())
    return f"{_presence(name)}{did_you_mean(name, known)}"


def _presence(name: str) -> str:
    import importlib_metadata

    try:
        importlib_metadata.distribution(name)
    except Exception:
        return "no distribution of that name is installed"
    return "that distribution is installed and offers no plugin (`torchplug doctor` tells if its metadata is hidden)"


def _is_from(row: PluginRow, distribution: str) -> bool:
    return row.distribution is not None and normalized(row.distribution) == normalized(distribution)


def _all_offers(catalogue: Catalogue, architecture: str) -> list[PluginRow]:
    return [row for row in catalogue.rows() if isinstance(row, ModelPlugin) and row.name == architecture]


def _architectures(catalogue: Catalogue) -> list[str]:
    return sorted({row.name for row in catalogue.rows() if isinstance(row, ModelPlugin)})


def _distinct(names: Iterable[str | None]) -> list[str]:
    return sorted({name for name in names if name}, key=normalized)


def _listed(names: Iterable[str | None]) -> str:
    return " and ".join(repr(name) for name in _distinct(names)) or "a distribution without a name"
