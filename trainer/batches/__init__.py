"""Batches made of leased experiences: selection, sequences, credit, tensors."""
