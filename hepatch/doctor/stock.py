"""What DeepSpeed and transformers would do with this model and configuration if hepatch were not there.

Each sentence rests on a probe of the installed code; the faults themselves are described in the README.
"""

from __future__ import annotations

from typing import Any

from hepatch import probes, stock_probes
from hepatch.doctor.configuration import Configuration


def outlook(model: Any | None, configuration: Configuration) -> list[str]:
    """One sentence for each thing that a user of stock would meet.

    Args:
        model: on the meta device; None where none was given.
        configuration: the ds_config.
    """
    lines = [] if model is None else _containers(model, configuration)
    obstacle = stock_probes.graph_obstacle(configuration.section, configuration.zero_stage)
    if obstacle is not None:
        lines.append(f"enable_cuda_graph would not be in force: {obstacle.rstrip('.')}.")
    return lines


def _containers(model: Any, configuration: Configuration) -> list[str]:
    name = type(model).__name__
    found = stock_probes.policies(model)
    if found.error is not None:
        return [f"deepspeed.initialize would fail while it chooses containers for {name}: {found.error}."]
    if not found.layers:
        what = f"No inference container is built for {name}: engine.generate raises AttributeError (_generate), and"
        return [f"{what} engine.module.generate launches every kernel of every token from Python."]
    layer = found.layers[0]
    lines = [f"Inference containers would replace each {layer.__name__} of {name}."]
    obstacles = stock_probes.op_obstacles()
    if obstacles:
        lines.append(f"They need DeepSpeed's op, so deepspeed.initialize would fail: {'; '.join(obstacles.values())}.")
    heads, kv_heads = probes.attention_heads(model)
    if kv_heads != heads and configuration.zero_stage < 3:  # noqa: PLR2004 - partitioned weights
        lines.append(
            f"{heads} heads share {kv_heads} KV heads: the containers split K and V as if there were {heads}, which"
            " can damage the weights in deepspeed.initialize without an error."
        )
    returns_tuple = stock_probes.layer_returns_tuple(model, layer)
    if returns_tuple is False:
        lines.append(
            f"transformers is too new for the container: {layer.__name__} returns a tensor here and the container a"
            " tuple, so the first generate would fail ('tuple' object has no attribute 'size')."
        )
    elif returns_tuple is None:
        lines.append(f"Whether a container fits {layer.__name__} of this transformers could not be tried.")
    return lines
