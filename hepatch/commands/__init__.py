"""The command line. One file per command; torch is loaded by the command that needs it, not here."""

from __future__ import annotations

import typer

from hepatch.commands.bench import bench
from hepatch.commands.demo import demo
from hepatch.commands.doctor import doctor

app = typer.Typer(
    name="hepatch",
    help="Fast rollouts for DeepSpeed's HybridEngine: one import, nothing else to change.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _hepatch() -> None:
    # An app with one command and no callback would drop the command's name: `hepatch` alone would start the demo.
    pass


app.command(name="bench")(bench)
app.command(name="demo")(demo)
app.command(name="doctor")(doctor)
