"""`torchplug show ARCH`: who serves one architecture and, when asked to import it, what its class can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from torchplug.cli import rows
from torchplug.cli.options import json_option, open_catalogue, print_json, selection_options
from torchplug.cli.tables import print_table, printable

if TYPE_CHECKING:
    from torchplug.host.catalogue import Catalogue, ModelPlugin
    from torchplug.host.model import ModelClass


@click.command()
@click.argument("architecture", metavar="ARCH")
@click.option(
    "--import",
    "import_class",
    is_flag=True,
    help="Import the class (this runs the plugin's code and loads torch), check it, and show its interfaces and hooks.",
)
@selection_options
@json_option
def show(architecture: str, import_class: bool, plugins: str | None, owners: dict[str, str], as_json: bool) -> None:
    """Show who serves the architecture ARCH, from where, and who else offers it.

    ARCH is the name in config.json, or DIST:ARCH to ask for one distribution's. Metadata only, unless
    --import is given.
    """
    if import_class:
        from torchplug.host import Host

        host = Host(plugins, owners)
        model_class = host.model_class(architecture)
        catalogue = host.catalogue
    else:
        model_class = None
        catalogue = open_catalogue(plugins, owners)
    owner = catalogue.owner(architecture)
    others = [
        row for row in rows.models(catalogue) if row.name == owner.name and row.distribution != owner.distribution
    ]
    how = _how_chosen(catalogue, owner, architecture)
    if as_json:
        found = {
            "architecture": owner.architecture,
            "owner": rows.view(owner, catalogue).as_dict("architecture"),
            "chosen": how,
            "others": [row.as_dict("architecture") for row in others],
        }
        if model_class is not None:
            found["class"] = _class_as_dict(model_class)
        print_json(found)
        return
    _print_owner(owner, how)
    if others:
        click.echo("\nAlso offered by")
        rows.print_rows("architecture", others)
    if model_class is not None:
        _print_class(model_class)


def _how_chosen(catalogue: Catalogue, owner: ModelPlugin, asked: str) -> str:
    if asked != owner.name:
        return f"asked for as {asked!r}"
    if owner.name in catalogue.owners:
        return "chosen with --owner"
    return "the only enabled offer"


def _print_owner(owner: ModelPlugin, how: str) -> None:
    fields = {
        "architecture": owner.architecture,
        "owner": f"{owner.origin} ({how})",
        "entry point": owner.value,
        "file": str(owner.file or f"not found: there is no module {owner.module!r} on the import path"),
    }
    for name, value in fields.items():
        click.echo(f"{name:<14}{printable(value)}")


def _print_class(model_class: ModelClass) -> None:
    found = _class_as_dict(model_class)
    click.echo(f"{'class':<14}{found['class']}")
    click.echo(f"{'interfaces':<14}{', '.join(found['interfaces']) or 'none beyond the base model'}")
    if found["possible_interfaces"]:
        click.echo(f"{'possible':<14}{', '.join(found['possible_interfaces'])} (only a loaded model can tell)")
    click.echo(f"{'cache':<14}{_CACHES[found['cache']]}")
    click.echo("\nHooks; those of phase 'class' work without weights and device")
    print_table(("hook", "phase", "implemented at"), [tuple(hook.values()) for hook in found["hooks"]])
    if found["absent"]:
        click.echo("\nHooks that it does not have")
        print_table(("hook", "because"), list(found["absent"].items()))
    for warning in found["warnings"]:
        click.echo(printable(f"\nwarning: {warning['where']}: {warning['says']}\n  fix: {warning['fix']}"))


_CACHES: Final = {
    "paged": "keys and values of its attention layers",
    "state": "a state per request, of its recurrent layers",
    "paged+state": "keys and values of its attention layers, and a state per request of its recurrent ones",
    "none": "none: each request runs alone, with its whole prefix in every step",
    None: "known when a checkpoint is loaded (the class has no tiny_config to build)",
}


def _cache(model_class: ModelClass) -> str | None:
    """ "paged" for a model with attention layers of ours, "state" with recurrent ones, "paged+state" with both, "none"
    without either; None where no model can be built.

    The model is the class's own tiny one, with parameters that take no memory.
    """
    tiny = getattr(model_class.cls, "tiny_config", None)
    if tiny is None:
        return None
    import torch

    from torchplug import config
    from torchplug.host.loading import build_module, default_max_model_len
    from torchplug.layers.attention import Attention
    from torchplug.layers.recurrent import RecurrentLayer

    try:
        values = tiny()
        defaults = getattr(model_class.cls, "config_defaults", {})
        hf_config = config.HfConfig(values, source=f"{model_class.cls.__name__}.tiny_config()", defaults=defaults)
        longest = default_max_model_len(values)
        vllm_config = config.VllmConfig(
            config.ModelConfig("tiny", hf_config, torch.float32, longest), config.DeviceConfig(torch.device("cpu"))
        )
        module = build_module(model_class.cls, vllm_config, model_class.report.subject)
    except Exception:
        # `torchplug check` says what is wrong with a tiny_config; here it only means that there is nothing to look at.
        return None
    kinds = (("paged", Attention), ("state", RecurrentLayer))
    return "+".join(name for name, kind in kinds if any(isinstance(part, kind) for part in module.modules())) or "none"


def _class_as_dict(model_class: ModelClass) -> dict[str, Any]:
    report = model_class.report
    return {
        "class": f"{model_class.cls.__module__}.{model_class.cls.__qualname__}",
        "interfaces": sorted(report.interfaces),
        "possible_interfaces": sorted(report.possible),
        "cache": _cache(model_class),
        "hooks": [
            {"hook": name, "phase": str(each.hook.phase), "implemented_at": each.where}
            for name, each in report.implementations.items()
        ],
        "absent": dict(report.absent),
        "warnings": [{"where": each.where, "says": each.says, "fix": each.fix} for each in report.warnings],
    }
