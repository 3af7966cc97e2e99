#include "overlap/operator.h"
#include "overlap/gemm_rs/cpu.h"

namespace tandem {
namespace {

OperatorSpec spec_of(const Communicator& comm, const GemmRs::Shape& s) {
  return {.op = OverlapOp::gemm_rs,
          .m = s.m,
          .n = s.n,
          .k = s.k,
          .dtype = s.dtype,
          .x = {"x", s.m, s.k, s.dtype, s.dtype},
          .weight = {"weight", s.n, s.k, s.dtype, s.dtype, true},
          .out = {"out", shard_of(s.m, comm.size(), comm.rank()).count, s.n, s.dtype, DType::f32},
          .chunk_rows = s.m / comm.size(),
          .bias = s.bias,
          .weight_kn = s.weight_kn,
          .out_dtype = s.out_dtype,
          .scaling = s.scaling};
}

}  // namespace

GemmRs::GemmRs(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator<GemmRsCpu>(comm, spec_of(comm, shape), shape, options)) {}
GemmRs::~GemmRs() = default;
GemmRs::GemmRs(GemmRs&&) noexcept = default;
GemmRs& GemmRs::operator=(GemmRs&&) noexcept = default;

void GemmRs::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                 const Scales* scales) {
  operator_of(impl_, OverlapOp::gemm_rs).run(x, weight, out, bias, scales);
}
Strategy GemmRs::strategy() const {
  return operator_of(impl_, OverlapOp::gemm_rs).strategy();
}

}  // namespace tandem
