"""Fine-tuning on files: their lines, what a job is trained with, and graders."""
