"""`kvtier store`: what an operator says about the blocks of a store. Parses options only.

Each command opens the store itself: no other process may own it meanwhile.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.tools import options

app = typer.Typer(
    help="Namespaces, pins, expiry and deletion in a store that no process owns now.",
    no_args_is_help=True,
)

Store = Annotated[Path, typer.Argument(metavar="STORE", help="Directory of the store.")]
Namespace = Annotated[
    str, typer.Option("--namespace", metavar="HEX", help="64 digits, as `namespaces` lists them.")
]
Prefix = Annotated[
    str, typer.Option("--prefix", metavar="KEYHEX", help="Key of the prefix's last block.")
]
FirstToGo = Annotated[
    str, typer.Option("--prefix", metavar="KEYHEX", help="Key of the first block to go.")
]
FORM = "90s, 30m, 48h or 7d"
Label = Annotated[str, typer.Option("--label", metavar="L", help="Name of the pin.")]


@app.command()
def namespaces(store: Store, as_json: options.Json = False) -> None:
    """List namespaces with their blocks, bytes and pinned bytes."""
    from kvtier.tools.custody import list_namespaces

    list_namespaces(store, as_json=as_json)


@app.command()
def pins(store: Store, as_json: options.Json = False) -> None:
    """List pins."""
    from kvtier.tools.custody import list_pins

    list_pins(store, as_json=as_json)


@app.command()
def pin(
    store: Store,
    namespace: Namespace,
    prefix: Prefix,
    label: Label,
    after: Annotated[
        str | None,
        typer.Option("--expires-after", metavar="DURATION", help=f"Lift it after so long: {FORM}."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--expires-at", metavar="ISO", help="Lift it then: 2027-01-31T12:00Z."),
    ] = None,
) -> None:
    """Hold a prefix (a block and all before it) against eviction, until it is lifted."""
    from kvtier.tools.custody import pin_prefix

    pin_prefix(store, namespace, prefix, label, after=after, at=at)


@app.command()
def unpin(
    store: Store,
    label: Label,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="HEX", help="With --prefix: that pin only.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="KEYHEX", help="Key of the pinned block.")
    ] = None,
) -> None:
    """Lift one pin, or every pin with a label."""
    from kvtier.tools.custody import lift_pins

    lift_pins(store, label, namespace, prefix)


@app.command()
def expire(
    store: Store,
    namespace: Namespace,
    prefix: FirstToGo,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="DURATION", help=f"So long from now: {FORM}."),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="ISO", help="At that moment: 2027-01-31T12:00Z.")
    ] = None,
) -> None:
    """Serve a block and all that follows it, pinned or not, no longer than that."""
    from kvtier.tools.custody import expire_branch

    expire_branch(store, namespace, prefix, after=after, at=at)


@app.command()
def forget(
    store: Store,
    namespace: Namespace,
    prefix: FirstToGo,
) -> None:
    """Remove a block and all that follows it, pinned or not."""
    from kvtier.tools.custody import forget_branch

    forget_branch(store, namespace, prefix)


@app.command()
def delete(
    store: Store,
    namespace: Namespace,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a namespace, pins included."""
    from kvtier.tools.custody import delete_namespace

    if not yes:
        typer.confirm(f"Remove namespace {namespace} from {store}?", abort=True)
    delete_namespace(store, namespace)
