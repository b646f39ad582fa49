"""Fine-tuning jobs as the service runs them: their files, and their prompts and grades."""
