#include "overlap/gemm_ar/operator.h"

#include <fmt/format.h>

#include "overlap/contract/encoded_candidates.h"
#include "overlap/gemm_ar/cpu.h"
#include "overlap/gemm_ar/reference.h"

namespace tandem {

constinit const OperatorRow kGemmArRow{
    .name = "gemm_ar",
    .class_name = "GemmAr",
    .collective = Collective::all_reduce,
    .add_norm = true,
    .describe =
        [](const Communicator&, const OpDesc& shape) {
          return with_wire_of(shape, gemm_ar_desc(shape_of<GemmAr::Shape>(shape)));
        },
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

OpDesc gemm_ar_desc(const GemmAr::Shape& s) {
  if (s.out_dtype == DType::f32 && s.dtype != DType::f32 && s.dtype != DType::e4m3) {
    throw InvalidArgument(
        fmt::format("gemm_ar: out_dtype f32 with dtype {}: expected the dtype's own "
                    "result, or AG+GEMM or GEMM+RS",
                    name_of(s.dtype)));
  }
  return {.m = s.m,
          .n = s.n,
          .k = s.k,
          .dtype = s.dtype,
          .weight_kn = s.weight_kn,
          .bias = s.bias,
          .out_dtype = s.out_dtype,
          .scaling = s.scaling,
          .add_norm = s.add_norm,
          .op = kGemmArRow.name,
          .collective = kGemmArRow.collective,
          .local_k = true,
          .chunk_rows = s.m,
          .x = {"x", s.m, s.k, s.dtype, s.dtype},
          .weight = {"weight", s.n, s.k, s.dtype, s.dtype, true},
          .out = {"out", s.m, s.n, s.dtype, s.dtype}};
}

GemmAr::GemmAr(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(make_operator(kGemmArRow, comm, encoded(gemm_ar_desc(shape), options), options,
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
