"""Actor, critic, reference and adapters over transformers."""
