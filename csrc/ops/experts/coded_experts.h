// ExpertLinear on CUDA with weights in codes (ops/coded/form.h): the product with their values, rounded to bfloat16.
#pragma once
#include "ops/coded/linear.h"
#include "ops/experts/experts.h"

namespace specengine {

struct CodedExpertLinear {
  TensorView x;         // [M, C] bfloat16
  OptionalTensor rows;  // [P] int32: the row of x of each place; None: x has the places' order
  TensorView weight;    // [panels of all experts, C/128, bytes] uint8; each expert begins a panel
  CodedForm form;       // of the weight
  OptionalTensor bias;  // [E, N] float32
  TensorView starts;    // [E + 1] int32, see GroupPairs
  TensorView out;       // [P, N] float32; columns [first, first + columns) are written
  int64_t first;
  int64_t columns;  // of one expert in this weight

  int64_t panels() const { return (columns + kCodedRows - 1) / kCodedRows; }  // of one expert

  Device validate() const {
    Checker check;
    Dim M{"M"}, ends{"E+1"};
    check(starts, "starts", {DType::kInt32}, {ends});
    const int64_t experts = ends - 1;
    if (columns < 1) fail("columns: expected at least 1, got ", columns);
    check_coded_product(check, x, weight, form, experts * panels() * kCodedRows, M);
    check_places(check, rows, bias, out, experts, first, columns, M);
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const CodedExpertLinear&);
#endif

}  // namespace specengine
