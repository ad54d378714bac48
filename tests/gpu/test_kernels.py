"""DeepSpeed's own CUDA kernels in regions: real captures, replays and a real counter, against the eager engine."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.cache_utils

import hepatch
from hepatch import attachments
from hepatch.backends import ownership
from tests import engines
from tests.gpu import eager_containers
from tests.gpu.agreement import show

ROOT = Path(__file__).resolve().parents[2]

if hasattr(transformers.cache_utils, "CacheLayerMixin"):
    pytest.skip("this transformers is served by the native backend, not by containers", allow_module_level=True)


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def actor(request, tmp_path_factory):
    """An engine whose containers were admitted, and the calls of the eager engine with their answers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from tests.kernels import fallbacks

        fallbacks.install()
    file = tmp_path_factory.mktemp("eager") / "calls.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEPATCH", "MASTER_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.eager_containers", request.param, str(file)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    os.environ["HEPATCH_COMPILE_BACKEND"] = "inductor" if device == "cuda" else "eager"
    engine = eager_containers.build(request.param, device)
    assert hepatch.report(engine).backend == "kernels", ownership.obstacle_of(engine)
    yield SimpleNamespace(engine=engine, device=device, calls=json.loads(file.read_text()))
    attachment = attachments.of_engine(engine)
    attachment.suspend()
    attachments.forget(attachment)
    ownership._owner = None
    ownership.kernel_probes.set_class_state(ownership.kernel_probes.fresh_class_state())
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def after_failures(actor):
    """An injected failure is forgotten before the next test."""
    yield
    if hepatch.report(actor.engine).failures:
        hepatch.reset(actor.engine)


def allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_sixty_mixed_calls(actor):
    """Every token of every call is the eager engine's; a second pass records nothing that the first has recorded."""
    memory, recordings = [], []
    for _ in range(2):
        for call in actor.calls:
            assert eager_containers.answer(actor.engine, call, actor.device) == call["answer"], call["columns"]
            report = hepatch.report(actor.engine)
            assert report.last_call.path == "fused", (report.last_call, report.failures)
            memory.append(allocated())
            recordings.append(hepatch.report(actor.engine).recordings)
    report = hepatch.report(actor.engine)
    positions = {
        (call["rows"], length)
        for call in actor.calls
        for length in range(call["columns"] + 1, call["columns"] + call["new"])
    }
    show(
        f"{report.recordings} of {len(positions)} positions recorded, {report.replays} replays, {report.graph_mib} MiB"
    )
    assert report.recoveries == 0
    assert report.recordings <= len(positions)
    assert max(memory[20:]) - max(memory[:20]) < 4 * 2**20
    if actor.device == "cuda":
        assert report.replays > 0
        # The first position of each batch size was warmed up in the first pass.
        assert recordings[-1] - recordings[len(actor.calls) - 1] <= 3 * len(eager_containers.ROWS)


def test_weights_that_moved_the_logits_are_seen(actor):
    """Replays after an optimizer step: as a fresh forward of the layers is, and far from before."""
    call = {"rows": 3, "columns": 40, "new": 24}
    given = eager_containers.prompt(call, actor.device)
    asked = {
        **given,
        "max_new_tokens": 24,
        "do_sample": False,
        "pad_token_id": engines.PAD,
        "return_dict_in_generate": True,
        "output_logits": True,
        "eos_token_id": None,
    }
    with torch.no_grad():
        for _ in range(3):
            before = actor.engine.generate(**asked)
    kept = {name: value.clone() for name, value in actor.engine.module.state_dict().items()}
    torch.manual_seed(0)
    engines.train_step(actor.engine, eager_containers.prompt({"rows": 2, "columns": 32}, actor.device)["input_ids"])
    actor.engine.eval()

    with torch.no_grad():
        after = actor.engine.generate(**asked)
        report = hepatch.report(actor.engine)
        mask = torch.cat([given["attention_mask"], torch.ones(3, 24, device=actor.device, dtype=torch.long)], 1)
        fresh = actor.engine.module(input_ids=after.sequences, attention_mask=mask, use_cache=False).logits.float()
    fresh = fresh[:, 39:-1].transpose(0, 1)
    got = torch.stack(after.logits).float()
    moved = float((got[0] - torch.stack(before.logits)[0].float()).abs().max())
    error = float((got - fresh).abs().max() / fresh.abs().max())
    show(f"moved by {moved:.1f}, differs from a fresh forward by {error:.4f} of the largest logit")
    actor.engine.module.load_state_dict(kept)

    assert report.last_call.path == "fused"
    assert moved > 10
    assert error < 0.03


@pytest.mark.parametrize("step", [0, 1, 40, 62])
def test_a_failure_in_the_middle(actor, monkeypatch, step):
    """The last container raises at a step, whether it would be replayed or recorded; every token is the eager one's."""
    call = actor.calls[0]
    stack = attachments.of_engine(actor.engine).backend.stack
    if actor.device == "cuda":
        # A replay runs no container: the region's step itself raises.
        from hepatch.region import Region

        real, counted = Region._call, itertools.count()

        def raises(self, key, *, replay):
            if next(counted) == step:
                raise RuntimeError("injected here")
            real(self, key, replay=replay)

        monkeypatch.setattr(Region, "_call", raises)
    else:
        module = stack.modules[-1]
        real, counted = module.forward, itertools.count(-1)

        def raises(*args, **kwargs):
            if next(counted) == step:
                raise RuntimeError("injected here")
            return real(*args, **kwargs)

        monkeypatch.setitem(module.__dict__, "forward", raises)

    assert eager_containers.answer(actor.engine, call, actor.device) == call["answer"]
    report = hepatch.report(actor.engine)
    assert "injected here" in report.failures[-1]
    assert report.last_call.path == "eager"


def test_ways_of_choosing_tokens_take_turns(actor):
    """Greedy, sampled and again: each keeps its own recordings and gives its own tokens."""
    call = actor.calls[0]
    draws, recordings = [], []
    for _ in range(4):
        assert eager_containers.answer(actor.engine, call, actor.device) == call["answer"]
        assert hepatch.report(actor.engine).last_call.path == "fused"
        torch.manual_seed(1)
        with torch.no_grad():
            draws.append(
                actor.engine.generate(
                    **eager_containers.prompt(call, actor.device),
                    do_sample=True,
                    top_k=50,
                    max_new_tokens=call["new"],
                    pad_token_id=engines.PAD,
                )
            )
        assert hepatch.report(actor.engine).last_call.path == "fused"
        recordings.append(hepatch.report(actor.engine).recordings)
    assert all(torch.equal(draws[0], draw) for draw in draws)
    assert not hepatch.report(actor.engine).failures
    assert recordings[-1] == recordings[-2], "taking turns recorded anew"


def test_a_larger_batch_than_ever(actor):
    """The workspace grows, what was recorded goes, and tokens stay right."""
    call = {**actor.calls[0], "rows": 12}
    first = eager_containers.answer(actor.engine, call, actor.device)
    again = eager_containers.answer(actor.engine, call, actor.device)

    assert first == again
    assert hepatch.report(actor.engine).last_call.path == "fused"
    assert eager_containers.answer(actor.engine, actor.calls[0], actor.device) == actor.calls[0]["answer"]


def test_a_released_workspace_is_noticed(actor):
    actor.engine.workspace.release_workspace()

    assert eager_containers.answer(actor.engine, actor.calls[0], actor.device) == actor.calls[0]["answer"]
    assert hepatch.report(actor.engine).last_call.path == "fused"


@pytest.mark.graphs
def test_the_counter_is_put_without_touching_the_device(actor):
    """Forwards and backwards, between two halves of a sequence: what is stored stays, and the next step is right."""
    stack = attachments.of_engine(actor.engine).backend.stack
    assert eager_containers.answer(actor.engine, actor.calls[0], actor.device) == actor.calls[0]["answer"]
    keys = stack.modules[0].layer_past[0].clone()
    for tokens in (3, 300, 50):
        stack._counter.put(tokens)
    torch.cuda.synchronize()

    assert torch.equal(keys, stack.modules[0].layer_past[0])
    assert eager_containers.answer(actor.engine, actor.calls[1], actor.device) == actor.calls[1]["answer"]
