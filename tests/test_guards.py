"""Every rule by itself: what trips it, what does not, and what it says."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hepatch import guards
from hepatch.guards import Call, Facts

ROOT = Path(__file__).parent.parent

RULES = (
    "disabled",
    "backend",
    "model",
    "containers",
    "zero3",
    "released-cache",
    "tensor-parallel",
    "static-cache",
    "weights",
    "workspace",
    "hooks",
    "weights-offloaded",
    "no-compiler",
    "thread",
    "autocast",
    "earlier-failure",
    "cache-budget",
    "length",
    "decode-mode",
)

PLAIN = Call(training=False, total_tokens=64)

TRIPPED = [
    ("disabled", {"enabled": False}, "switched off", "HEPATCH"),
    ("disabled", {"requested": False}, "ds_config", "enable_graph_capture"),
    ("backend", {"no_kernels": "OPT has none"}, "HEPATCH_BACKEND=kernels, but OPT has none", "HEPATCH_BACKEND=auto"),
    ("model", {"causal_lm": False, "model_name": "BertModel"}, "BertModel", "causal language model"),
    ("containers", {"containers": 24}, "24 DeepSpeed containers", "before deepspeed.initialize"),
    ("zero3", {"zero_stage": 3}, "ZeRO stage 3", "stage 2"),
    ("released-cache", {"release_inference_cache": True}, "release_inference_cache", "hepatch.release"),
    ("released-cache", {"workspace_released": True}, "workspace", "engine.eval()"),
    ("tensor-parallel", {"inference_tp_size": 2}, "collectives", "inference_tp_size"),
    ("static-cache", {"static_cache": "XModel keeps a state"}, "XModel keeps a state", "eagerly"),
    ("weights", {"unseen_weight": "fc1.weight of layer 0"}, "fc1.weight of layer 0", "in place"),
    ("workspace", {"workspace": "DeepSpeed's workspace needs 9 MiB"}, "needs 9 MiB", "fewer rows"),
    ("hooks", {"hooks": ("lm_head", "model.layers.0")}, "lm_head, model.layers.0", "Remove"),
    ("weights-offloaded", {"weights_offloaded": True}, "offload_states", "reload_states"),
    ("no-compiler", {"compiler_missing": "no C++ compiler"}, "no C++ compiler", "CXX"),
    ("thread", {"thread": 5, "region_thread": 4}, "4", "one thread"),
    ("autocast", {"region_autocast": None, "autocast": "bfloat16"}, "autocast off, called with autocast bf", "release"),
    (
        "autocast",
        {"region_autocast": "float16", "autocast": None},
        "autocast float16, called with autocast off",
        "same",
    ),
    ("autocast", {"region_autocast": "float16", "autocast": "bfloat16"}, "float16", "same"),
    ("earlier-failure", {"failure": "compile: no memory"}, "compile: no memory", "hepatch.reset(engine)"),
    ("cache-budget", {"cache_mib_needed": 9, "cache_mib_budget": 8}, "9 MiB", "HEPATCH_CACHE_MIB"),
    ("length", {"max_positions": 63, "call": PLAIN}, "63 positions", "max_new_tokens"),
    ("length", {"max_out_tokens": 62, "max_positions": 99, "call": PLAIN}, "62 positions", "Raise max_out_tokens"),
    ("length", {"max_out_tokens": 62, "max_positions": 40, "call": PLAIN}, "40 positions", "Shorten the prompt"),
    (
        "decode-mode",
        {"max_out_tokens": 64, "call": Call(training=False, total_tokens=8, prompt_tokens=1)},
        "a prompt of one token",
        "Leave it out",
    ),
    ("decode-mode", {"call": Call(training=True, total_tokens=1)}, "training mode", "engine.eval()"),
    (
        "decode-mode",
        {"call": Call(training=False, total_tokens=1, unsupported=("beam search (num_beams=3)", "inputs_embeds"))},
        "beam search (num_beams=3), inputs_embeds",
        "Leave it out",
    ),
]

NOT_TRIPPED = [
    ("disabled", {"requested": None}),
    ("disabled", {"requested": True}),
    ("backend", {"no_kernels": None}),
    ("model", {"causal_lm": True, "model_name": ""}),
    ("containers", {"containers": 0}),
    ("zero3", {"zero_stage": 2}),
    ("released-cache", {"release_inference_cache": False, "workspace_released": False}),
    ("tensor-parallel", {"inference_tp_size": 1}),
    ("static-cache", {"model_name": "OPTForCausalLM"}),
    ("hooks", {"hooks": ()}),
    ("weights-offloaded", {"weights_offloaded": False}),
    ("no-compiler", {"compiler_missing": None}),
    ("thread", {"thread": 4, "region_thread": 4}),
    ("thread", {"thread": 4, "region_thread": None}),
    ("autocast", {"autocast": "bfloat16"}),
    ("autocast", {"autocast": "bfloat16", "region_autocast": "bfloat16"}),
    ("autocast", {"autocast": None, "region_autocast": None}),
    ("earlier-failure", {"failure": None}),
    ("cache-budget", {"cache_mib_needed": 8, "cache_mib_budget": 8}),
    ("cache-budget", {"cache_mib_needed": 9999}),
    ("length", {"max_positions": 64, "call": PLAIN}),
    ("length", {"max_positions": None, "call": PLAIN}),
    ("length", {"max_positions": 1}),
    # The last token is never run through the model.
    ("length", {"max_out_tokens": 63, "call": PLAIN}),
    ("decode-mode", {"max_out_tokens": 64, "call": Call(training=False, total_tokens=8, prompt_tokens=2)}),
    ("decode-mode", {"call": Call(training=False, total_tokens=8, prompt_tokens=1)}),
    ("weights", {"unseen_weight": None}),
    ("workspace", {"workspace": None}),
    ("decode-mode", {"call": PLAIN}),
    ("decode-mode", {}),
]


def test_names_are_pinned():
    """A rule's name and its place in the list are stable: logs, reports and the README carry them."""
    assert tuple(guard.rule for guard in guards.GUARDS) == RULES


def test_defaults_refuse_nothing():
    """Facts without a fault, with or without a call, refuse nothing."""
    assert guards.judge(Facts()) == ()
    assert guards.judge(Facts(call=PLAIN)) == ()


@pytest.mark.parametrize(("rule", "facts", "reason", "remedy"), TRIPPED)
def test_rule_trips_alone(rule, facts, reason, remedy):
    """One fault gives one refusal, with its reason and what to do."""
    refusals = guards.judge(Facts(**facts))

    assert [rule] == [refusal.rule for refusal in refusals]
    assert reason in refusals[0].reason
    assert remedy in refusals[0].remedy


@pytest.mark.parametrize(("rule", "facts"), NOT_TRIPPED)
def test_rule_does_not_trip(rule, facts):
    """The nearest harmless facts pass, by every rule."""
    assert guards.judge(Facts(**facts)) == ()


@pytest.mark.parametrize("cases", [TRIPPED, NOT_TRIPPED])
def test_every_rule_has_a_case(cases):
    """No rule comes in without a case that trips it and one that does not."""
    assert set(RULES) == {case[0] for case in cases}


def test_every_fact_is_judged():
    """A fact that no rule reads would be a guard that guards nothing."""
    named = {name for case in TRIPPED for name in case[1]}

    assert {field.name for field in dataclasses.fields(Facts)} == named


def test_all_failing_rules_are_reported_in_order():
    """Every rule at once gives every refusal, in reading order."""
    everything = {
        "enabled": False,
        "no_kernels": "none",
        "causal_lm": False,
        "containers": 1,
        "zero_stage": 3,
        "release_inference_cache": True,
        "inference_tp_size": 2,
        "static_cache": "none",
        "unseen_weight": "x",
        "workspace": "x",
        "max_out_tokens": 8,
        "hooks": ("lm_head",),
        "max_positions": 8,
        "weights_offloaded": True,
        "compiler_missing": "no g++",
        "thread": 1,
        "region_thread": 2,
        "autocast": "bfloat16",
        "region_autocast": None,
        "failure": "x",
        "cache_mib_needed": 2,
        "cache_mib_budget": 1,
        "call": Call(training=True, total_tokens=9, unsupported=("beam search",)),
    }

    assert tuple(refusal.rule for refusal in guards.judge(Facts(**everything))) == RULES


@pytest.mark.parametrize(("rule", "facts", "reason", "remedy"), TRIPPED)
def test_messages_are_one_line_that_a_sentence_can_carry(rule, facts, reason, remedy):
    """Reason and remedy are joined by full stops in the log, so neither has one, and the remedy opens a sentence."""
    for refusal in guards.judge(Facts(**facts)):
        for text in (refusal.reason, refusal.remedy):
            assert text
            assert "\n" not in text
            assert not text.endswith(".")
        assert refusal.remedy[0].isupper()


def test_every_rule_names_its_source():
    """A rule rests on something that can be read."""
    assert all(guard.source for guard in guards.GUARDS)
    assert {"process", "engine", "call"} == {guard.scope for guard in guards.GUARDS}


def test_rules_fixed_at_construction_are_rules():
    """What attach decides once is a subset of the rules."""
    expected = {"disabled", "backend", "model", "containers", "zero3", "released-cache", "tensor-parallel"}

    assert expected == guards.CONSTRUCTION
    assert set(RULES) > guards.CONSTRUCTION


def test_facts_are_frozen():
    """Facts are taken once a call; nobody edits them between two rules."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Facts().enabled = False


def test_guards_load_no_host():
    """The rules can be read and judged without torch, DeepSpeed, transformers or pydantic."""
    program = (
        "import sys; from hepatch import guards; guards.judge(guards.Facts(zero_stage=3));"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'pydantic'} & set(sys.modules)))"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)

    assert ended.stdout == "[]\n"
