"""What the explorer and the trainer would be wrong to disagree about."""

VERSION = "0.1.0"
