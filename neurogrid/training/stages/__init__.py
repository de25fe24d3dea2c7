"""Training through a chain of stages: a model that no machine holds alone, forward and backward.

schedule        which micro-batch a stage computes when
inbox           tensors that wait until their turn
pace            whether a stage has become slow
cutting         where a model is cut into stages
replica_cuts    which members become replicas, and how each is cut
holdings        which members of replicas have the same pieces
stage_settings  what the learner of a stage is told
stage_learner   layers, their optimiser, and the steps that they take
outer_steps     what replicas have in common, and the step that they make together
lora            adapters beside linear layers, by PEFT
stage_process   a learner in a process of its own, as its owner has it
stage_program   the process
weight_files    tensors in files, each read when it is its turn
tensor_frames   tensors on their way between the two
"""
