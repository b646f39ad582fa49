"""What the benchmarks on GPUs have in common: a random model with a tokenizer of full size, engines, explorers."""
