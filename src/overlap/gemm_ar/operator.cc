#include "overlap/operator.h"
#include "overlap/gemm_ar/cpu.h"

namespace tandem {
namespace {

OperatorSpec spec_of(const GemmAr::Shape& s) {
  return {.op = OverlapOp::gemm_ar,
          .m = s.m,
          .n = s.n,
          .k = s.k,
          .dtype = s.dtype,
          .x = {"x", s.m, s.k, s.dtype, s.dtype},
          .weight = {"weight", s.n, s.k, s.dtype, s.dtype, true},
          .out = {"out", s.m, s.n, s.dtype, s.dtype},
          .chunk_rows = s.m,
          .bias = s.bias,
          .weight_kn = s.weight_kn,
          .one_shot_allowed = one_shot_allowed(s),
          .one_shot_preferred = one_shot_preferred(s),
          .out_dtype = s.out_dtype,
          .scaling = s.scaling,
          .add_norm = s.add_norm};
}

}  // namespace

GemmAr::GemmAr(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator<GemmArCpu>(comm, spec_of(shape), shape, options)) {}
GemmAr::~GemmAr() = default;
GemmAr::GemmAr(GemmAr&&) noexcept = default;
GemmAr& GemmAr::operator=(GemmAr&&) noexcept = default;

void GemmAr::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                 const Scales* scales, const AddNorm* add_norm) {
  operator_of(impl_, OverlapOp::gemm_ar).run(x, weight, out, bias, scales, add_norm);
}
Strategy GemmAr::strategy() const {
  return operator_of(impl_, OverlapOp::gemm_ar).strategy();
}

}  // namespace tandem
