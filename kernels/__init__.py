"""Triton kernels: raw tensors in, raw tensors out.

No autograd, no modules, no bridge: gradients are functions of their own (`<op>_backward`), and `pyggtrain.ops` ties the
two together. Importing this package needs neither Triton nor a GPU; calling a kernel needs both (or Triton's
interpreter, TRITON_INTERPRET=1 set before the first import, which is how the tests run them on a CPU).

    dequant/      ggml blocks -> float, one tile decoder per ggml type
    reference/    the same functions in plain torch and float64, written for a reader, and the list of test cases
"""
