"""A stand-in for the host modules, so small that every order of events can be tried: the one stand-in of this suite.

It mirrors what hepatch touches and no more, under the hosts' own names, so that hepatch's own targets apply to it.
`test_standin_has_the_signatures_of_the_real_hosts` compares it with the installed DeepSpeed and transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

_FILES = {
    "deepspeed/__init__.py": """
        __version__ = "standin"
        from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
    """,
    "deepspeed/runtime/__init__.py": "",
    "deepspeed/runtime/config.py": """
        class HybridEngineConfig:
            model_fields = dict.fromkeys(["enabled", "inference_tp_size", "release_inference_cache"])
            inference_tp_size = 1
            release_inference_cache = False

            def __init__(self, **section):
                for key in section:
                    if key not in self.model_fields:
                        raise ValueError(f"extra key {key}")
                vars(self).update(section)


        def get_hybrid_engine_config(param_dict):
            return HybridEngineConfig(**param_dict.get("hybrid_engine", {}))


        ORIGINALS = {"get_hybrid_engine_config": get_hybrid_engine_config}


        class DeepSpeedConfig:
            def __init__(self, param_dict):
                self._param_dict = param_dict
                self.hybrid_engine = get_hybrid_engine_config(param_dict)
                self.zero_config = type("Zero", (), {"stage": 0})()
    """,
    "deepspeed/runtime/engine.py": """
        class DeepSpeedEngine:
            device = "cpu"
            world_size = 1

            def __init__(self, args, model, **kwargs):
                from deepspeed.runtime.config import DeepSpeedConfig

                self.module = model
                self._config = DeepSpeedConfig(kwargs.get("config") or {})

            def __getattr__(self, name):
                if name == "module":
                    raise AttributeError(name)
                return getattr(self.module, name)

            def eval(self):
                self.module.train(False)
    """,
    "deepspeed/runtime/hybrid_engine.py": """
        from deepspeed.runtime import config
        from deepspeed.runtime.engine import DeepSpeedEngine


        class WorkspaceOp:
            built = 0

            def __init__(self, config=None):
                WorkspaceOp.built += 1

            def retake_workspace(self):
                return False

            def release_workspace(self):
                pass


        class DeepSpeedHybridEngine(DeepSpeedEngine):
            def __init__(self, args, model, **kwargs):
                super().__init__(args, model, **kwargs)
                self._inference_containers = []
                self._total_batch_size = None
                self.populate_all_inference_policies()
                self.workspace = WorkspaceOp()

            def populate_all_inference_policies(self):
                self.inference_policies = {"layer": "policy"}

            def generate(self, *inputs, **kwargs):
                if self._total_batch_size is None:
                    self._total_batch_size = inputs[0].shape[0] if inputs else kwargs["input_ids"].shape[0]
                return self._generate(*inputs, **kwargs)

            def eval(self):
                super().eval()
                return self


        ORIGINALS = {"WorkspaceOp": WorkspaceOp, **vars(DeepSpeedHybridEngine)}
    """,
    "transformers/__init__.py": """
        __version__ = "standin"
        from transformers.generation.utils import GenerationMixin
    """,
    "transformers/cache_utils.py": """
        class Cache:
            pass


        class CacheLayerMixin:
            pass
    """,
    "transformers/generation/__init__.py": "",
    "transformers/generation/utils.py": """
        class GenerationConfig:
            def __getattr__(self, name):
                return None


        class StoppingCriteriaList(list):
            max_length = None


        class GenerationMixin:
            def generate(self, inputs=None, input_ids=None):
                ids = inputs if inputs is not None else input_ids
                config = GenerationConfig()
                loop = getattr(type(self), "_sample")
                criteria = StoppingCriteriaList()
                return loop(self, ids, logits_processor=[], stopping_criteria=criteria, generation_config=config)

            def _sample(
                self,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=False,
                streamer=None,
                **model_kwargs,
            ):
                return input_ids

            def _prepare_cache_for_generation(
                self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            ):
                pass

            def _beam_search(self, input_ids, **model_kwargs):
                return input_ids

            def _assisted_decoding(self, input_ids, **model_kwargs):
                return input_ids


        ORIGINALS = dict(vars(GenerationMixin))
    """,
}


def write(folder: Path, rename: Mapping[str, str] | None = None) -> Path:
    """Write the stand-in's packages into `folder`, which is then put on a path before the real ones.

    Args:
        folder: an empty folder.
        rename: names of the hosts that a later release has changed, old to new.
    """
    for name, text in _FILES.items():
        lines = text.splitlines()
        body = "\n".join(line[8:] for line in lines)
        for old, new in (rename or {}).items():
            body = body.replace(old, new)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body + "\n")
    return folder


def use(folder: str) -> None:
    """Let this process, which has loaded none of the hosts, find the stand-in in their place."""
    loaded = [name for name in ("deepspeed", "transformers", "hepatch") if name in sys.modules]
    assert not loaded, f"already loaded: {loaded}"
    sys.path.insert(0, folder)


def attributes():
    """Each target's name with what stands there now, read raw, and what the stand-in defined; None while not loaded."""
    from hepatch.targets import TARGETS

    found = {}
    for target in TARGETS:
        module = sys.modules.get(target.module)
        if module is None:
            found[target.attribute] = None
            continue
        owner = getattr(module, target.owner) if target.owner else module
        found[target.attribute] = (vars(owner)[target.attribute], module.ORIGINALS[target.attribute])
    return found


def model():
    """A model of the stand-in's generation mixin."""
    import torch
    from transformers.generation.utils import GenerationMixin

    class Config:
        def get_text_config(self, decoder=False):
            return self

    class Model(torch.nn.Module, GenerationMixin):
        def __init__(self):
            super().__init__()
            self.config = Config()
            self.weight = torch.nn.Parameter(torch.ones(1))

    return Model()


def ids(rows: int = 3):
    """Token ids, int64 `[rows, 4]`."""
    import torch

    return torch.ones(rows, 4, dtype=torch.int64)
