#include "overlap/gemm_ar/operator.h"

#include <fmt/format.h>

#include "overlap/gemm_ar/cpu.h"
#include "overlap/gemm_ar/reference.h"

namespace tandem {

constinit const OperatorRow kGemmArRow{
    .name = "gemm_ar",
    .class_name = "GemmAr",
    .collective = Collective::all_reduce,
    .add_norm = true,
    .describe = describe_as<GemmAr::Shape, gemm_ar_desc>,
    .on_cpu = make_on_cpu<GemmArCpu>,
    .on_gpu = gemm_ar_on_gpu,
    .reference =
        [](Communicator& comm, const Operands& o) {
          gemm_ar_reference(comm, o.x, o.weight, o.out, o.bias, o.add_norm);
        },
    .gemm = multiply,
    .flops = gemm_flops,
    .bytes = [](int ranks, const OpDesc& desc) { return 2 * scattered_bytes(ranks, desc); },
    .codec_error = summed_error,
};

OpDesc gemm_ar_desc(const Communicator&, const GemmAr::Shape& s) {
  if (s.out_dtype == DType::f32 && s.dtype != DType::f32 && s.dtype != DType::e4m3) {
    throw InvalidArgument(
        fmt::format("gemm_ar: out_dtype f32 with dtype {}: expected the dtype's own "
                    "result, or AG+GEMM or GEMM+RS",
                    name_of(s.dtype)));
  }
  OpDesc desc = gemm_desc(kGemmArRow, s);
  desc.add_norm = s.add_norm;
  desc.local_k = true;
  desc.chunk_rows = s.m;
  desc.x = {"x", s.m, s.k, s.dtype, s.dtype};
  desc.out = {"out", s.m, s.n, desc.result(), desc.result()};
  return desc;
}

GemmAr::GemmAr(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator(kGemmArRow, comm, encoded(gemm_ar_desc(comm, shape), options), options,
                          Choosing::fastest)) {}
GemmAr::~GemmAr() = default;
GemmAr::GemmAr(GemmAr&&) noexcept = default;
GemmAr& GemmAr::operator=(GemmAr&&) noexcept = default;

void GemmAr::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                 const Scales* scales, const AddNorm* add_norm) {
  operator_of(impl_, "gemm_ar").run({x, weight, out, bias, scales, add_norm});
}
Strategy GemmAr::strategy() const {
  return strategy_of(impl_, "gemm_ar");
}

}  // namespace tandem
