"""The tasks of the lab in their order."""

from tools.lab.task import Task
from tools.lab.tasks.average import check as average
from tools.lab.tasks.choice import check as choice
from tools.lab.tasks.fault import check as fault
from tools.lab.tasks.fault import loops
from tools.lab.tasks.resume import check as resume
from tools.lab.tasks.sharding import check as sharding
from tools.lab.tasks.spike import check as spike
from tools.lab.tasks.spike import rows
from tools.lab.tasks.states import check as states

TASKS = [
    Task(1, "states", "Predict the memory of five strategies, and measure it", 10, states.check),
    Task(2, "average", "Make a data-parallel loop equal to one process", 15, average.check),
    Task(3, "fault", "Find which of three loops has a fault", 15, fault.check, loops.prepare),
    Task(4, "choice", "Choose strategy, batch and machine", 15, choice.check),
    Task(5, "resume", "Kill a run, damage its checkpoint, and lose nothing", 10, resume.check),
    Task(6, "spike", "Find the row behind a spike", 10, spike.check, rows.prepare),
    Task(7, "sharding", "Write FSDP in 20 lines, and explain its peak", 25, sharding.check),
]
