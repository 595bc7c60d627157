"""python -m tools.lab: seven tasks about distributed training, which check themselves.

__main__     the command line
catalogue    the tasks and their order
task         a task: its page, its starting files and its check
verdict      what a check found: right, or wrong with a name and a reason
answers      reads what a student hands in, and runs of the trainer
programs     runs a student's program on several ranks, with a time limit
progress     lab/progress.json: attempts and times
report       lab/report.md, the page for the teacher
tasks        a folder for each task: page.md, files/ (where it starts), check.py
"""
