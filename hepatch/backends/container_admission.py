"""Admission of DeepSpeed's containers, by behaviour, before one touches the user's model.

Building a container can damage weights (grouped queries), end the process, or give a layer that is silently wrong. So a
disposable copy of the model, two layers deep and with the traits of the model's configuration, gets containers first.
Through them go left-padded prompts and decode steps; what comes out must be what the copy's own layers give. The class
counters and the shared workspace are then put back as they were.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hepatch import kernel_probes, probes
from hepatch.backends.step import StepView, last_logits
from hepatch.backends.tolerance import difference
from hepatch.errors import first_line
from hepatch.generate_call import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hepatch.backends.kernels import KernelsForward

LAYERS, VOCABULARY = 2, 512
# Rows, columns of the prompt, and columns of padding in the first row; larger batch first, since it sizes the
# workspace.
SEQUENCES = ((3, 6, 2), (1, 9, 0), (2, 4, 1))
STEPS = 2
_NORM_SPREAD = 0.1


class ContainersNotAdmittedError(Exception):
    """The containers are not what the model's layers are; the message says what was found."""


def admit(engine: Any, policies: dict[type, tuple[Any, Any]]) -> None:
    """Returns where the engine's model may have containers.

    Args:
        engine: a `DeepSpeedHybridEngine` under construction.
        policies: DeepSpeed's policies for decoder layers.

    Raises:
        ContainersNotAdmittedError: it may not.
        Exception: whatever building or running a container raises; SystemExit too.
    """
    model = probes.generation_model(engine.module)
    assert model is not None
    name = type(model).__name__
    layers = _layers(engine.module, policies, probes.layer_count(model), name)
    first = next(model.parameters())
    before = kernel_probes.class_state()
    try:
        with torch.inference_mode(False), torch.no_grad():
            kernel_probes.set_class_state(kernel_probes.fresh_class_state())
            # The kernels measure free memory once in a process, at the first workspace.
            kernel_probes.free_unused_memory()
            double = _disposable_copy(model, first.dtype, first.device)
            copies = _layers(double, policies, LAYERS, name)
            _compare_structure(layers, copies, name)
            forward = _with_containers(double, copies, policies)
            _compare(forward, first.device, name)
    finally:
        workspace = kernel_probes.class_state().workspace
        if workspace is not None:
            workspace.release_workspace()
        kernel_probes.set_class_state(before)


def _layers(module: torch.nn.Module, policies: dict[type, Any], expected: int, name: str) -> list[torch.nn.Module]:
    """The layers that would get a container: all of the decoder's, side by side in one list."""
    if not any(type(child) in policies for child in module.modules()):
        raise ContainersNotAdmittedError(f"DeepSpeed has no container for the layers of {name} of this transformers")
    found = [
        [child for child in parent.children() if type(child) in policies]
        for parent in module.modules()
        if isinstance(parent, torch.nn.ModuleList)
    ]
    lists = [children for children in found if children]
    if len(lists) != 1 or len(lists[0]) != expected:
        # DeepSpeed numbers layers by list, so that those of a second list would get the numbers of the first.
        raise ContainersNotAdmittedError(f"{name} does not keep its {expected} layers in one list")
    return lists[0]


def _disposable_copy(model: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Two random layers with the configuration's traits; the caller's generators stay as they are."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = LAYERS
    config.vocab_size = VOCABULARY
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(0)
        double = type(model)(config)
        double.train(False)
        for parameter in double.parameters():
            # Weights so large that attention is far from uniform, and nothing that starts at zero or one stays there,
            # or a bias that is left out or a mask that is ignored would not show.
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * _NORM_SPREAD)
    return double.to(dtype)


def _compare_structure(layers: list[torch.nn.Module], fresh: list[torch.nn.Module], name: str) -> None:
    """A container reads weights from where the class has them, so a layer must be what its class makes of it."""
    wanted = {place: type(module) for place, module in fresh[0].named_modules()}
    for index, layer in enumerate(layers):
        for place, module in layer.named_modules():
            expected = wanted.get(place)
            if type(module) is not expected and not kernel_probes.lora_weights(module):
                raise ContainersNotAdmittedError(
                    f"layer {index} of {name} has a {type(module).__name__} at {place or 'its root'},"
                    " of which a container would see a part"
                )


def _with_containers(
    double: Any, layers: list[torch.nn.Module], policies: dict[type, tuple[Any, Any]]
) -> KernelsForward:
    from hepatch.backends.kernels import ContainerStack, KernelsForward

    containers = []
    for index, layer in enumerate(layers):
        build, policy = policies[type(layer)]
        container = build(layer, policy, index)
        if kernel_probes.rearranges_weights(container):
            raise ContainersNotAdmittedError(
                f"{type(container).__name__} turns the model's weights around in place for each rollout and back"
            )
        containers.append(container)
    return KernelsForward(double, ContainerStack(layers, containers, []))


def _compare(forward: KernelsForward, device: torch.device, name: str) -> None:
    for rows, columns, padding in SEQUENCES:
        if rows == SEQUENCES[0][0]:
            kernel_probes.allocate_workspace(forward.stack.containers[0], rows, columns, LAYERS)
            kernel_probes.allow_own_allocation(forward.stack.containers, False)
            if not kernel_probes.workspace_is_allocated(forward.stack.containers[0]):
                # A release by hand would not be noticed.
                raise ContainersNotAdmittedError("DeepSpeed's workspace does not say that it is allocated")
            if forward.stack.capacity() < columns + STEPS:
                raise ContainersNotAdmittedError("DeepSpeed's workspace has no room for a few tokens")
        try:
            worst = max(_differences(forward, rows, columns, padding, device))
        except Exception as error:
            raise ContainersNotAdmittedError(
                f"DeepSpeed's containers do not run {name} of this transformers"
                f" ({type(error).__name__}: {first_line(error)})"
            ) from error
        if worst > 1.0:
            raise ContainersNotAdmittedError(
                f"DeepSpeed's containers differ from the layers of {name} by {worst:.1f} times what rounding explains"
            )


def _differences(
    forward: KernelsForward, rows: int, columns: int, padding: int, device: torch.device
) -> Iterator[float]:
    """For the prompt and each step: largest difference of logits, in units of the tolerance."""
    total = columns + STEPS
    ids = (torch.arange(rows * total, device=device).view(rows, total) * 7 + 3) % VOCABULARY
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    kwargs = {"attention_mask": mask[:, :columns], "use_cache": True}
    prompt = Prompt(ids[:, :columns], mask[:, :columns], positions[:, :columns], kwargs)
    yield difference(forward.prefill(forward.new_kv(), prompt), _own(forward, ids, mask, positions, columns))
    view = StepView(torch.tensor([columns], device=device))
    decoder = forward.decoder(forward.new_kv(), view)
    for step in range(columns, total):
        view.position.fill_(step)
        expected = _own(forward, ids, mask, positions, step + 1)
        window = torch.cat([mask[:, : step + 1], mask.new_ones(rows, 1)], dim=-1)
        for again in range(2):
            if again:
                # The same step once more, the counter having been put elsewhere and back.
                forward.stack.ledger.counter = -1
            with decoder.held():
                decoder.begin(step + 2, replay=False)
                logits = decoder.step(ids[:, step : step + 1], window, positions[:, step : step + 1])
                decoder.end(replay=False)
            yield difference(logits, expected)


def _own(
    forward: KernelsForward, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, length: int
) -> torch.Tensor:
    """Logits of the last position by the model's own layers, without a cache."""
    extra = {"position_ids": positions[:, :length]} if forward.takes_position_ids else {}
    return last_logits(
        forward.model(
            input_ids=ids[:, :length], attention_mask=mask[:, :length], use_cache=False, return_dict=True, **extra
        )
    )
