#include "bindings/machine.h"

#include "base/draw_arithmetic.h"
#include "base/isa.h"
#include "base/launch_mode.h"
#include "base/thread_pool.h"
#include "ops/expand_backbone.h"
#include "ops/fused/fused_linear.h"
#include "ops/growth/expand_levels.h"
#include "ops/kv_cache.h"
#include "ops/select_nodes.h"
#include "ops/verify_tree.h"

namespace py = pybind11;

namespace specengine {
namespace {

const char* cuda_architectures() {
#if defined(SPECENGINE_HAVE_CUDA)
  return SPECENGINE_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}

py::tuple instruction_sets() {  // those that this build has and this machine can run
  py::list names;
  for (Isa isa : kIsas) {
    if (runs_here(isa)) names.append(name_of(isa));
  }
  return py::tuple(names);
}

void set_instruction_set(const std::string& name) {
  for (Isa isa : kIsas) {
    if (name == name_of(isa) && runs_here(isa)) return void(active_isa() = isa);
  }
  fail("name: instruction set '", name, "' is not in this build or not on this machine");
}

py::tuple linear_variants() {  // (rows, warps) of a block, from variant 1 on
  py::list variants;
  for (const LinearVariant& variant : kLinearVariants) variants.append(py::make_tuple(variant.rows, variant.warps));
  return py::tuple(variants);
}

py::dict block_formats() {  // name: (columns, columns that share a scale, bytes) of a block
  py::dict formats;
  for (const BlockFormat* format : kBlockFormats) {
    formats[format->name] = py::make_tuple(format->columns, format->group, format->bytes());
  }
  return formats;
}

}  // namespace

void add_machine(py::module_& m) {
  m.attr("PAGE_SIZE") = kPageSize;
  m.attr("MAX_NODES") = kMaxNodes;
  m.attr("MOST_FUSED_ROWS") = kMostFusedRows;
  m.attr("MAX_CANDIDATES") = kMaxCandidates;
  m.attr("PANEL") = kPanel;
  m.attr("BLOCK") = kBlock;
  m.attr("ROW_BLOCK_BYTES") = kRowBlockBytes;
  m.attr("BLOCK_FORMATS") = block_formats();
  m.attr("VOCABULARY_PART") = kVocabularyPart;
  m.attr("MAX_LEVEL_CHILDREN") = kMaxLevelChildren;
  m.attr("NOISE_BLOCK") = kNoiseBlock;
  m.attr("LINEAR_VARIANTS") = linear_variants();
  m.attr("ROW_STATE_WORDS") = kRowStateWords;
  m.attr("WEIGHT_PLANES") = kWeightPlanes;
  m.attr("NO_DRAFT") = kNoDraft;
  m.attr("NO_ALLOWED") = kNoAllowed;
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, py::arg("n"));
  m.attr("instruction_sets") = instruction_sets();
  m.def("instruction_set", [] { return name_of(active_isa()); });
  m.def("set_instruction_set", &set_instruction_set, py::arg("name"));
#if defined(SPECENGINE_HAVE_CUDA)
  m.def("set_programmatic_launch", &set_programmatic_launch, py::arg("enabled"));
#endif
  m.attr("cuda_architectures") = cuda_architectures();
  m.attr("compiler") = SPECENGINE_COMPILER;
}

}  // namespace specengine
