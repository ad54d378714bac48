"""Every order of events against the stand-in, each in a process of its own, and what a switch must never do.

No test here loads hepatch or a host in pytest's process: functions that take a `case` run in the children.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import sys
import threading
import time
import types

import pytest

from tests import forked, standin

# What hepatch and torch load on the way, so that a child loads nothing but hepatch and the stand-in.
PRELOAD = ("torch", "torch._dynamo", "wrapt", "pydantic_settings")
EVENTS = ("hepatch", "deepspeed", "transformers", "build", "wrap", "enable", "disable")
NEEDS = {
    "build": {"deepspeed", "transformers"},
    "wrap": {"deepspeed", "transformers"},
    "enable": {"hepatch"},
    "disable": {"hepatch"},
}
WRAPPED = ("generate", "_sample")
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if all(needed in order[: order.index(event)] for event in NEEDS for needed in NEEDS[event])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The stand-in as it should be."""
    return str(standin.write(tmp_path_factory.mktemp("standin")))


@pytest.fixture(scope="module")
def forks():
    """A process with torch loaded that forks the children of this file."""
    with forked.Forks(PRELOAD) as server:
        yield server


@pytest.fixture
def run(forks):
    """Run one function of this file in a child and return its result; its exceptions are failures."""

    def call(function, folder, env=None, **case):
        answer = forks.run(f"tests.test_activation:{function}", {"folder": folder, **case}, env)
        assert "error" not in answer, answer["traceback"] or answer
        return answer["result"]

    return call


class Lines(logging.Handler):
    """The messages of hepatch's logger, with their levels."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []
        logging.getLogger("hepatch").addHandler(self)

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


# --- every order


def play(case):
    """Play the events and say what stands where, and what a generate does, at the end."""
    standin.use(case["folder"])
    world = {"foreign": dict.fromkeys(WRAPPED, 0)}
    for event in case["events"]:
        _happen(event, world)
    import hepatch

    before = {name: raw for name, (raw, _) in standin.attributes().items()}
    _happen(case["events"][-1] if case["events"][-1] in ("enable", "disable") else "nothing", world)
    last = [event for event in case["events"] if event in ("hepatch", "enable", "disable")][-1]
    _happen("enable" if last == "hepatch" else last, world)
    after = standin.attributes()
    engine = world["engine"]
    engine.eval()
    return {
        "on": hepatch.activation.is_on(),
        "unchanged by repetition": [name for name in after if after[name][0] is before[name]],
        "original": [name for name, (raw, original) in after.items() if raw is original],
        "foreign on top": [name for name, (raw, _) in after.items() if _is_foreign(raw)],
        "signature kept": [name for name, (raw, original) in after.items() if _signature(raw) == _signature(original)],
        "states": {name.rsplit(".", 1)[1]: state for name, state in hepatch.activation.patch_states().items()},
        "stock engine": bool(engine.inference_policies),
        "generate": _outcome(lambda: _as_new(engine).generate(standin.ids())),
        "generate(inputs=)": _outcome(
            lambda: setattr(engine, "_total_batch_size", None) or engine.generate(inputs=standin.ids())
        ),
        "ours per call": _ours_per_call(engine),
        "foreign per call": _foreign_per_call(engine, world),
        "residue": [key for key in vars(engine.module) if "hepatch" in key],
        "error": hepatch.activation.last_error(),
    }


def _happen(event, world):
    if event == "hepatch":
        import hepatch
    elif event == "deepspeed":
        import deepspeed

        world["Engine"] = deepspeed.DeepSpeedHybridEngine
    elif event == "transformers":
        import transformers
    elif event == "build":
        world["engine"] = world["Engine"](None, standin.model())
    elif event == "wrap":
        import transformers

        _wrap(world["Engine"], "generate", world["foreign"])
        _wrap(transformers.GenerationMixin, "_sample", world["foreign"])
    elif event in ("enable", "disable"):
        import hepatch

        getattr(hepatch, event)()


def _wrap(owner, name, counts):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        counts[name] += 1
        return original(*args, **kwargs)

    wrapper.foreign = True
    setattr(owner, name, wrapper)


def _is_foreign(raw):
    # By its very type: ours on top shows the class and the attributes of what it wraps.
    return type(raw) is types.FunctionType and hasattr(raw, "foreign")


def _signature(function):
    return str(inspect.signature(function))


def _as_new(engine):
    engine._total_batch_size = None
    return engine


def _outcome(call):
    try:
        return list(call().shape)
    except Exception as error:  # noqa: BLE001 - its class is the outcome
        return type(error).__name__


def _ours_per_call(engine):
    """Times that one generate of the model reached hepatch's loop."""
    attachments = sys.modules.get("hepatch.attachments")
    attachment = attachments.of_engine(engine) if attachments else None
    if attachment is None:
        engine.module.generate(standin.ids())
        return 0
    before = attachment.counters.eager_calls
    engine.module.generate(standin.ids())
    return attachment.counters.eager_calls - before


def _foreign_per_call(engine, world):
    before = dict(world["foreign"])
    _outcome(lambda: engine.generate(standin.ids()))
    return {name: world["foreign"][name] - before[name] for name in WRAPPED}


def _on_after(events):
    """Whether hepatch is on after these events: whatever was asked last."""
    asked = [event for event in events if event in ("hepatch", "enable", "disable")]
    return bool(asked) and asked[-1] != "disable"


def test_orders_are_all_there():
    """Seven events, of which two need both hosts and two need hepatch."""
    assert len(ORDERS) == 5040 // 6 // 3


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_order(run, folder, order):
    """The outcome depends on what was asked last and on who wrapped first, and on nothing else."""
    seen = run("play", folder, events=order)
    on = _on_after(order)
    built_on = _on_after(order[: order.index("build")])
    ours_below = _on_after(order[: order.index("wrap")])
    names = set(seen["states"])
    topped = set(WRAPPED) if ours_below or not on else set()

    assert seen["error"] is None
    assert seen["on"] is on
    assert set(seen["unchanged by repetition"]) == names
    assert set(seen["foreign on top"]) == topped
    assert set(seen["original"]) == (set() if on else names - set(WRAPPED))
    assert set(seen["signature kept"]) >= names - set(WRAPPED)
    for name, state in seen["states"].items():
        if on:
            assert state.startswith("applied"), name
        elif name in WRAPPED and ours_below:
            assert state.startswith("buried under"), name
        else:
            assert state == "not applied: hepatch.disable() was called", name
    assert seen["stock engine"] is not built_on
    assert seen["generate"] == ([3, 4] if on or built_on else "AttributeError")
    assert seen["generate(inputs=)"] == ([3, 4] if on else "KeyError")
    assert seen["ours per call"] == int(on)
    assert seen["foreign per call"] == {"generate": 1, "_sample": int(on or built_on)}
    assert seen["residue"] == []


# --- import


def test_import_loads_no_host_prints_nothing_and_starts_nothing():
    """`import hepatch` registers hooks and does no more."""
    done = forked.run_python(
        "import sys, threading; before = set(sys.modules); import hepatch\n"
        "roots = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "heavy = roots & {'torch', 'deepspeed', 'transformers', 'pydantic', 'pydantic_settings', 'numpy', 'triton'}\n"
        "assert not heavy, heavy\n"
        "assert threading.active_count() == 1\n"
        "import os; children = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read()\n"
        "assert not children, children\n"
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_takes_no_time():
    """Less than half a second more than an interpreter that does nothing, at the best of three."""

    def best(code):
        def once():
            start = time.perf_counter()
            assert forked.run_python(code).returncode == 0
            return time.perf_counter() - start

        return min(once() for _ in range(3))

    assert best("import hepatch") - best("pass") < 0.5


def test_public_names():
    """What the package exports, callable also after its submodule of the same name was imported."""
    done = forked.run_python(
        "import hepatch, hepatch.report as _\n"
        "from hepatch.report import Report\n"
        "assert hepatch.__all__ == sorted(hepatch.__all__)\n"
        "assert all(hasattr(hepatch, name) for name in hepatch.__all__)\n"
        "assert callable(hepatch.report), hepatch.report\n"
    )

    assert done.returncode == 0, done.stderr


# --- hooks


def hook_fails(case):
    """A bug of ours inside the hook."""
    standin.use(case["folder"])
    lines = Lines()
    import hepatch
    from hepatch import activation

    def broken(**_):
        raise ZeroDivisionError("a bug")

    activation._apply = broken
    import deepspeed
    import transformers

    assert transformers.GenerationMixin
    assert deepspeed.DeepSpeedHybridEngine
    return {
        "lines": lines.lines,
        "error": hepatch.activation.last_error(),
        "touched": [name for name, (raw, original) in standin.attributes().items() if raw is not original],
    }


def test_hook_that_fails_leaves_the_host_import_working(run, folder):
    """The traceback is kept, one warning is logged for both hosts, and nothing is patched."""
    seen = run("hook_fails", folder)

    assert seen["touched"] == []
    assert "ZeroDivisionError: a bug" in seen["error"]
    assert len(seen["lines"]) == 1
    assert "stays off: ZeroDivisionError: a bug" in seen["lines"][0]


def half_applied(case):
    """A bug of ours while the fourth of seven attributes is set."""
    standin.use(case["folder"])
    from hepatch import activation
    from hepatch.patching import Patch

    stock, calls = Patch.apply, []

    def broken(patch):
        calls.append(patch)
        if len(calls) % 4 == 0:
            raise ZeroDivisionError("a bug")
        stock(patch)

    Patch.apply = broken
    import deepspeed  # noqa: F401 - its import fires the hook
    import transformers  # noqa: F401 - its import fires the hook

    first = [name for name, (raw, original) in standin.attributes().items() if raw is not original]
    activation.enable()
    second = [name for name, (raw, original) in standin.attributes().items() if raw is not original]
    return len(calls), first, second, activation.is_on(), "a bug" in activation.last_error()


def test_failure_halfway_reverts_what_was_applied(run, folder):
    assert run("half_applied", folder) == [12, [], [], False, True]


def late_hook(case):
    standin.use(case["folder"])
    import hepatch

    hepatch.disable()
    hepatch.disable()
    import deepspeed  # noqa: F401 - its import fires the hook
    import transformers  # noqa: F401 - its import fires the hook

    touched = [name for name, (raw, original) in standin.attributes().items() if raw is not original]
    hepatch.enable()
    patched = [name for name, (raw, original) in standin.attributes().items() if raw is not original]
    return touched, len(patched)


def test_hook_that_fires_after_disable_does_nothing(run, folder):
    assert run("late_hook", folder) == [[], 10]


def half_loaded(case):
    """Another thread is in the middle of importing DeepSpeed while this one imports hepatch."""
    standin.use(case["folder"])
    thread = threading.Thread(target=lambda: __import__("deepspeed"))
    thread.start()
    while "deepspeed.runtime.hybrid_engine" not in sys.modules:
        time.sleep(0.01)
    import hepatch

    thread.join()
    import transformers  # noqa: F401 - the last host

    return hepatch.activation.patch_states(), hepatch.activation.last_error()


def test_import_while_another_thread_imports_the_host(run, tmp_path):
    """Half a module has no targets, which must not be taken for a release that lacks them."""
    rename = {"class WorkspaceOp:": "import time; time.sleep(1)\n\n\nclass WorkspaceOp:"}
    states, error = run("half_loaded", str(standin.write(tmp_path, rename)))

    assert error is None
    assert set(states.values()) == {"applied"}


def inside_the_import(case):
    """Something that the host itself imports imports hepatch."""
    standin.use(case["folder"])
    import deepspeed  # noqa: F401 - imports hepatch in the middle

    import hepatch

    loaded_on = hepatch.activation.is_on()
    import transformers  # noqa: F401 - the other host's hook sees to it

    return loaded_on, sorted(set(hepatch.activation.patch_states().values())), hepatch.activation.last_error()


def test_import_from_the_middle_of_the_host_import(run, tmp_path):
    """Half a module is left alone; the next occasion patches it."""
    rename = {"class WorkspaceOp:": "import hepatch\n\n\nclass WorkspaceOp:"}

    assert run("inside_the_import", str(standin.write(tmp_path, rename))) == [False, ["applied"], None]


# --- the environment


def environment_wins(case):
    standin.use(case["folder"])
    lines = Lines()
    import hepatch

    logging.getLogger("hepatch").setLevel(logging.DEBUG)
    _happen("deepspeed", world := {})
    _happen("transformers", world)
    hepatch.enable()
    touched = [name for name, (raw, original) in standin.attributes().items() if raw is not original]
    states = sorted(set(hepatch.activation.patch_states().values()))
    del os.environ["HEPATCH"]
    hepatch.enable()
    return touched, states, lines.lines, sorted(set(hepatch.activation.patch_states().values()))


def test_environment_wins_over_enable(run, folder):
    """HEPATCH=0 takes it out; what it was that kept it out is said at info level and in the states."""
    touched, states, lines, later = run("environment_wins", folder, {"HEPATCH": "0"})

    assert touched == []
    assert states == ["not applied: HEPATCH=0 is set in the environment"]
    assert lines == ["INFO hepatch: HEPATCH=0 is set in the environment, so enable() does nothing."]
    assert later == ["applied"]


def set_later(case):
    standin.use(case["folder"])
    import hepatch

    _happen("deepspeed", world := {})
    _happen("transformers", world)
    os.environ["HEPATCH"] = "0"
    hepatch.enable()
    return [name for name, (raw, original) in standin.attributes().items() if raw is not original]


def test_environment_that_changes_counts_at_the_next_enable(run, folder):
    assert run("set_later", folder) == []


def bad_value(case):
    standin.use(case["folder"])
    lines = Lines()
    _happen("hepatch", world := {})
    _happen("deepspeed", world)
    _happen("transformers", world)
    import hepatch

    try:
        hepatch.enable()
    except ValueError as error:
        return str(error), sorted(set(hepatch.activation.patch_states().values()))
    return lines.lines, sorted(set(hepatch.activation.patch_states().values()))


def test_bad_value_costs_a_line_and_no_import(run, folder):
    lines, states = run("bad_value", folder, {"HEPATCH_LOG": "loud"})

    assert len(lines) == 1
    assert "HEPATCH_LOG='loud'" in lines[0]
    assert states == ["applied"]


def test_bad_value_under_strict_raises_from_enable_and_from_no_import(run, folder):
    message, states = run("bad_value", folder, {"HEPATCH_LOG": "loud", "HEPATCH_STRICT": "1"})

    assert "HEPATCH_LOG='loud'" in message
    assert all(state.startswith("not applied: ValueError") for state in states)


def levels(case):
    standin.use(case["folder"])
    logger = logging.getLogger("hepatch")
    import hepatch

    hepatch.enable()
    first = logger.level
    os.environ["HEPATCH_LOG"] = "debug"
    hepatch.enable()
    second = logger.level
    logger.setLevel(logging.ERROR)
    hepatch.enable()
    return first, second, logger.level


def test_level_of_the_logger_is_the_setting_unless_the_user_set_one(run, folder):
    assert run("levels", folder, {"HEPATCH_LOG": "info"}) == [logging.INFO, logging.DEBUG, logging.ERROR]


# --- all or nothing

MISSING = {
    "get_hybrid_engine_config": {"get_hybrid_engine_config": "hybrid_engine_config_of"},
    "populate_all_inference_policies": {"populate_all_inference_policies": "populate_policies"},
    "WorkspaceOp": {"WorkspaceOp": "Workspace"},
    "DeepSpeedHybridEngine": {
        "class DeepSpeedHybridEngine": "class HybridEngine",
        "vars(DeepSpeedHybridEngine)": "vars(HybridEngine)",
        "import DeepSpeedHybridEngine": "import HybridEngine as DeepSpeedHybridEngine",
    },
    "generate": {"def generate(self, *inputs": "def rollout(self, *inputs"},
    "_sample": {"_sample": "_loop"},
    "GenerationMixin": {"GenerationMixin": "Generation"},
    "streamer": {"streamer": "stream"},
}


def missing(case):
    standin.use(case["folder"])
    lines = Lines()
    import hepatch

    for name in case["hosts"]:
        __import__(name)
    hook_lines = list(lines.lines)
    try:
        hepatch.enable()
        raised = None
    except RuntimeError as error:
        raised = str(error)
    touched = []
    for module in ("deepspeed.runtime.config", "deepspeed.runtime.hybrid_engine", "transformers.generation.utils"):
        for holder in (sys.modules[module], *vars(sys.modules[module]).values()):
            values = vars(holder).items() if hasattr(holder, "__dict__") else ()
            touched += [name for name, value in values if type(value).__name__ == "Installed"]
    return hook_lines, lines.lines[len(hook_lines) :], touched, raised, hepatch.activation.is_on()


@pytest.mark.parametrize("hosts", [("deepspeed", "transformers"), ("transformers", "deepspeed")], ids="-".join)
@pytest.mark.parametrize("name", MISSING)
def test_one_missing_target_leaves_everything_unpatched(run, tmp_path, name, hosts):
    """One warning names it; asking again neither patches nor repeats it; the hosts' imports succeed."""
    folder = str(standin.write(tmp_path, MISSING[name]))
    hook_lines, later_lines, touched, raised, on = run("missing", folder, hosts=hosts)

    assert touched == []
    assert on is False
    assert raised is None
    assert len(hook_lines) == 1
    assert hook_lines[0].startswith("WARNING hepatch: stays off: ")
    assert name in hook_lines[0]
    assert later_lines == []


def test_strict_raises_from_enable_and_from_no_import(run, tmp_path):
    folder = str(standin.write(tmp_path, MISSING["_sample"]))
    *_, touched, raised, on = run("missing", folder, {"HEPATCH_STRICT": "1"}, hosts=("deepspeed", "transformers"))

    assert touched == []
    assert on is False
    assert "GenerationMixin._sample is missing" in raised


# --- threads


def hammer(case):
    """Threads switch and use engines at the same time."""
    standin.use(case["folder"])
    import hepatch

    _happen("deepspeed", world := {})
    _happen("transformers", world)
    engines = [world["Engine"](None, standin.model()) for _ in range(3)]
    failures = []
    sys.setswitchinterval(1e-5)

    def switch(seed):
        for step in range(60):
            (hepatch.enable if (seed + step) % 2 else hepatch.disable)()

    def use(engine):
        for _ in range(60):
            try:
                engine.eval()
                engine.generate(standin.ids())
                world["Engine"](None, standin.model())
            except Exception as error:  # noqa: BLE001, PERF203 - every one is a failure
                failures.append(repr(error))

    threads = [threading.Thread(target=switch, args=(seed,)) for seed in range(4)]
    threads += [threading.Thread(target=use, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hepatch.disable()
    touched = [name for name, (raw, original) in standin.attributes().items() if raw is not original]
    hepatch.enable()
    return failures, touched, sorted(set(hepatch.activation.patch_states().values()))


def test_threads_may_switch_while_others_generate(run, folder):
    assert run("hammer", folder) == [[], [], ["applied"]]


# --- the stand-in is the hosts'


def signatures(case):
    if case["folder"]:
        standin.use(case["folder"])
    import deepspeed.runtime.hybrid_engine as host
    from deepspeed.runtime import config
    from transformers.generation import utils

    engine = host.DeepSpeedHybridEngine
    found = {
        "get_hybrid_engine_config": config.get_hybrid_engine_config,
        "WorkspaceOp": host.WorkspaceOp,
        "_sample": utils.GenerationMixin._sample,
        **{name: getattr(engine, name) for name in ("__init__", "populate_all_inference_policies", "generate", "eval")},
    }
    own = [name for name in found if name in vars(engine)]
    return {name: list(inspect.signature(value).parameters) for name, value in found.items()}, own


def test_standin_has_the_signatures_of_the_real_hosts(folder):
    """Where a new DeepSpeed or transformers drifts, this fails first."""
    with forked.Forks(env={"HEPATCH": "0"}) as forks:
        copy, real = (forks.run("tests.test_activation:signatures", {"folder": where}) for where in (folder, ""))

    assert copy["result"] == real["result"]
