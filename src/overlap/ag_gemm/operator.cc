#include "overlap/operator.h"
#include "overlap/ag_gemm/cpu.h"

namespace tandem {
namespace {

OperatorSpec spec_of(const Communicator& comm, const AgGemm::Shape& s) {
  const int64_t rows = shard_of(s.m, comm.size(), comm.rank()).count;
  return {.op = OverlapOp::ag_gemm,
          .m = s.m,
          .n = s.n,
          .k = s.k,
          .dtype = s.dtype,
          .x = {"x", rows, s.k, s.dtype, s.dtype},
          .weight = {"weight", s.n, s.k, s.dtype, s.dtype, true},
          .out = {"out", s.m, s.n, s.dtype, DType::f32},
          .chunk_rows = s.m / comm.size(),
          .keep_gathered = s.keep_gathered,
          .bias = s.bias,
          .weight_kn = s.weight_kn,
          .out_dtype = s.out_dtype,
          .scaling = s.scaling};
}

}  // namespace

AgGemm::AgGemm(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator<AgGemmCpu>(comm, spec_of(comm, shape), shape, options)) {}
AgGemm::~AgGemm() = default;
AgGemm::AgGemm(AgGemm&&) noexcept = default;
AgGemm& AgGemm::operator=(AgGemm&&) noexcept = default;

void AgGemm::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                 const Scales* scales) {
  operator_of(impl_, OverlapOp::ag_gemm).run(x, weight, out, bias, scales);
}
Tensor AgGemm::gathered() const {
  return operator_of(impl_, OverlapOp::ag_gemm).gathered();
}
Strategy AgGemm::strategy() const {
  return operator_of(impl_, OverlapOp::ag_gemm).strategy();
}

}  // namespace tandem
