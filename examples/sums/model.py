"""Builds the smallest model that real vLLM serves: a Qwen3 of 0.36 M parameters that reads bytes and speaks ChatML."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
# Not "special": a tool-call parser must see them in the text.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
LONGEST = 8192


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and ChatML's own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False) for token in TOOL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(),
    )


def build(seed: int = 0) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """An untrained model, float32, the same for the same seed; and its tokenizer."""
    words = tokenizer()
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    return model, words


def save(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, path: Path) -> None:
    """Write both as a Hugging Face folder."""
    disable_progress_bar()
    model.save_pretrained(path)
    words.save_pretrained(path)
