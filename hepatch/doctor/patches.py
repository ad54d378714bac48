"""Every patch, its state, and what to do where hepatch does not act."""

from __future__ import annotations

from hepatch import activation
from hepatch.doctor.findings import PatchState
from hepatch.targets import TARGETS


def look() -> list[PatchState]:
    """The patches in the order of `TARGETS`."""
    states = activation.patch_states()
    optional = {target.name for target in TARGETS if target.optional}
    return [_explain(name, state, name in optional) for name, state in states.items()]


def _explain(name: str, state: str, is_optional: bool) -> PatchState:
    if state == "applied":
        return PatchState(name, state, True)
    if state.startswith("applied under "):
        who = state.removeprefix("applied under ")
        return PatchState(
            name, state, True, f"{who} wrapped it later; hepatch acts as long as that calls what it wrapped"
        )
    if state.startswith("buried under "):
        return PatchState(
            name, state, False, "hepatch is off, and what it left beneath is one plain call; enable() revives it"
        )
    if state == "not applied" and activation.is_on():
        if is_optional:
            return PatchState(name, state, True, "this transformers has no such loop, and nothing depends on it")
        return PatchState(
            name,
            "buried: another library has put its own in this place, and ours is not found beneath it",
            False,
            "import that library before hepatch, or call hepatch.enable() after it",
        )
    return PatchState(name, state, False)
