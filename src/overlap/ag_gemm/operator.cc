#include "overlap/ag_gemm/operator.h"

#include "overlap/ag_gemm/cpu.h"
#include "overlap/ag_gemm/reference.h"

namespace tandem {

constinit const OperatorRow kAgGemmRow{
    .name = "ag_gemm",
    .class_name = "AgGemm",
    .collective = Collective::all_gather,
    .keep_gathered = true,
    .describe = describe_as<AgGemm::Shape, ag_gemm_desc>,
    .on_cpu = make_on_cpu<AgGemmCpu>,
    .on_gpu = ag_gemm_on_gpu,
    .reference = [](Communicator& comm,
                    const Operands& o) { ag_gemm_reference(comm, o.x, o.weight, o.out, o.bias); },
    .gemm = multiply,
    .flops = gemm_flops,
    .bytes = gathered_bytes,
    .codec_error = gathered_error,
};

OpDesc ag_gemm_desc(const Communicator& comm, const AgGemm::Shape& s) {
  const int64_t rows = shard_of(s.m, comm.size(), comm.rank()).count;
  OpDesc desc = gemm_desc(kAgGemmRow, s);
  desc.keep_gathered = s.keep_gathered;
  desc.local_n = true;
  desc.chunk_rows = s.m / comm.size();
  desc.x = {"x", rows, s.k, s.dtype, s.dtype};
  desc.out = {"out", s.m, s.n, desc.result(), DType::f32};
  return desc;
}

AgGemm::AgGemm(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator(kAgGemmRow, comm, encoded(ag_gemm_desc(comm, shape), options), options,
                          Choosing::fastest)) {}
AgGemm::~AgGemm() = default;
AgGemm::AgGemm(AgGemm&&) noexcept = default;
AgGemm& AgGemm::operator=(AgGemm&&) noexcept = default;

void AgGemm::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                 const Scales* scales) {
  operator_of(impl_, "ag_gemm").run({x, weight, out, bias, scales});
}
Tensor AgGemm::gathered() const {
  return operator_of(impl_, "ag_gemm").gathered();
}
Strategy AgGemm::strategy() const {
  return strategy_of(impl_, "ag_gemm");
}

}  // namespace tandem
