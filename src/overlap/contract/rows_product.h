// GEMM of an operator's rows on a CPU rank: of the operands themselves or, with e4m3, of their
// codes in f32, scaled afterwards.
#pragma once

#include "tandem/tensor.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

class RowsProduct {
 public:
  /// Allocates what calls need for up to desc.m rows.
  explicit RowsProduct(const OpDesc& desc);
  /// Begins a call: decodes an e4m3 weight. `operands` must outlive it.
  void begin(const Operands& operands);
  /// out = x weight^T + bias, of out's dtype. `scales`, of e4m3 rows: theirs, or the only one.
  void run(const Tensor& x, const float* scales, const Tensor& out, const Tensor* bias = nullptr);
  /// Does so for rows [begin, begin + count) of the call's x.
  void run_local(int64_t begin, int64_t count, const Tensor& out, const Tensor* bias = nullptr);

 private:
  OpDesc desc_;
  const Operands* operands_ = nullptr;
  Memory weight_, x_, product_;  ///< e4m3: values of the codes, and the f32 product
};

}  // namespace tandem
