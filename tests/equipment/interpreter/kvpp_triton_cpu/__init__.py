"""A Triton backend for CPUs that compiles nothing: kernels run in Triton's interpreter.

vLLM's model runner V2 wants a Triton with a backend named "cpu", which no wheel on the package
index has. This one is found by its entry point where its folder, a Triton and TRITON_INTERPRET=1
are in the environment.
"""
