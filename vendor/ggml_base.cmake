# For -DCMAKE_PROJECT_llama.cpp_INCLUDE=<this file> when llama.cpp is built into the cache.
#
# Decoding of blocks to float32 lives in ggml-base, which llama.cpp compiles for the oldest processor even in a native build (only
# ggml-cpu gets -march=native). Compiled for this machine it is 1.3 to 4 times as fast (docs/log.md), and an exact training step
# decodes every weight twice. Contraction into fused multiply-adds stays off, so that decoding stays bit-equal to everyone else's.
function(pyggtrain_native_ggml_base)
  target_compile_options(ggml-base PRIVATE -march=native -ffp-contract=off)
endfunction()
cmake_language(DEFER CALL pyggtrain_native_ggml_base)
