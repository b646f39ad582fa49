"""A random model of the shape of Qwen3, whose tokenizer has a word for each of its tokens, as a trained one has."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.train_step import SHAPES, write_random
from examples.sums.model import CHAT_TEMPLATE, CONTROL_TOKENS, IM_END, LONGEST

_VOCABULARY = 151_936
#: vLLM's attention on a CPU has no heads as narrow as those of the tiniest shape.
_SHAPES = SHAPES | {"tiny": (64, 128, 2, 4, 2, 32, _VOCABULARY, True)}
_LETTERS = "etaoinshrdlcumwfgypbvk"


def _word(number: int) -> str:
    """A word of letters, another for each number; every other one begins with a space, as byte pairs do."""
    letters, rest = "", number // 2
    while True:
        letters += _LETTERS[rest % len(_LETTERS)]
        rest //= len(_LETTERS)
        if not rest:
            return ("Ġ" if number % 2 else "") + letters + "x"


def tokenizer(size: int = _VOCABULARY) -> PreTrainedTokenizerFast:
    """It reads bytes; what is sampled may be any of its words. The last tokens are ChatML's."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [_word(number) for number in range(size - len(words) - len(CONTROL_TOKENS))]
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    if len(backend.get_vocab()) != size:
        raise ValueError(f"it has {len(backend.get_vocab())} tokens, not {size}")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=CONTROL_TOKENS[0],
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(),
    )


def make_model(size: str, folder: Path, *, on_gpu: bool) -> Path:
    """Its folder: weights in bfloat16 on a GPU, in float32 on a CPU."""
    words = tokenizer()
    special = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": None}
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    write_random(_SHAPES[size], folder, dtype, torch.device(device), **special)
    words.save_pretrained(folder)
    return folder
