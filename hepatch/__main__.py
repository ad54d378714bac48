"""`python -m hepatch`: the command line where the script is not on the path."""

from __future__ import annotations

from hepatch.commands import app

if __name__ == "__main__":
    app(prog_name="hepatch")
