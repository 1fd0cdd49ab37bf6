"""What the kernels compute, in plain torch and float64, written for a reader: the oracle of tests and benchmarks."""
