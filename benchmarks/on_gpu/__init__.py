"""Common parts of the benchmarks on GPUs: a random model with a full tokenizer, engines, explorers."""
