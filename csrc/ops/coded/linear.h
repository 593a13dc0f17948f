// out[M, N] = x[M, C] @ weight[N, C]^T + bias[N] on CUDA, with a weight in codes. Its values are rounded to bfloat16:
// the result is that of a product with these.
#pragma once
#include "ops/coded/form.h"

namespace specengine {

inline void check_coded_product(Checker& check, const TensorView& x, const TensorView& weight, const CodedForm& form,
                                int64_t rows, Dim& M) {
  Dim C{"C"};
  check(x, "x", {DType::kBFloat16}, {M, C});
  check_aligned(x, "x");
  const int64_t most = check_coded(check, weight, form, C);
  if (rows < 0 || rows > most || most - rows >= kCodedRows) {
    fail("rows: ", rows, " rows do not match ", most / kCodedRows, " panels of ", kCodedRows);
  }
}

// K is added in an order that does not depend on M: a row has the same bits in any company.
struct CodedLinear {
  TensorView x;         // [M, C] bfloat16
  TensorView weight;    // [P, C/128, bytes] uint8, see above
  CodedForm form;       // of the weight
  OptionalTensor bias;  // [N] float32
  TensorView out;       // [M, N] float32; columns [first, first + rows) are written
  int64_t first;
  int64_t rows;  // of this weight

  Device validate() const {
    Checker check;
    Dim M{"M"}, N{"N"};
    check_coded_product(check, x, weight, form, rows, M);
    check(out, "out", {DType::kFloat32}, {M, N});
    check.optional(bias, "bias", {DType::kFloat32}, {N});
    if (first < 0 || first > N - rows) {
      fail("first: ", rows, " columns from ", first, " on are not in out's N=", N.value);
    }
    return check.device();
  }
};

// The largest entry of each row of the same product, as LinearArgmax.
struct CodedLinearArgmax {
  TensorView x;         // [M, C] bfloat16
  TensorView weight;    // [P, C/128, bytes] uint8, see above
  CodedForm form;       // of the weight
  OptionalTensor bias;  // [N] float32
  TensorView ids;       // [M] int32, written; -1 as in LinearArgmax
  TensorView keys;      // [M] int64, workspace
  int64_t rows;         // N

  Device validate() const {
    Checker check;
    Dim M{"M"}, N{"N", rows, "rows"};
    check_coded_product(check, x, weight, form, rows, M);
    check.optional(bias, "bias", {DType::kFloat32}, {N});
    check(ids, "ids", {DType::kInt32}, {M});
    check(keys, "keys", {DType::kInt64}, {M});
    if (rows < 1) fail("rows: ", rows, " rows have no largest entry");
    return check.device();
  }
};

// out[M, C] = rows `ids` of a coded weight, as GatherRows: values that are not rounded.
struct GatherCoded {
  TensorView weight;  // [P, C/128, bytes] uint8, see above
  CodedForm form;     // of the weight
  TensorView ids;     // [M] int32; an id that is no row of the panels (-1 for padding) gives zeros
  TensorView out;     // [M, C] float32, written

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"};
    check(out, "out", {DType::kFloat32}, {M, C});
    check_aligned(out, "out");
    check_coded(check, weight, form, C);
    check(ids, "ids", {DType::kInt32}, {M});
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const CodedLinear&);
void run_cuda(const CodedLinearArgmax&);
void run_cuda(const GatherCoded&);
#endif

}  // namespace specengine
