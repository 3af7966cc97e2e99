#include "overlap/gemm_rs/operator.h"

#include "overlap/gemm_rs/cpu.h"
#include "overlap/gemm_rs/reference.h"

namespace tandem {

constinit const OperatorRow kGemmRsRow{
    .name = "gemm_rs",
    .class_name = "GemmRs",
    .collective = Collective::reduce_scatter,
    .describe = describe_as<GemmRs::Shape, gemm_rs_desc>,
    .on_cpu = make_on_cpu<GemmRsCpu>,
    .on_gpu = gemm_rs_on_gpu,
    .reference = [](Communicator& comm,
                    const Operands& o) { gemm_rs_reference(comm, o.x, o.weight, o.out, o.bias); },
    .gemm = multiply,
    .flops = gemm_flops,
    .bytes = scattered_bytes,
    .codec_error = scattered_error,
};

OpDesc gemm_rs_desc(const Communicator& comm, const GemmRs::Shape& s) {
  OpDesc desc = gemm_desc(kGemmRsRow, s);
  desc.local_k = true;
  desc.chunk_rows = s.m / comm.size();
  desc.x = {"x", s.m, s.k, s.dtype, s.dtype};
  desc.out = {"out", shard_of(s.m, comm.size(), comm.rank()).count, s.n, desc.result(), DType::f32};
  return desc;
}

GemmRs::GemmRs(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator(kGemmRsRow, comm, encoded(gemm_rs_desc(comm, shape), options), options,
                          Choosing::fastest)) {}
GemmRs::~GemmRs() = default;
GemmRs::GemmRs(GemmRs&&) noexcept = default;
GemmRs& GemmRs::operator=(GemmRs&&) noexcept = default;

void GemmRs::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                 const Scales* scales) {
  operator_of(impl_, "gemm_rs").run({x, weight, out, bias, scales});
}
Strategy GemmRs::strategy() const {
  return strategy_of(impl_, "gemm_rs");
}

}  // namespace tandem
