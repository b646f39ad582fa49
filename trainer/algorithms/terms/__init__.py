"""What algorithms are made of: estimators, losses, groups, targets."""
