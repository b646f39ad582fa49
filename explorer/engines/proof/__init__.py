"""What an engine proves its weights by, whichever engine it is."""
