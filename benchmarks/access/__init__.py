"""What keys cost."""
