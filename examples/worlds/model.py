"""Makes a model for one world: a Qwen3 of any size, and a tokenizer of the world's words."""

import random
from collections.abc import Iterator
from itertools import islice

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.sums.model import CONTROL_TOKENS, END_OF_TEXT, IM_END, TOOL_TOKENS
from examples.tasks.dialogue import Task, forever, text_of
from examples.tasks.warmup import CHAT_TEMPLATE

#: Tokens; the words of a world are a few hundred.
VOCABULARY = 768
LONGEST = 4096
_READ = 400


def tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Whole words of the world, single digits, and bytes for all else."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_texts(task), trainer)
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


def build(
    words: PreTrainedTokenizerFast, *, hidden: int, layers: int, is_tied: bool = False, seed: int = 0
) -> Qwen3ForCausalLM:
    """An untrained model, float32, the same for the same seed. `hidden` is a multiple of 32."""
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": None}
    head = 64 if hidden % 64 == 0 and hidden >= 512 else 32
    config = Qwen3Config(
        vocab_size=-(-len(words) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=max(1, hidden // head // 2),
        head_dim=head,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=is_tied,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    return model


def parameters(model: Qwen3ForCausalLM) -> int:
    return sum(each.numel() for each in model.parameters())


def _texts(task: Task) -> Iterator[str]:
    """All texts of the world, so that each word becomes a token."""
    slip = random.Random("words")
    for tool in task.tools:
        yield from (tool["function"]["name"], *tool["function"]["parameters"]["properties"])
    for question in islice(forever(task, 0), _READ):
        dialogue = task.dialogue(question)
        messages = next(dialogue)
        for reply in task.replies(question, slip):
            yield from (str(each["content"]) for each in messages if each["role"] != "assistant")
            yield text_of(reply)
            try:
                messages = dialogue.send(reply)
            except StopIteration:
                break
