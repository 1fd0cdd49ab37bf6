# llama.cpp's MMQ for -DPYGGTRAIN_CUDA=ON: finds nvcc and the card's architecture, builds vendor/ggml_mmq once into the cache beside
# llama.cpp's libraries, defines the target `llama_cpp_cuda`. Included after vendor/llama_cpp.cmake, whose variables it uses.
#
# One architecture per build: each takes half an hour of processor time (2 minutes on 16 cores). It is that of the cards in this machine;
# -DCMAKE_CUDA_ARCHITECTURES=<list> names others.

set(PYGGTRAIN_GGML_CUDA_DIR "" CACHE PATH "Folder of ggml's CUDA sources, where it is not inside the llama.cpp source folder")
set(_ggml_cuda_dir "${_source_dir}/ggml/src/ggml-cuda")
if(PYGGTRAIN_GGML_CUDA_DIR)
  set(_ggml_cuda_dir "${PYGGTRAIN_GGML_CUDA_DIR}")
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  file(GLOB _toolkits /usr/local/cuda/bin /usr/local/cuda-*/bin /opt/cuda/bin)
  find_program(_nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin PATHS ${_toolkits})
  if(NOT _nvcc)
    message(FATAL_ERROR "PYGGTRAIN_CUDA is on, but there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda*.\n"
                        "Install a CUDA toolkit (12.0 or newer), set CUDACXX=<path of nvcc>, or install without PYGGTRAIN_CUDA: "
                        "training on a GPU works without it, through Triton.")
  endif()
  set(CMAKE_CUDA_COMPILER "${_nvcc}" CACHE FILEPATH "nvcc")
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE _capabilities ERROR_QUIET RESULT_VARIABLE _status)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" _capabilities "${_capabilities}")
  list(REMOVE_DUPLICATES _capabilities)
  if(NOT _status EQUAL 0 OR NOT _capabilities)
    message(FATAL_ERROR "PYGGTRAIN_CUDA is on, but nvidia-smi shows no card to compile for. Name the architecture, such as "
                        "-Ccmake.define.CMAKE_CUDA_ARCHITECTURES=90-real (RTX 30: 86, RTX 40: 89, H100 and H200: 90, RTX 50: 120a).")
  endif()
  foreach(_capability IN LISTS _capabilities)
    string(REPLACE "." "" _architecture "${_capability}")
    # Blackwell's 4-bit instructions exist only in the architecture-specific variant.
    string(REGEX REPLACE "^(12[0-9])$" "\\1a" _architecture "${_architecture}")
    list(APPEND _architectures "${_architecture}-real")
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES "${_architectures}" CACHE STRING "CUDA architectures")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is version ${CMAKE_CUDA_COMPILER_VERSION}; needed: 12.0 or newer.")
endif()
find_package(CUDAToolkit REQUIRED)
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

foreach(_file CMakeLists.txt cublas_stub.h)
  file(SHA256 "${CMAKE_CURRENT_LIST_DIR}/ggml_mmq/${_file}" _sha256)
  list(APPEND _recipe "${_sha256}")
endforeach()
string(SHA256 _key "${_ggml_cuda_dir};${CMAKE_CUDA_COMPILER};${CMAKE_CUDA_COMPILER_VERSION};${CMAKE_CUDA_ARCHITECTURES};${CMAKE_CXX_COMPILER};${CMAKE_CXX_COMPILER_VERSION};$ENV{CUDAFLAGS};$ENV{CXXFLAGS};${_recipe}")
string(SUBSTRING "${_key}" 0 12 _key)
set(_mmq_build_dir "${_version_dir}/mmq-${_key}")

if(NOT EXISTS "${_mmq_build_dir}/built" OR PYGGTRAIN_LLAMA_CPP_DIR)
  message(STATUS "Building llama.cpp's MMQ into the cache: half an hour of processor time, once per nvcc and architecture")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/ggml_mmq" -B "${_mmq_build_dir}" -G "${CMAKE_GENERATOR}"
            "-DGGML_DIR=${_source_dir}/ggml" "-DGGML_CUDA_DIR=${_ggml_cuda_dir}" -DCMAKE_BUILD_TYPE=Release
            "-DCMAKE_CUDA_COMPILER=${CMAKE_CUDA_COMPILER}" "-DCMAKE_CUDA_ARCHITECTURES=${CMAKE_CUDA_ARCHITECTURES}"
            "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}"
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${_mmq_build_dir}" --config Release --parallel
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(TOUCH "${_mmq_build_dir}/built")
endif()
file(GLOB_RECURSE _mmq_library "${_mmq_build_dir}/*${CMAKE_STATIC_LIBRARY_PREFIX}ggml-mmq${CMAKE_STATIC_LIBRARY_SUFFIX}")
if(NOT _mmq_library)
  message(FATAL_ERROR "The build of llama.cpp's MMQ in ${_mmq_build_dir} left no library. Delete that folder and install again.")
endif()

add_library(llama_cpp_cuda INTERFACE)
# ggml-base stands behind it in the link: MMQ asks it for the sizes of types.
target_link_libraries(llama_cpp_cuda INTERFACE ${_mmq_library} llama_cpp CUDA::cudart_static)
target_include_directories(llama_cpp_cuda BEFORE INTERFACE "${_mmq_build_dir}/stub")
get_filename_component(_ggml_cuda_parent "${_ggml_cuda_dir}" DIRECTORY)
target_include_directories(llama_cpp_cuda SYSTEM INTERFACE "${_ggml_cuda_parent}")
target_compile_definitions(llama_cpp_cuda INTERFACE GGML_CUDA_NO_VMM GGML_CUDA_NO_FA
  "PYGGTRAIN_CUDA_ARCHITECTURES=\"${CMAKE_CUDA_ARCHITECTURES}\"")
