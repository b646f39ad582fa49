"""What is told to others about the work: traces, and curves in somebody else's tracker."""
