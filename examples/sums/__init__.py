"""A model of 0.33 M parameters learns one-digit sums from an agent's feedback while it is served."""
