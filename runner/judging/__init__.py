"""An LLM as a judge, and the rubrics it judges by."""
