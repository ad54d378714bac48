"""Orders of import, build, wrap and switch with the real DeepSpeed and transformers, each in a fresh process."""

from __future__ import annotations

import json
import logging
import sys
import types

import pytest

from tests import forked

NEW_TOKENS = 6

# Each order is a list of events; `generate` says through which path tokens must come, after the colon.
ORDERS = {
    "hepatch first": "hepatch deepspeed transformers build generate:fused disable generate:stock enable generate:fused",
    "hepatch last": "deepspeed transformers hepatch build generate:fused disable generate:stock",
    "hepatch between": "transformers hepatch deepspeed build generate:fused disable disable generate:stock",
    "class by name first": "by_name hepatch build generate:fused disable generate:stock enable enable generate:fused",
    "engine first": "deepspeed transformers build hepatch generate:fused disable",
    "engine while off": "hepatch disable deepspeed transformers build enable generate:fused disable",
    "wrapped before": "deepspeed transformers wrap hepatch build generate:fused disable generate:stock",
    "wrapped after": "hepatch deepspeed transformers wrap build generate:fused disable generate:stock"
    " enable generate:fused",
    "two engines": "hepatch deepspeed build build generate:fused disable generate:stock enable generate:fused",
}


# What a transformers of old has not: it prepares caches inside generate, and none that a region could stand in for.
ABSENT_BEFORE_LAYERED_CACHES = "_prepare_cache_for_generation"


def layered_caches():
    """Whether the installed transformers has KV caches to build regions on; without them every path is eager."""
    from transformers import cache_utils

    return hasattr(cache_utils, "CacheLayerMixin")


def patched_names():
    """Names of the attributes that are patched in the installed pair."""
    from transformers.generation.utils import GenerationMixin

    from hepatch.targets import TARGETS

    names = {target.attribute for target in TARGETS}
    return names if hasattr(GenerationMixin, ABSENT_BEFORE_LAYERED_CACHES) else names - {ABSENT_BEFORE_LAYERED_CACHES}


class World:
    """What happened so far in a child."""

    def __init__(self):
        self.engines = []
        self.foreign = 0
        self.originals = {}

    def happen(self, event):
        name, _, path = event.partition(":")
        getattr(self, name)(*filter(None, [path]))
        if name in ("deepspeed", "transformers") and "hepatch" not in sys.modules:
            self.originals.update(_attributes())

    def hepatch(self):
        import hepatch  # noqa: F401 - importing is the event

    def deepspeed(self):
        import deepspeed  # noqa: F401 - importing is the event

    def transformers(self):
        import transformers.generation.utils  # noqa: F401 - importing is the event

    def by_name(self):
        from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

        assert DeepSpeedHybridEngine
        self.originals.update(_attributes())

    def enable(self):
        import hepatch

        hepatch.enable()

    def disable(self):
        import hepatch

        hepatch.disable()

    def wrap(self):
        from deepspeed import DeepSpeedHybridEngine
        from transformers.generation.utils import GenerationMixin

        for owner, name in ((DeepSpeedHybridEngine, "eval"), (GenerationMixin, "_sample")):
            original = getattr(owner, name)

            def foreign(*args, _original=original, **kwargs):
                self.foreign += 1
                return _original(*args, **kwargs)

            setattr(owner, name, foreign)

    def build(self):
        from tests import engines

        model = engines.build_model("qwen2", seed=len(self.engines))
        oracle = engines.oracle(model)
        self.engines.append((engines.build_engine(model), oracle))

    def generate(self, path):
        """Generate from every engine, and through the engine where it was built with us; compare with the oracle."""
        from tests import engines

        steps = NEW_TOKENS - 1 if path == "fused" and layered_caches() else 0
        for engine, oracle in self.engines:
            engine.eval()
            prompt = engines.prompts(2, 7, (3,))
            arguments = {**prompt, "max_new_tokens": NEW_TOKENS, "do_sample": False}
            expected = oracle.generate(**arguments)
            before = self._region_steps(engine)
            got = engine.module.generate(**arguments)
            assert got.tolist() == expected.tolist(), "engine.module.generate"
            assert self._region_steps(engine) - before == steps, path
            if "_generate" in vars(engine):
                assert engine.generate(**arguments).tolist() == expected.tolist(), "engine.generate"

    def _region_steps(self, engine):
        attachments = sys.modules.get("hepatch.attachments")
        attachment = attachments.of_engine(engine) if attachments else None
        return attachment.counters.region_steps if attachment else 0


def _attributes():
    """The raw values of every attribute whose module is loaded."""
    places = {
        "deepspeed.runtime.config": [("", "get_hybrid_engine_config")],
        "deepspeed.runtime.hybrid_engine": [
            ("", "WorkspaceOp"),
            *(
                ("DeepSpeedHybridEngine", name)
                for name in ("__init__", "populate_all_inference_policies", "generate", "eval")
            ),
        ],
        "transformers.generation.utils": [
            ("GenerationMixin", "_sample"),
            ("GenerationMixin", "_prepare_cache_for_generation"),
            ("GenerationMixin", "_beam_search"),
            ("GenerationMixin", "_assisted_decoding"),
        ],
    }
    found = {}
    for module, attributes in places.items():
        for owner, name in attributes if module in sys.modules else ():
            holder = getattr(sys.modules[module], owner) if owner else sys.modules[module]
            if name != ABSENT_BEFORE_LAYERED_CACHES or name in vars(holder):
                found[name] = vars(holder)[name]
    return found


def play(events):
    """Run in the child: play the events and print what stands where at the end."""
    world = World()
    for event in events.split():
        world.happen(event)
    from hepatch import activation

    now = _attributes()
    # By their very types: a wrapper of ours shows the class and the name of what it wraps.
    plain = {name: value for name, value in now.items() if type(value) in (types.FunctionType, type)}
    foreign = [name for name, value in plain.items() if value.__name__ == "foreign"]
    answer = {
        "states": {name.rsplit(".", 1)[1]: state for name, state in activation.patch_states().items()},
        "original": [name for name, value in now.items() if world.originals.get(name) is value],
        "recorded": list(world.originals),
        "plain": [name for name in plain if name not in foreign],
        "foreign": foreign,
        "foreign calls": world.foreign,
        "error": activation.last_error(),
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def _run(code, **env):
    done = forked.run_python(code, **env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("name", ORDERS)
def test_order(name):
    """Tokens are the oracle's at every generate, by the path that was asked; off leaves the hosts' own objects."""
    order = ORDERS[name]
    answer, _ = _run(f"from tests import test_orders_real as t; t.play({order!r})")
    on = order.rfind("enable") > order.rfind("disable")
    every = patched_names()
    below = {"eval", "_sample"} if name == "wrapped after" else set()

    assert answer["error"] is None
    if on:
        assert {answer["states"][name].split(" under ")[0] for name in every} == {"applied"}
    else:
        assert set(answer["original"]) == set(answer["recorded"]) - set(answer["foreign"])
        assert set(answer["plain"]) == every - set(answer["foreign"])
        assert all(answer["states"][name].startswith("buried") for name in below)
    if "wrap" in order.split():
        assert set(answer["foreign"]) == ({"eval", "_sample"} if below or not on else set())
        assert answer["foreign calls"] > 0


def missing():
    """Run in the child: a DeepSpeed without one of the targets, and a whole training loop on it."""
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

    DeepSpeedHybridEngine.fill_policies = DeepSpeedHybridEngine.populate_all_inference_policies
    del DeepSpeedHybridEngine.populate_all_inference_policies
    before = _attributes_but_missing()
    logging.basicConfig(format="%(levelname)s %(message)s")
    import hepatch

    hepatch.enable()
    import transformers.generation.utils

    before.setdefault("_sample", vars(transformers.generation.utils.GenerationMixin)["_sample"])
    after = _attributes_but_missing()
    changed = [name for name in before if before[name] is not after[name]]
    sys.stdout.write("\n" + json.dumps({"changed": changed, "on": hepatch.activation.is_on()}) + "\n")


def _attributes_but_missing():
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

    DeepSpeedHybridEngine.populate_all_inference_policies = None
    try:
        return {name: value for name, value in _attributes().items() if value is not None}
    finally:
        del DeepSpeedHybridEngine.populate_all_inference_policies


def test_missing_target_leaves_the_real_hosts_untouched():
    """One line names what is missing."""
    answer, stderr = _run("from tests import test_orders_real as t; t.missing()")
    lines = [line for line in stderr.splitlines() if "hepatch" in line]

    assert answer == {"changed": [], "on": False}
    assert len(lines) == 1
    assert "DeepSpeedHybridEngine.populate_all_inference_policies is missing" in lines[0]


def test_environment_gives_stock_back():
    """HEPATCH=0 leaves every attribute as it is, whatever is called."""
    code = (
        "import hepatch, deepspeed, transformers.generation.utils, json\n"
        "hepatch.enable()\n"
        "from tests import test_orders_real as t\n"
        "print(json.dumps([type(value).__name__ for value in t._attributes().values()]))\n"
    )
    answer, _ = _run(code, HEPATCH="0")

    assert len(answer) == len(patched_names())
    assert set(answer) == {"function", "type"}
