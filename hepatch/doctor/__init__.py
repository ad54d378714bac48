"""`hepatch doctor`: what is installed, what is patched, what a configuration would get, and why."""
