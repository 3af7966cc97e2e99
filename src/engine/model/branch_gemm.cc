#include "engine/model/branch_gemm.h"

#include "engine/model/branch.h"
#include "gemm/quantized_gemm.h"
#include "kernels/elementwise.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

/// Shape of the operator. Both forms of a weight are by output features then.
template <typename Shape>
Shape operator_shape(const ModelContext& context, Shape shape) {
  if (!context.quantized) return shape;
  shape.weight_kn = false;
  if constexpr (requires { shape.keep_gathered; }) shape.keep_gathered = false;
  shape.out_dtype = shape.dtype;
  shape.dtype = quantized_operand_dtype(context.exec);
  shape.scaling = Scaling::row;
  return shape;
}

}  // namespace

template <typename Operator>
BranchGemm<Operator>::BranchGemm(ModelContext& context, const Shape& shape,
                                 const OverlapOptions& options)
    : context_(context),
      shape_(shape),
      operator_(context.tp, operator_shape(context, shape), options_on(context.tp, options)) {
  if constexpr (requires { shape.keep_gathered; }) {
    const bool gathers = shape.keep_gathered && context.quantized && context.tp.size() > 1;
    if (gathers) gathered_.emplace(context.make(shape.dtype, shape.m, shape.k));
  }
}

template <typename Operator>
void BranchGemm<Operator>::run(const Tensor& x, const WeightMatrix& m, const Tensor& out) {
  const Tensor values = context_.weights.matrix(m);
  if (!context_.quantized) {
    return operator_.run(x, shape_.weight_kn ? values.transposed() : values, out);
  }
  x_ = x;
  const QuantizedRows weight = context_.quantized->weight(m, values, shape_.weight_kn),
                      rows = context_.quantized->rows(x);
  if (quantized_operand_dtype(context_.exec) != DType::e4m3) {
    return multiply_values(rows, weight, out);
  }
  const Scales scales{rows.scales, weight.scales};
  operator_.run(rows.codes, weight.codes, out, nullptr, &scales);
}

template <typename Operator>
void BranchGemm<Operator>::multiply_values(const QuantizedRows& x, const QuantizedRows& weight,
                                           const Tensor& out) {
  const Activation rows(DType::f32, x.codes.dim(0), x.codes.dim(1)),
      by_feature(DType::f32, weight.codes.dim(0), weight.codes.dim(1)),
      product(DType::f32, out.dim(0), out.dim(1));
  dequantize_rows(x.codes, x.scales, rows);
  dequantize_rows(weight.codes, weight.scales, by_feature);
  operator_.run(rows, by_feature, product);
  cast(context_.exec, product, out);
}

template <typename Operator>
Tensor BranchGemm<Operator>::gathered() {
  if (!context_.quantized) {
    if constexpr (requires { operator_.gathered(); }) return operator_.gathered();
  }
  if (!gathered_) return x_;
  all_gather(context_.tp, x_, *gathered_);
  return *gathered_;
}

template class BranchGemm<AgGemm>;
template class BranchGemm<GemmRs>;

}  // namespace tandem
