"""The strategies: one folder for each engine, the library that distributes the model states.

    ddp         dp
    fsdp        fsdp
    deepspeed   zero1, zero2, zero3, offload, infinity

`table` has a row for each strategy. A row is an object of the engine's subclass of `Strategy`
(strategy.py). Code outside of this package and of the script asks the row, and knows no engine.
The folders have the same parts; an engine leaves out a part that it does not need:

    part             what it offers                         used by, through a method of Strategy
    strategy.py      the subclass of Strategy               table.py
    options.py       options from flags and a user's file   cli.parse, through resolve
    requirements.py  checks of the machine and releases     run.start_log and tools, through
                                                            check_requirements
    memory.py        terms of the memory estimate, without  memory.estimate, through memory_terms
                     PyTorch
    states.py        fp32 weights and optimizer states      checkpoints, model.export, through
                     of a rank                              states_of
    live_states.py   tensors that are in memory             memory.measure, through live_states
    patches.py       changes of the library's behavior      deepspeed/preparation.py

Only in one folder: fsdp/shards.py, which layers are sharded and how the weights get there;
deepspeed/preparation.py, for run.prepare_deepspeed; deepspeed/blocks.py, what stage 3 gathers at
once; deepspeed/ops.py, its C++ ops;
deepspeed/buckets.py, the sizes of its buckets; fsdp/read_options.py, the reading of its options;
ddp/hooks.py, the dtype in which DDP reduces. The script builds the model (build_ddp, build_fsdp,
build_deepspeed) and trains it; ENGINES has both functions of each engine. For all engines:

    objects           what a build function returns: model, optimizer, scaler
    gradients         gradient norm, check for non-finite values, loss scaling
    optimizer_shards  the base class of states.py: masters, and their pieces of parameters
    wrapped           what is inside the wrappers of the libraries
    accelerate        compares the configuration of `accelerate launch` with the flags
"""
