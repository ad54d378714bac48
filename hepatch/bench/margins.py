"""Where two systems' greedy tokens part: the float32 margin at that step, beside the noise of the dtype they ran in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hepatch.bench.workload import PAD, Workload, build_model

if TYPE_CHECKING:
    import torch


def _logits(model: Any, sequence: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Float32 logits that chose each new token of one row: `[new, vocab]`, teacher-forced over the whole sequence."""
    outputs = model(input_ids=sequence[None], use_cache=False)
    logits: torch.Tensor = outputs.logits[0, -new_tokens - 1 : -1].float()
    return logits


def compare(model: Any, workload: Workload, reference: torch.Tensor, candidate: torch.Tensor) -> dict[str, Any]:
    """Compares the new tokens of two runs, given the model whose weights they ran with.

    For each row's first difference: the float32 gap between the two tokens chosen, the float32 margin of the two
    best, and the noise: the largest difference between `model`'s logits and float32's at that step. A gap of at most
    twice the noise is a tie for that dtype.

    Args:
        model: eager, on the device of both answers.
        workload: of the run.
        reference: int64 `[batch, prompt + new]`.
        candidate: int64 `[batch, prompt + new]`.
    """
    import torch

    prompt = workload.prompt_tokens
    # A call that stops early is as long as its longest row: the shorter of the two is padded to the other.
    columns = max(reference.shape[1], candidate.shape[1])
    reference, candidate = (
        torch.nn.functional.pad(rows, (0, columns - rows.shape[1]), value=PAD) for rows in (reference, candidate)
    )
    new = columns - prompt
    exact = build_model(workload, str(reference.device), torch.float32)
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    differences, noises, agree = [], [], {"reference": 0, "candidate": 0}
    with torch.no_grad():
        for row, length in enumerate(workload.prompt_lengths(reference.shape[0])):
            first, second = (rows[row, prompt - length :] for rows in (reference, candidate))
            expected = _logits(exact, first, new)
            noise = (_logits(model, first, new) - expected).abs().amax(1)
            noises.append(noise)
            agree["reference"] += int((expected.argmax(1) == first[-new:]).sum())
            agree["candidate"] += int((_logits(exact, second, new).argmax(1) == second[-new:]).sum())
            unequal = (reference[row, prompt:] != candidate[row, prompt:]).nonzero()
            if not len(unequal):
                continue
            step = int(unequal[0])
            chosen = [int(tokens[row, prompt + step]) for tokens in (reference, candidate)]
            best = expected[step].topk(2).values
            gap = float((expected[step, chosen[0]] - expected[step, chosen[1]]).abs())
            differences.append(
                {
                    "row": row,
                    "step": step,
                    "tokens": chosen,
                    "float32_gap": gap,
                    "float32_margin": float(best[0] - best[1]),
                    "noise_at_step": float(noise[step]),
                    "is_tie": gap <= 2 * float(noise[step]),
                }
            )
    every = torch.stack(noises)
    return {
        "tokens_equal": int((reference[:, prompt:] == candidate[:, prompt:]).sum()),
        "tokens_total": int(reference[:, prompt:].numel()),
        "rows_equal": reference.shape[0] - len(differences),
        "first_differences": differences,
        "all_differences_are_ties": all(difference["is_tie"] for difference in differences),
        "noise_max": float(every.max()),
        "noise_median": float(every.median()),
        "argmax_of_float32_given_own_prefix": agree,
    }
