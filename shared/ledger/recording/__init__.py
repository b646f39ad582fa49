"""What the spool brings: exchanges, experiences, feedback, and how feedback becomes a reward."""
