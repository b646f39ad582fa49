"""What tune() shows: lines, a live view, and curves."""
