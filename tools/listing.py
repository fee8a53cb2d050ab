"""Tables of names on a terminal: there to be copied, so none is cut, and none read as markup."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_listing(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under column `names`, as wide as they are."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    needed = sum(max(map(len, column)) + 3 for column in zip(names, *rows, strict=True)) + 1
    console = Console()
    console.width = max(console.width, needed)
    console.print(table)
