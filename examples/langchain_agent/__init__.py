"""The agent of examples/math_agent written with LangChain."""
