# For -DCMAKE_PROJECT_llama_cpp_INCLUDE=<this file> when llama-cpp-python is built: leaves out llama.cpp's `common` library, which its
# CMakeLists.txt turns on with FORCE though the package installs only libllama and ggml. A plain variable wins over the
# cache (CMP0126, CMP0077). Halves the build: 200 CPU-seconds instead of 420.
set(LLAMA_BUILD_COMMON OFF)
# And without AMX where the compiler gets it wrong.
include("${CMAKE_CURRENT_LIST_DIR}/ggml_base.cmake")
