"""Which tasks come first."""

from tuneloop.runner.tasks.task_set import ImportedTask, what_teaches_most


def test_what_is_solved_sometimes_comes_first_and_one_in_five_was_never_run() -> None:
    learnt = [0.0] * 100 + [1.0] * 32  # what was long ago is forgotten
    outcomes = {"always": [1.0] * 8, "learnt": learnt, "half": [1.0, 0.0] * 4, "mostly": [1.0] * 7 + [0.0]}
    names = ["always", "fresh", "learnt", "mostly", "half", "new"]
    tasks = [ImportedTask(task_id=name, question=name, messages=()) for name in names]
    order = [each.task_id for each in what_teaches_most(tasks, outcomes)]
    assert order == ["half", "mostly", "always", "learnt", "fresh", "new"]
    assert [each.task_id for each in what_teaches_most(tasks, {})] == names
