"""What hepatch relies on in torch that torch calls private."""

from __future__ import annotations

import inspect

import torch

from tests import engines
from tests.contracts.contract import Contract, Then, hide, hide_in


def _tables_hold():
    """A module keeps its hooks, parameters, buffers and children in dictionaries of these names."""
    module = torch.nn.Linear(2, 2)
    child, buffer = torch.nn.Linear(2, 2), torch.ones(2)
    module.add_module("child", child)
    module.register_buffer("buffer", buffer)
    before = module.register_forward_pre_hook(lambda *_: None)
    after = module.register_forward_hook(lambda *_: None)
    assert list(module._forward_pre_hooks) == [before.id]
    assert list(module._forward_hooks) == [after.id]
    assert module._modules == {"child": child}
    assert module._buffers["buffer"] is buffer
    assert set(module._parameters) == {"weight", "bias"}


def _global_hooks_hold():
    everywhere = torch.nn.modules.module
    handle = everywhere.register_module_forward_hook(lambda *_: None)
    try:
        assert list(everywhere._global_forward_hooks) == [handle.id]
        assert not everywhere._global_forward_pre_hooks
    finally:
        handle.remove()


def _below_autograd_holds():
    """A context in which the body of a custom op runs: autograd's keys are off."""
    with torch._C._AutoDispatchBelowAutograd():
        assert not (torch.ones(1, requires_grad=True) * 2).requires_grad


def _profiler_holds():
    """It is on while a profiler records, and only then."""
    assert not torch._C._autograd._profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch._C._autograd._profiler_enabled()


def _counters_hold():
    """Dynamo counts a graph that it compiles."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert counters["stats"]["unique_graphs"] == before + 1
    assert isinstance(counters["inductor"]["cudagraph_skips"], int)


def _skips_hold():
    from torch._inductor import cudagraph_utils

    assert '"cudagraph_skips"' in inspect.getsource(cudagraph_utils)


def _cxx_holds():
    from torch._inductor import config

    assert isinstance(config.cpp.cxx, (tuple, list, str))


def _trees_hold():
    """The manager of graph trees is asked for without making one; graphs are counted, and their pool is known."""
    from torch._inductor import cudagraph_trees

    assert list(inspect.signature(cudagraph_trees.get_manager).parameters) == ["device_index", "create_if_none_exists"]
    source = inspect.getsource(cudagraph_trees.CUDAGraphTreeManager)
    assert "self.graph_counter = itertools.count(0)" in source
    assert "self.cuda_graphs_thread_pool = " in source


def _model_class():
    return type(engines.build_model("llama"))


CONTRACTS = (
    Contract(
        "torch._C._autograd._profiler_enabled",
        ("is_profiling",),
        Then.NATIVE,
        _profiler_holds,
        {"renamed": hide(lambda: torch._C._autograd, "_profiler_enabled")},
    ),
    Contract(
        "torch.nn.Module._forward_pre_hooks",
        ("inspect_model",),
        Then.EAGER,
        _tables_hold,
        {"renamed": hide(_model_class, "_forward_pre_hooks")},
        says="_forward_pre_hooks",
    ),
    Contract(
        "torch.nn.modules.module._global_forward_hooks",
        ("inspect_model",),
        Then.EAGER,
        _global_hooks_hold,
        {"renamed": hide_in("torch.nn.modules.module", "_global_forward_hooks")},
        says="_global_forward_hooks",
    ),
    Contract(
        "torch._C._AutoDispatchBelowAutograd",
        ("below_autograd",),
        Then.EAGER,
        _below_autograd_holds,
        {"renamed": hide_in("torch._C", "_AutoDispatchBelowAutograd")},
        says="_AutoDispatchBelowAutograd",
    ),
    Contract(
        "torch._dynamo.utils.counters",
        ("compiled_graphs", "skipped_graphs"),
        Then.EAGER,
        _counters_hold,
        {"renamed": hide_in("torch._dynamo.utils", "counters")},
        says="counters",
    ),
    Contract(
        "torch._inductor.cudagraph_utils (cudagraph_skips)",
        ("skipped_graphs",),
        Then.EAGER,
        _skips_hold,
        untried="graphs are skipped on a CUDA device only: tests/gpu",
    ),
    Contract(
        "torch._inductor.config.cpp.cxx",
        ("compiler_obstacle",),
        Then.EAGER,
        _cxx_holds,
        {"renamed": hide_in("torch._inductor.config", "cpp")},
        says="cpp",
        backend="inductor",
    ),
    Contract(
        "torch._inductor.cudagraph_trees.get_manager",
        ("recorded_graphs", "graph_bytes"),
        Then.EAGER,
        _trees_hold,
        untried="graphs are recorded on a CUDA device only: tests/gpu",
    ),
)
