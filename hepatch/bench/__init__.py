"""`hepatch bench`: systems side by side on one machine, each in a process of its own, its timed calls taking turns."""
