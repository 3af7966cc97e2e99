#include "overlap/operator.h"
#include "overlap/ag_wgrad/cpu.h"

namespace tandem {
namespace {

OperatorSpec spec_of(const Communicator& comm, const AgWgrad::Shape& s) {
  const int64_t rows = shard_of(s.m, comm.size(), comm.rank()).count;
  return {.op = OverlapOp::ag_wgrad,
          .m = s.m,
          .n = s.n,
          .k = s.k,
          .dtype = s.dtype,
          .x = {"x", rows, s.k, s.dtype, s.dtype},
          .weight = {"dy", s.m, s.n, s.dtype, s.dtype},
          .out = {"dw", s.n, s.k, DType::f32, DType::f32, true},
          .chunk_rows = s.m / comm.size(),
          .weight_kn = s.weight_kn};
}

}  // namespace

AgWgrad::AgWgrad(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator<AgWgradCpu>(comm, spec_of(comm, shape), shape, options)) {}
AgWgrad::~AgWgrad() = default;
AgWgrad::AgWgrad(AgWgrad&&) noexcept = default;
AgWgrad& AgWgrad::operator=(AgWgrad&&) noexcept = default;

void AgWgrad::run(const Tensor& x, const Tensor& dy, const Tensor& dw) {
  operator_of(impl_, OverlapOp::ag_wgrad).run(x, dy, dw, nullptr, nullptr);
}
Strategy AgWgrad::strategy() const {
  return operator_of(impl_, OverlapOp::ag_wgrad).strategy();
}

}  // namespace tandem
