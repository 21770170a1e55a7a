"""`torchplug api`: the hook API that this release serves, as a table or as JSON to compare releases by."""

from __future__ import annotations

from typing import Any

import click

from torchplug.cli.options import json_option, print_json
from torchplug.cli.tables import print_table


@click.command()
@json_option
def api(as_json: bool) -> None:
    """List the hooks of the API: when each may be called, which interfaces bring it, what it returns.

    With --json: every interface and every hook with its exact signature, argument places and older spellings. The
    checked-in docs/api.json is this output.
    """
    if as_json:
        print_json(api_as_dict())
        return
    from torchplug.hookspecs import BASE, TABLE

    print_table(
        ("hook", "phase", "needed by", "optional for", "returns"),
        [
            (
                f"{hook.name}{_signature(hook)}",
                hook.phase.value,
                ", ".join("every model" if name == BASE else name for name in hook.needed),
                ", ".join(hook.optional),
                hook.returns.says,
            )
            for hook in TABLE
        ],
    )


def api_as_dict() -> dict[str, Any]:
    """The hook table and the interfaces as JSON-ready data, in the table's order."""
    from torchplug.hookspecs import API_VERSION, TABLE
    from torchplug.host.catalogue import MODELS, WRAPPERS
    from torchplug.interfaces import INTERFACES, MOE_ATTRIBUTES, MULTIMODAL_FLAGS

    return {
        "api": API_VERSION,
        "entry_points": {"models": MODELS, "wrappers": WRAPPERS},
        "interfaces": {
            name: {
                "flag": row.flag,
                **({"older": {row.older.attribute: row.older.claims}} if row.older else {}),
                **({"flags": list(MULTIMODAL_FLAGS)} if name == "SupportsMultiModal" else {}),
                **({"attributes": list(MOE_ATTRIBUTES)} if name == "MixtureOfExperts" else {}),
            }
            for name, row in INTERFACES.items()
        },
        "hooks": {
            hook.name: {
                "signature": _signature(hook),
                "phase": hook.phase.value,
                "returns": hook.returns.says,
                "needed": list(hook.needed),
                "optional": list(hook.optional),
                "unless": hook.unless or None,
                "places": {argument: place.value for argument, place in hook.places.items()},
                "older": dict(hook.older),
            }
            for hook in TABLE
        },
    }


def _signature(hook: Any) -> str:
    """Argument names and defaults, without annotations: `(input_ids, *, is_multimodal=None)`."""
    parameters = [p.replace(annotation=p.empty) for p in hook.signature.parameters.values()]
    return str(hook.signature.replace(parameters=parameters, return_annotation=hook.signature.empty))
