# For -DCMAKE_PROJECT_llama.cpp_INCLUDE=<this file> when llama.cpp is built into the cache.
#
# Decoding of blocks to float32 lives in ggml-base, which llama.cpp compiles for the oldest processor even in a native build (only
# ggml-cpu gets -march=native). Compiled for this machine it is 1.3 to 4 times as fast (docs/log.md), and an exact training step
# decodes every weight twice. Contraction into fused multiply-adds stays off, so that decoding stays bit-equal to everyone else's.
function(pyggtrain_native_ggml_base)
  target_compile_options(ggml-base PRIVATE -march=native -ffp-contract=off)
endfunction()
cmake_language(DEFER CALL pyggtrain_native_ggml_base)

# Older GCC believes that _tile_loadconfig reads 8 of its 64 bytes (GCC bug 114098; mended in 14, 13.3, 12.4): the optimiser drops the
# tiles' sizes, and on a processor with AMX the first product of a quantised model ends in an illegal instruction. llama.cpp then
# takes its AVX-512 kernels.
function(pyggtrain_ggml_cpu_without_amx)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14 AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
  endif()
endfunction()
cmake_language(DEFER CALL pyggtrain_ggml_cpu_without_amx)
