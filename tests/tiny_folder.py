"""A tiny random model with a tokenizer, as a folder that ``octavo serve`` takes. Its texts mean nothing; its life is real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from tests.model.tiny_models import SHAPE

# For processes that run such a model: threads would only wait for each other, and for long where other work shares the machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The same for this process; import it where tiny models run."""
    before = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(before[0])
    torch.set_num_threads(before[1])


VOCAB_SIZE = 300  # more than the tokenizer has: published models pad theirs too
EOS = 1


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level, without merges: a token for each byte, behind the two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(["<|begin|>", "<|end|>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    return backend


def make_folder(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    class_name: str = "LlamaForCausalLM",
    attention_gain: float = 1.0,
    **config: Any,
) -> Any:
    """Write model and tokenizer; returns transformers' own model, in ``dtype``.

    The attention of a random model hardly looks at positions; a larger ``attention_gain`` makes it, and the tokens follow.
    """
    shape = {**SHAPE, "vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": EOS, "max_position_embeddings": 8192}
    torch.manual_seed(5)
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**{**shape, **config})).to(dtype).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # spread logits: greedy choices that rounding does not flip
        for name, weight in model.named_parameters():
            if "self_attn" in name:
                weight.mul_(attention_gain)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return model
