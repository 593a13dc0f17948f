# The module _sim: the op table of _C over the CUDA kernels. g++ compiles them for this machine, with a call before every
# access to memory (sim/memory.h).
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR "the simulator needs g++, whose instrumentation it relies on; CMAKE_CXX_COMPILER names another")
endif()
file(GLOB SIM_SOURCES CONFIGURE_DEPENDS tests/simulator/csrc/sim/*.cpp)
file(GLOB_RECURSE KERNEL_SOURCES CONFIGURE_DEPENDS csrc/cuda/*.cu tests/simulator/csrc/sim/*.cu)
file(GLOB BINDING_SOURCES CONFIGURE_DEPENDS csrc/bindings/*.cpp)
file(GLOB TABLE_SOURCES CONFIGURE_DEPENDS csrc/base/*.cpp csrc/cpu/passes/*.cpp csrc/drafting/*.cpp csrc/growth/*.cpp
     csrc/networks/*.cpp tests/simulator/csrc/law/*.cpp)
list(APPEND TABLE_SOURCES ${BINDING_SOURCES})
set_source_files_properties(${KERNEL_SOURCES} PROPERTIES
  LANGUAGE CXX
  # Accesses stay as the source has them: nothing is joined to wider ones, split by members or made a built-in.
  COMPILE_OPTIONS "-fsanitize=thread,alignment,bounds,shift-exponent,integer-divide-by-zero;--param=tsan-instrument-func-entry-exit=0;--param=tsan-distinguish-volatile=1;-fno-tree-vectorize;-fno-store-merging;-fno-tree-sra;-fno-optimize-sibling-calls;-fno-builtin-memcpy;-fno-builtin-memmove;-fno-builtin-memset;-Wno-unknown-pragmas")
# Bindings run once per op: compiling them faster counts for more.
set_source_files_properties(${BINDING_SOURCES} tests/simulator/csrc/sim/module.cpp PROPERTIES COMPILE_OPTIONS -O0)

# In this order: where an inline function is compiled in several, the linker keeps the first, and the simulator's own
# must not be instrumented, the kernels' must.
pybind11_add_module(_sim MODULE NO_EXTRAS ${SIM_SOURCES} ${KERNEL_SOURCES} ${TABLE_SOURCES})
target_include_directories(_sim PRIVATE csrc tests/simulator/csrc)
target_compile_options(_sim PRIVATE -Wall -Wextra -Wno-psabi -ffp-contract=off -g1 -O2)
target_compile_definitions(_sim PRIVATE
  SPECENGINE_MODULE=_sim
  SPECENGINE_SIM
  SPECENGINE_OPS_ONLY
  SPECENGINE_HAVE_CUDA
  SPECENGINE_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  SPECENGINE_CUDA_ARCHITECTURES="simulated")
target_link_options(_sim PRIVATE -Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset)
target_link_libraries(_sim PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
