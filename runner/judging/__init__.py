"""Language models as judges, and their rubrics."""
