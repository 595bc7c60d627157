"""The fault museum: documented bugs of training programs, and the checks that catch them.

`python -m tools.faults` plants one fault at a time in a copy of the project, as a patch of a few
lines, and runs the check that a user would run. It also runs each check without a fault, with other
seeds: then it must be silent. docs/FAULTS.md shows the results. Imported in this order:

    fault              what a fault is: its reports, its check, what the check found
    bench              copies of the project, with or without a patch, and their runs
    checks             what a user runs: comparisons, --prove, --show_sample, epochs at a rate of 0
    state_checks       what a user runs: resumes, exported models, counts, memory
    gradients          faults of the loss and the gradients
    data               faults of the data and its order
    resume             faults of a resumed run
    export             faults of sharding and of the exported model
    memory             faults of the numbers about memory and work
    catalogue          all faults
    deepspeed_loop     a plain loop under ZeRO-2, compared with PyTorch
    deepspeed_release  the fault that is not planted: DeepSpeed 0.18.2
    run                plants them, runs the checks, and writes results.json
    page               docs/FAULTS.md and its figure, from results.json and the catalogue
    __main__           the command line
"""
