"""What hepatch relies on in transformers."""

from __future__ import annotations

import inspect
import sys

import torch

from tests import engines
from tests.contracts.contract import Contract, Then, hide, hide_in, show

PARAMETERS = (
    "input_ids",
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "synced_gpus",
    "streamer",
)


def _utils():
    import transformers.generation.utils as module

    return module


def _mixin():
    return _utils().GenerationMixin


def _config_class():
    return type(engines.build_model("llama").config)


def _model_class():
    return type(engines.build_model("llama"))


def _generated(**more):
    model = engines.build_model("llama")
    with torch.no_grad():
        return model.generate(**engines.prompts(2, 5, (2,)), max_new_tokens=3, do_sample=False, **more)


def _seen_by_sample(**more):
    """The arguments that `generate` hands to the sampling loop, which it reads from the class."""
    seen = {}
    owner = _mixin()
    original = vars(owner)["_sample"]

    def loop(self, *args, **kwargs):
        seen.update(inspect.signature(original).bind(self, *args, **kwargs).arguments)
        return original(self, *args, **kwargs)

    owner._sample = loop
    try:
        _generated(**more)
    finally:
        owner._sample = original
    assert seen, "generate no longer reads _sample from the class"
    return seen


def _sample_holds():
    """`generate` calls it with everything prepared: a config, processors, criteria with a length, and a KV cache."""
    signature = inspect.signature(inspect.unwrap(vars(_mixin())["_sample"]))
    assert list(signature.parameters)[:2] == ["self", "input_ids"]
    assert set(PARAMETERS) <= set(signature.parameters), list(signature.parameters)
    seen = _seen_by_sample()
    assert seen["stopping_criteria"].max_length == 8
    assert seen["generation_config"].do_sample is False
    assert "attention_mask" in seen["model_kwargs"]


def _watched_hold(name):
    def holds():
        method = inspect.unwrap(vars(_mixin())[name])
        assert list(inspect.signature(method).parameters)[:2] == ["self", "input_ids"]

    return holds


def _prepared_cache_holds():
    """The arguments for the model are one parameter of it, and the caller's cache is still among them."""
    method = inspect.unwrap(vars(_mixin())["_prepare_cache_for_generation"])
    assert "model_kwargs" in inspect.signature(method).parameters
    assert "_prepare_cache_for_generation(" in inspect.getsource(inspect.unwrap(_mixin().generate))


def _layers_hold():
    """A cache is a list of layers, built from it, each of which answers what hepatch's own layers answer."""
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

    for name in ("update", "get_seq_length", "get_mask_sizes", "lazy_initialization"):
        assert callable(getattr(CacheLayerMixin, name)), name
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    again = Cache(layers=list(cache.layers))
    assert isinstance(again.layers[0], CacheLayerMixin)
    assert int(again.get_seq_length()) == 3


def _no_layered_cache():
    from transformers import cache_utils

    original = cache_utils.Cache.__init__

    def init(self, *args, **kwargs):
        # The release's own caches pass it under its new name.
        if sys._getframe(1).f_globals["__name__"].startswith("hepatch") and "layers" in kwargs:
            raise TypeError("Cache.__init__() got an unexpected keyword argument 'layers'")
        original(self, *args, **kwargs)

    cache_utils.Cache.__init__ = init


def _keyword_holds():
    """`forward` names its KV cache, and the field of the dict output has one of the same names."""
    parameters = inspect.signature(_model_class().forward).parameters
    assert {"past_key_values", "cache"} & set(parameters), list(parameters)


def _keyword_moved():
    model_class = _model_class()
    parameters = [
        parameter.replace(name="kv_store") if name in ("past_key_values", "cache") else parameter
        for name, parameter in inspect.signature(model_class.forward).parameters.items()
    ]
    forward = model_class.forward

    def renamed(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    renamed.__signature__ = inspect.Signature(parameters)
    model_class.forward = renamed


def _fullgraph_holds():
    """Llama declares it, and the base class has it for models that do not."""
    from transformers import PreTrainedModel

    assert PreTrainedModel._can_compile_fullgraph is False
    assert _model_class()._can_compile_fullgraph is True


def _no_fullgraph():
    model_class = _model_class()
    model_class._can_compile_fullgraph = False


def _implementation_holds():
    """What attention a model runs by, read from its configuration; setting the inner name is what changes it."""
    config = engines.build_model("llama").config
    assert config._attn_implementation in ("sdpa", "eager"), config._attn_implementation
    config._attn_implementation_internal = "eager"
    assert config._attn_implementation == "eager"


def _implementation_moved():
    """The inner name is another; the property over it is as it was."""

    def implementation(self):
        return self.__dict__["_attn_implementation_internal"]

    def set_implementation(self, value):
        self.__dict__["_attn_implementation_internal"] = value

    # A property that the compiler can read through, which one that asks who reads is not.
    _config_class()._attn_implementation = property(implementation, set_implementation)
    hide(_config_class, "_attn_implementation_internal")()


def _text_config_holds():
    model = engines.build_model("llama")
    config = model.config.get_text_config(decoder=True)
    assert config.num_hidden_layers == engines.LAYERS
    assert config.max_position_embeddings == engines.POSITIONS


def _text_config_raises():
    def get_text_config(decoder=False):
        raise TypeError("get_text_config() got an unexpected keyword argument 'decoder'")

    show(_config_class(), "get_text_config", lambda: get_text_config)


def _cache_class_holds():
    """Where it is declared it is a flag; where it is not, every model takes its cache as an object."""
    flag = getattr(_model_class(), "_supports_cache_class", True)
    assert isinstance(flag, bool)


def _embeddings_hold():
    head = engines.build_model("llama").get_output_embeddings()
    assert head.weight.shape[0] == engines.VOCABULARY


def _embeddings_moved():
    def get_output_embeddings():
        raise NotImplementedError("heads are found by name")

    show(_model_class(), "get_output_embeddings", lambda: get_output_embeddings)


def _dynamic_cache_holds():
    """What `generate` prepares where nothing is asked; nothing, in transformers 5.0, where the model makes it."""
    seen = _seen_by_sample()["model_kwargs"]
    cache = seen.get("cache", seen.get("past_key_values"))
    if cache is None:
        return
    assert type(cache).__name__ == "DynamicCache", type(cache).__name__
    assert not getattr(cache, "offloading", False)
    assert int(cache.get_seq_length()) > 0, "the loop no longer fills the cache that was prepared"


def _dynamic_cache_renamed():
    """What `generate` prepares goes by another name; where it leaves that to the model, it prepares one now."""
    from transformers import cache_utils

    kind = cache_utils.DynamicCache
    kind.__name__ = "GrowingCache"
    original = vars(_mixin()).get("_prepare_cache_for_generation")
    if original is None:
        return

    def prepare(self, generation_config, model_kwargs, *args, **kwargs):
        original(self, generation_config, model_kwargs, *args, **kwargs)
        if not {"cache", "past_key_values"} & set(model_kwargs):
            model_kwargs["past_key_values"] = kind(config=self.config)

    _mixin()._prepare_cache_for_generation = prepare


def _callers_cache_holds():
    """A cache of the caller's own, empty, is the one that generate fills."""
    from transformers import DynamicCache

    cache = DynamicCache()
    parameters = inspect.signature(_model_class().forward).parameters
    _generated(**{"cache" if "cache" in parameters else "past_key_values": cache})
    assert int(cache.get_seq_length()) == 7


def _pad_holds():
    config = _seen_by_sample(pad_token_id=3)["generation_config"]
    assert int(config._pad_token_tensor) == 3


def _generation_config():
    from transformers import GenerationConfig

    return GenerationConfig


def _output_holds():
    """A dict output of a decoder-only model: these fields, and the KV cache under one of two names."""
    names = set(_utils().GenerateDecoderOnlyOutput.__dataclass_fields__)
    assert {"sequences", "scores", "logits", "attentions", "hidden_states"} <= names, names
    assert {"past_key_values", "cache"} & names, names


def _attention_holds():
    """Both registries take a function by name; the mask function gives True where to attend."""
    from transformers import masking_utils, modeling_utils

    for registry in (modeling_utils.AttentionInterface, masking_utils.AttentionMaskInterface):
        assert list(inspect.signature(registry.register).parameters) == ["key", "value"]
    assert callable(masking_utils.sdpa_mask)


def _decoder_layers_hold():
    """The layers that a model repeats, and nothing else, are of this class."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = engines.build_model("llama")
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert found == list(model.model.layers)


def _criteria_hold():
    criteria = _seen_by_sample(eos_token_id=4)["stopping_criteria"]
    names = {(type(criterion).__module__, type(criterion).__name__) for criterion in criteria}
    module = "transformers.generation.stopping_criteria"
    assert names == {(module, "MaxLengthCriteria"), (module, "EosTokenCriteria")}, names


def _criteria_renamed():
    from transformers.generation import stopping_criteria

    stopping_criteria.MaxLengthCriteria.__name__ = "LengthCriteria"


def _recorder_holds():
    """The module whose hooks stay on a model once its hidden states were asked for."""
    from transformers.utils import output_capturing

    assert output_capturing.__name__ == "transformers.utils.output_capturing"


def _recorder_moved():
    """Idle hooks that hepatch does not know as such: it has to call them, and so stays eager."""
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

    original = DeepSpeedHybridEngine.eval

    def evaluate(engine):
        result = original(engine)

        def recorder(*_args):
            return None

        recorder.__module__ = "transformers.utils.recording"
        engine.module.model.layers[0].register_forward_hook(recorder)
        return result

    DeepSpeedHybridEngine.eval = evaluate


def _removed(name, new=None):
    def drift():
        owner = _mixin()
        method = vars(owner)[name]
        delattr(owner, name)
        if new:
            setattr(owner, new, method)

    return drift


def _sample_signature():
    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        return input_ids

    _sample.__module__ = _mixin().__module__
    _mixin()._sample = _sample


def _mixin_holds():
    assert issubclass(_model_class(), _mixin())


def _mixin_renamed():
    module = _utils()
    module.Generation = module.GenerationMixin
    del module.GenerationMixin


_MIXIN = "transformers.generation.utils.GenerationMixin"

CONTRACTS = (
    Contract(
        f"{_MIXIN}._sample",
        ("_sample",),
        Then.INACTIVE,
        _sample_holds,
        {
            "removed": _removed("_sample"),
            "renamed": _removed("_sample", "_decode"),
            "parameters gone": _sample_signature,
        },
        says="GenerationMixin._sample",
    ),
    Contract(
        _MIXIN,
        ("generation_model", "_sample"),
        Then.INACTIVE,
        _mixin_holds,
        {"renamed": _mixin_renamed},
        says="GenerationMixin",
    ),
    Contract(
        f"{_MIXIN}._beam_search",
        ("_beam_search",),
        Then.NATIVE,
        _watched_hold("_beam_search"),
        {"renamed": _removed("_beam_search", "_beams")},
    ),
    Contract(
        f"{_MIXIN}._assisted_decoding",
        ("_assisted_decoding",),
        Then.NATIVE,
        _watched_hold("_assisted_decoding"),
        {"renamed": _removed("_assisted_decoding", "_assisted")},
    ),
    Contract(
        f"{_MIXIN}._prepare_cache_for_generation",
        ("_prepare_cache_for_generation", "mark_callers_cache"),
        Then.NATIVE,
        _prepared_cache_holds,
        untried="generate itself calls it, so a release without it is another generate",
        since="4.46",
    ),
    Contract(
        f"{_MIXIN} (a KV cache of the caller's)",
        ("mark_callers_cache", "user_gave_cache"),
        Then.EAGER,
        _callers_cache_holds,
        untried="tests/test_older_hosts.py and every cell of the matrix generate into such a cache",
    ),
    Contract(
        "transformers.cache_utils.CacheLayerMixin",
        ("static_cache_obstacle",),
        Then.EAGER,
        _layers_hold,
        {"removed": hide_in("transformers.cache_utils", "CacheLayerMixin")},
        says="[static-cache]",
        since="4.54",
    ),
    Contract(
        "transformers.cache_utils.Cache (built from layers)",
        ("static_cache_obstacle",),
        Then.EAGER,
        _layers_hold,
        {"its parameter renamed": _no_layered_cache},
        says="[static-cache]",
        since="4.54",
    ),
    Contract(
        "transformers.PreTrainedModel.forward (its KV cache)",
        ("forward_parameters", "cache_keyword"),
        Then.EAGER,
        _keyword_holds,
        {"renamed": _keyword_moved},
        says="takes no KV cache",
    ),
    Contract(
        "transformers.PreTrainedModel._can_compile_fullgraph",
        ("static_cache_obstacle",),
        Then.EAGER,
        _fullgraph_holds,
        {"says no": _no_fullgraph, "renamed": hide(_model_class, "_can_compile_fullgraph")},
        says="[static-cache]",
        since="4.54",
    ),
    Contract(
        "transformers.PreTrainedConfig._attn_implementation",
        ("static_cache_obstacle",),
        Then.EAGER,
        _implementation_holds,
        {"renamed": hide(_config_class, "_attn_implementation")},
        says="[static-cache]",
    ),
    Contract(
        "transformers.PreTrainedConfig._attn_implementation_internal",
        ("attention_registries",),
        Then.NATIVE,
        _implementation_holds,
        {"renamed": _implementation_moved},
    ),
    Contract(
        "transformers.PreTrainedConfig.get_text_config",
        ("text_config", "layer_count", "max_positions", "attention_heads"),
        Then.NATIVE,
        _text_config_holds,
        {"renamed": hide(_config_class, "get_text_config")},
        since="4.45",
    ),
    Contract(
        "transformers.PreTrainedConfig.get_text_config (its parameter)",
        ("text_config",),
        Then.EAGER,
        _text_config_holds,
        {"renamed": _text_config_raises},
        says="[attach]: TypeError",
        since="4.45",
        before=Then.NATIVE,
    ),
    Contract(
        "transformers.PreTrainedModel._supports_cache_class",
        ("supports_cache_class",),
        Then.EAGER,
        _cache_class_holds,
        untried="only DeepSpeed's containers are called by it, and their admission tries the call on a copy",
    ),
    Contract(
        "transformers.PreTrainedModel.get_output_embeddings",
        ("vocabulary",),
        Then.EAGER,
        _embeddings_hold,
        {"raises": _embeddings_moved},
    ),
    Contract(
        "transformers.cache_utils.DynamicCache",
        ("is_plain_dynamic_cache", "own_cache"),
        Then.EAGER,
        _dynamic_cache_holds,
        {"renamed": _dynamic_cache_renamed},
        says="[decode-mode]",
    ),
    Contract(
        "transformers.GenerationConfig._pad_token_tensor",
        ("pad_token",),
        Then.NATIVE,
        _pad_holds,
        {"renamed": hide(_generation_config, "_pad_token_tensor")},
    ),
    Contract(
        "transformers.generation.utils.GenerateDecoderOnlyOutput",
        ("generate_output",),
        Then.EAGER,
        _output_holds,
        {"renamed": hide_in("transformers.generation.utils", "GenerateDecoderOnlyOutput")},
        says="GenerateDecoderOnlyOutput",
    ),
    Contract(
        "transformers.modeling_utils.AttentionInterface",
        ("attention_registries",),
        Then.NATIVE,
        _attention_holds,
        {
            "renamed": hide_in("transformers.modeling_utils", "AttentionInterface"),
            "the masks' renamed": hide_in("transformers.masking_utils", "AttentionMaskInterface"),
            "the boolean mask renamed": hide_in("transformers.masking_utils", "sdpa_mask"),
        },
        since="4.53",
    ),
    Contract(
        "transformers.modeling_layers.GradientCheckpointingLayer",
        ("decoder_layers",),
        Then.NATIVE,
        _decoder_layers_hold,
        {"renamed": hide_in("transformers.modeling_layers", "GradientCheckpointingLayer")},
        since="4.54",
    ),
    Contract(
        "transformers.generation.stopping_criteria",
        ("generate_call.read",),
        Then.EAGER,
        _criteria_hold,
        {"renamed": _criteria_renamed},
        says="[decode-mode]",
    ),
    Contract(
        "transformers.utils.output_capturing",
        ("inspect_model",),
        Then.EAGER,
        _recorder_holds,
        {"defined elsewhere": _recorder_moved},
        says="[hooks]",
        since="5.2",
        before=Then.NATIVE,
    ),
)
