"""A ReAct agent that solves word problems with a calculator, tuned in a hundred lines."""
