#include "overlap/gemm_rs/operator.h"

#include "overlap/contract/encoded_candidates.h"
#include "overlap/gemm_rs/cpu.h"
#include "overlap/gemm_rs/reference.h"

namespace tandem {

constinit const OperatorRow kGemmRsRow{
    .name = "gemm_rs",
    .class_name = "GemmRs",
    .collective = Collective::reduce_scatter,
    .describe =
        [](const Communicator& comm, const OpDesc& shape) {
          return with_wire_of(shape, gemm_rs_desc(comm, shape_of<GemmRs::Shape>(shape)));
        },
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
  const DType result = s.out_dtype == DType::f32 ? DType::f32 : s.dtype;
  return {.m = s.m,
          .n = s.n,
          .k = s.k,
          .dtype = s.dtype,
          .weight_kn = s.weight_kn,
          .bias = s.bias,
          .out_dtype = s.out_dtype,
          .scaling = s.scaling,
          .op = kGemmRsRow.name,
          .collective = kGemmRsRow.collective,
          .local_k = true,
          .chunk_rows = s.m / comm.size(),
          .x = {"x", s.m, s.k, s.dtype, s.dtype},
          .weight = {"weight", s.n, s.k, s.dtype, s.dtype, true},
          .out = {"out", shard_of(s.m, comm.size(), comm.rank()).count, s.n, result, DType::f32}};
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
