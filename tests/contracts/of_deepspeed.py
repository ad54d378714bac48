"""What hepatch relies on in DeepSpeed."""

from __future__ import annotations

import inspect
import sys

import torch

from tests import engines
from tests.contracts.contract import Contract, Then, hide, show


def _engine():
    return engines.build_engine(engines.build_model("qwen2"))


def _hybrid_engine():
    import deepspeed.runtime.hybrid_engine as module

    return module


def _class():
    return _hybrid_engine().DeepSpeedHybridEngine


def _own(name):
    """A method that the class itself defines: one that it inherits is another engine's."""

    def holds():
        method = inspect.unwrap(vars(_class())[name])
        assert callable(method), f"it is a {type(method).__name__}"
        return method

    return holds


def _policies_hold():
    """It fills `inference_policies`, called by the constructor with nothing."""
    method = _own("populate_all_inference_policies")()
    assert list(inspect.signature(method).parameters) == ["self"]
    source = inspect.getsource(method)
    assert "self.inference_policies" in source, "it no longer fills inference_policies"
    assert "self.inference_policies" in inspect.getsource(_class().create_inference_containers)


def _workspace_holds():
    """The constructor builds it under its own module's name and without an argument."""
    module = _hybrid_engine()
    assert inspect.isclass(inspect.unwrap(module.WorkspaceOp))
    assert "WorkspaceOp()" in inspect.getsource(inspect.unwrap(vars(_class())["__init__"]))
    for name in ("retake_workspace", "release_workspace", "is_allocated"):
        assert callable(getattr(inspect.unwrap(module.WorkspaceOp), name)), name


def _constructor_holds():
    parameters = inspect.signature(_own("__init__")()).parameters
    assert list(parameters)[:3] == ["self", "args", "model"], list(parameters)


def _generate_holds():
    """It passes everything on to `_generate` and keeps the batch in `_total_batch_size`."""
    method = _own("generate")()
    kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    source = inspect.getsource(method)
    assert "self._generate(*inputs, **kwargs)" in source, "it no longer calls _generate"
    assert "_total_batch_size" in source


def _eval_holds():
    assert list(inspect.signature(_own("eval")()).parameters) == ["self"]


def _config_holds():
    """One argument, the raw ds_config; unknown keys of the section are refused by what it returns."""
    from deepspeed.runtime import config

    reader = inspect.unwrap(config.get_hybrid_engine_config)
    assert list(inspect.signature(reader).parameters) == ["param_dict"]
    assert reader({"hybrid_engine": {"enabled": True}}).enabled is True
    assert "get_hybrid_engine_config(" in inspect.getsource(config.DeepSpeedConfig._initialize_params)


def _configuration_holds():
    section = {"enabled": True, "max_out_tokens": 64, "inference_tp_size": 1, "release_inference_cache": False}
    model = engines.build_model("qwen2")
    engine = engines.build_engine(model, stage=2, hybrid=section)
    config = engine._config
    assert config.zero_config.stage == 2
    assert config.hybrid_engine.inference_tp_size == 1
    assert config.hybrid_engine.release_inference_cache is False
    assert config._param_dict["hybrid_engine"]["max_out_tokens"] == 64, "the raw ds_config is not kept"
    assert list(engine._inference_containers) == []


def _hooks_hold():
    """Every hook that an engine puts on its model is defined in a module of DeepSpeed."""
    module = _engine().module
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    assert hooks, "the engine puts no hooks on its module"
    assert {hook.__module__.partition(".")[0] for hook in hooks} == {"deepspeed"}


def _hooks_moved():
    # A function's module is the name of its globals when it is defined, which for these is at each construction.
    sys.modules["deepspeed.runtime.engine"].__dict__["__name__"] = "engines.runtime"


def _graphs_hold():
    """Where there are decode graphs, the constructor sets both attributes, and eval puts the graphs in force."""
    engine = _engine()
    assert "_decode_graphs" in engine.__dict__
    assert "_orig_module_forward" in engine.__dict__
    assert "self.module.forward = self._decode_graphs" in inspect.getsource(inspect.unwrap(vars(_class())["eval"]))


def _graphs_moved():
    """DeepSpeed's decode graphs are in force under a name that hepatch does not know."""
    from deepspeed.runtime.hybrid_engine_graph import DecodeGraphCache

    original = vars(_class())["eval"]

    def evaluate(engine):
        result = original(engine)
        forward = type(engine.module).forward.__get__(engine.module)
        engine.module.forward = DecodeGraphCache(forward, max_positions=engines.POSITIONS)
        return result

    _class().eval = evaluate


def _device_holds():
    assert torch.device(str(_engine().device)).type == get_device_type()


def get_device_type():
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name()


def _batch_holds():
    engine = _engine()
    assert engine._total_batch_size is None
    assert int(engine.world_size) == 1


def _batch_moved():
    """The attribute is kept under another name; what the host reads is as it was."""

    def read(engine):
        return engine.__dict__["_batch"]

    def write(engine, value):
        engine.__dict__["_batch"] = value

    _class()._total_batch_size = property(read, write)


def _config_raises():
    """No AttributeError: some releases look again for an attribute that raised one, and find it."""

    def moved():
        raise RuntimeError("the configuration is elsewhere")

    show(_class(), "_config", moved)


def _removed(name, new=None):
    """A drift of a target: the class has it no more, or under another name."""

    def drift():
        owner = _class()
        method = vars(owner)[name]
        delattr(owner, name)
        if new:
            setattr(owner, new, method)

    return drift


def _class_renamed():
    module = _hybrid_engine()
    module.HybridEngine = module.DeepSpeedHybridEngine
    del module.DeepSpeedHybridEngine


def _without(name):
    def drift():
        module = _hybrid_engine()
        del module.__dict__[name]

    return drift


def _no_function():
    _hybrid_engine().WorkspaceOp = object()


def _config_signature():
    from deepspeed.runtime import config

    def get_hybrid_engine_config(ds_config):
        return ds_config

    get_hybrid_engine_config.__module__ = config.__name__
    config.get_hybrid_engine_config = get_hybrid_engine_config


def _config_removed():
    from deepspeed.runtime import config

    del config.get_hybrid_engine_config


def _raises(name):
    """A drift of a target that hepatch stands in for: the original raises, and is not asked."""

    def drift():
        def exits(*_args, **_kwargs):
            raise SystemExit("a policy ended the process")

        module = _hybrid_engine()
        if name in vars(module):
            setattr(module, name, type(name, (), {"__init__": exits}))
        else:
            setattr(_class(), name, exits)

    return drift


_HYBRID = "deepspeed.runtime.hybrid_engine"
_ENGINE = f"{_HYBRID}.DeepSpeedHybridEngine"

CONTRACTS = (
    Contract(
        "deepspeed.runtime.config.get_hybrid_engine_config",
        ("get_hybrid_engine_config",),
        Then.INACTIVE,
        _config_holds,
        {"removed": _config_removed, "its parameter renamed": _config_signature},
        says="get_hybrid_engine_config",
    ),
    Contract(
        f"{_ENGINE}.populate_all_inference_policies",
        ("populate_all_inference_policies",),
        Then.INACTIVE,
        _policies_hold,
        {
            "removed": _removed("populate_all_inference_policies"),
            "renamed": _removed("populate_all_inference_policies", "fill_policies"),
        },
        says="populate_all_inference_policies is missing",
    ),
    Contract(
        f"{_ENGINE}.populate_all_inference_policies (what it raises)",
        ("populate_all_inference_policies",),
        Then.NATIVE,
        _policies_hold,
        {"it exits": _raises("populate_all_inference_policies")},
    ),
    Contract(
        f"{_HYBRID}.WorkspaceOp",
        ("WorkspaceOp",),
        Then.INACTIVE,
        _workspace_holds,
        {"removed": _without("WorkspaceOp"), "no class any more": _no_function},
        says="WorkspaceOp",
    ),
    Contract(
        f"{_HYBRID}.WorkspaceOp (what it raises)",
        ("WorkspaceOp",),
        Then.NATIVE,
        _workspace_holds,
        {"it exits": _raises("WorkspaceOp")},
    ),
    Contract(
        f"{_ENGINE}.__init__",
        ("__init__",),
        Then.INACTIVE,
        _constructor_holds,
        {"the class renamed": _class_renamed},
        says="DeepSpeedHybridEngine",
    ),
    Contract(
        f"{_ENGINE}.generate",
        ("generate",),
        Then.INACTIVE,
        _generate_holds,
        {"removed": _removed("generate"), "renamed": _removed("generate", "rollout")},
        says="generate is missing",
    ),
    Contract(
        f"{_ENGINE}.eval",
        ("eval",),
        Then.INACTIVE,
        _eval_holds,
        {"the class renamed": _class_renamed},
        says="DeepSpeedHybridEngine",
    ),
    Contract(
        f"{_ENGINE}._total_batch_size",
        ("generate",),
        Then.NATIVE,
        _batch_holds,
        {"renamed": _batch_moved},
    ),
    Contract(
        f"{_ENGINE}._config",
        ("engine_facts",),
        Then.EAGER,
        _configuration_holds,
        {"raises": _config_raises},
        says="[attach]: RuntimeError",
    ),
    Contract(
        f"{_ENGINE}._inference_containers",
        ("engine_facts",),
        Then.NATIVE,
        _configuration_holds,
        {"renamed": hide(_class, "_inference_containers")},
    ),
    Contract(
        "deepspeed.runtime.engine.DeepSpeedEngine.device",
        ("weights_offloaded",),
        # The engine answers for what it has not with its module's, and a model of transformers has a device.
        Then.NATIVE,
        _device_holds,
        {"renamed": hide(_class, "device")},
    ),
    Contract(
        "deepspeed.runtime.engine (hooks on the root module)",
        ("inspect_model",),
        Then.EAGER,
        _hooks_hold,
        {"defined elsewhere": _hooks_moved},
        says="[hooks]",
    ),
    Contract(
        f"{_ENGINE}._decode_graphs",
        ("set_aside_decode_graphs", "give_back_decode_graphs"),
        Then.NATIVE,
        _graphs_hold,
        {"renamed": _graphs_moved},
        since="0.19.6",
    ),
)
