"""What keys cost, and what they keep of others."""
