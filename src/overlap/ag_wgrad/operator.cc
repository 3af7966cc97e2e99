#include "overlap/ag_wgrad/operator.h"

#include "gemm/gemm.h"
#include "overlap/ag_wgrad/cpu.h"
#include "overlap/ag_wgrad/reference.h"

namespace tandem {

constinit const OperatorRow kAgWgradRow{
    .name = "ag_wgrad",
    .class_name = "AgWgrad",
    .collective = Collective::all_gather,
    .gradient = true,
    .describe = describe_as<AgWgrad::Shape, ag_wgrad_desc>,
    .on_cpu = make_on_cpu<AgWgradCpu>,
    .on_gpu = ag_wgrad_on_gpu,
    .reference = [](Communicator& comm,
                    const Operands& o) { ag_wgrad_reference(comm, o.x, o.weight, o.out); },
    .gemm =
        [](const Tensor& x, const Tensor& dy, const Tensor& dw) {
          gemm(dy.transposed(), x, dw, {nullptr, true});
        },
    .flops = gemm_flops,
    .bytes = gathered_bytes,
};

OpDesc ag_wgrad_desc(const Communicator& comm, const AgWgrad::Shape& s) {
  const int64_t rows = shard_of(s.m, comm.size(), comm.rank()).count;
  return {.m = s.m,
          .n = s.n,
          .k = s.k,
          .dtype = s.dtype,
          .weight_kn = s.weight_kn,
          .op = kAgWgradRow.name,
          .collective = kAgWgradRow.collective,
          .gradient = true,
          .local_n = true,
          .chunk_rows = s.m / comm.size(),
          .x = {"x", rows, s.k, s.dtype, s.dtype},
          .weight = {"dy", s.m, s.n, s.dtype, s.dtype},
          .out = {"dw", s.n, s.k, DType::f32, DType::f32, true}};
}

AgWgrad::AgWgrad(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator(kAgWgradRow, comm, encoded(ag_wgrad_desc(comm, shape), options), options,
                          Choosing::fastest)) {}
AgWgrad::~AgWgrad() = default;
AgWgrad::AgWgrad(AgWgrad&&) noexcept = default;
AgWgrad& AgWgrad::operator=(AgWgrad&&) noexcept = default;

void AgWgrad::run(const Tensor& x, const Tensor& dy, const Tensor& dw, bool accumulate) {
  operator_of(impl_, "ag_wgrad").run({.x = x, .weight = dy, .out = dw, .accumulate = accumulate});
}
Strategy AgWgrad::strategy() const {
  return strategy_of(impl_, "ag_wgrad");
}

}  // namespace tandem
