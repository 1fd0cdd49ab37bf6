"""llama.cpp's own compute graph of a file as a torch model: every architecture that llama.cpp runs can be trained.

The road of a file: `capture` (llama.cpp builds the graph, in a child process) -> `ir` (the graph as data, with the
number of tokens symbolic) -> `rewrite` (adapter taken out, casts forwarded, neighbours joined) -> `lowering` (each
node a torch function) -> `model` (the module that training sees).

This module imports nothing, so that the child process starts in a moment: import the modules by name.
"""
