"""From leased experiences to batches: selection, sequences, credit, tensors."""
