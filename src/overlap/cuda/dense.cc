#include "overlap/cuda/dense.h"

#include <fmt/format.h>

#include "comm/gpus.h"
#include "core/env.h"
#include "kernels/cuda/verify.h"
#include "overlap/tuner.h"

namespace tandem::gpu {

LtContext& lt_context(NcclCommunicator& comm) {
  return comm.attached<LtContext>([] { return new LtContext; });
}

bool has_fused_kernels(const NcclCommunicator& comm) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, comm.device()),
        "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, comm.device()),
        "compute capability");
  return major == 9 && minor == 0 && !env().gpu_portable;
}

void check_shape(NcclCommunicator& comm, std::string_view op, const DenseShape& shape, bool same_n,
                 bool same_k) {
  if (shape.dtype != DType::f32 && shape.dtype != DType::bf16 && shape.dtype != DType::f16) {
    throw InvalidArgument(
        fmt::format("{}: dtype {}: expected f32, bf16 or f16", op, name_of(shape.dtype)));
  }
  const int64_t step = 16 / int64_t(size_of(shape.dtype));
  if (shape.m < 0 || shape.n < 1 || shape.k < 1 || shape.n % step != 0 || shape.k % step != 0) {
    throw InvalidArgument(fmt::format(
        "{}: M {} N {} K {}: expected M of at least 0, N and K positive multiples of {} (16 bytes)",
        op, shape.m, shape.n, shape.k, step));
  }
  comm.require_same(op, fmt::format("M {} {}{}{}", shape.m, name_of(shape.dtype),
                                    same_n ? fmt::format(" N {}", shape.n) : "",
                                    same_k ? fmt::format(" K {}", shape.k) : ""));
}

void check_matrix(const NcclCommunicator& comm, std::string_view what, const Tensor& tensor,
                  DType dtype, int64_t rows, int64_t columns) {
  const bool right = tensor.dims() == 2 && tensor.dtype() == dtype && tensor.dim(0) == rows &&
                     tensor.dim(1) == columns && tensor.contiguous() &&
                     tensor.device() == Device{DeviceKind::cuda, comm.device()} &&
                     reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
  if (right) return;
  throw InvalidArgument(fmt::format(
      "{}: {} on {} {}: expected a contiguous {}[{}, {}], 16-byte aligned, on cuda {}", what,
      tensor.describe(), tensor.device().kind == DeviceKind::cuda ? "cuda" : "cpu",
      tensor.device().index, name_of(dtype), rows, columns, comm.device()));
}

void check_operands(const NcclCommunicator& comm, std::string_view op, const DenseShape& shape,
                    int64_t x_rows, int64_t out_rows, const Tensor& x, const Tensor& weight,
                    const Tensor& out, const Tensor* bias) {
  const auto name = [&](const char* operand) { return fmt::format("{}: {}", op, operand); };
  check_matrix(comm, name("x"), x, shape.dtype, x_rows, shape.k);
  check_matrix(comm, name("weight"), weight, shape.dtype, shape.weight_is_kn ? shape.k : shape.n,
               shape.weight_is_kn ? shape.n : shape.k);
  check_matrix(comm, name("out"), out, shape.dtype, out_rows, shape.n);
  if (shape.bias != (bias != nullptr)) {
    throw InvalidArgument(fmt::format("{}: bias {}: the shape says {}", op,
                                      bias ? "given" : "missing", shape.bias ? "one" : "none"));
  }
  if (bias && (bias->elements() != shape.n || bias->dtype() != shape.dtype)) {
    throw InvalidArgument(fmt::format("{}: bias {}: expected {}[{}]", op, bias->describe(),
                                      name_of(shape.dtype), shape.n));
  }
}

int choose_fastest(
    NcclCommunicator& comm, std::string_view what, const DenseShape& shape, int64_t x_rows,
    int64_t out_rows, const std::vector<std::string>& names,
    const std::function<void(int, const Tensor&, const Tensor&, const Tensor&, const Tensor*)>& run,
    double margin) {
  const auto measure = [&] {
    const size_t element = size_of(shape.dtype);
    const DeviceMemory mx(size_t(x_rows * shape.k) * element),
        mw(size_t(shape.n * shape.k) * element), mo(size_t(out_rows * shape.n) * element),
        mb(size_t(shape.n) * element);
    const Tensor x = mx.view(shape.dtype, {x_rows, shape.k}),
                 weight = mw.view(shape.dtype, {shape.weight_is_kn ? shape.k : shape.n,
                                                shape.weight_is_kn ? shape.n : shape.k}),
                 out = mo.view(shape.dtype, {out_rows, shape.n}),
                 bias = mb.view(shape.dtype, {shape.n});
    fill_uniform(x, 1, 1, 0, comm.stream());
    fill_uniform(weight, 1, 2, 0, comm.stream());
    std::vector<Alternative> alternatives;
    for (size_t i = 0; i < names.size(); ++i) {
      alternatives.push_back(
          {names[i], [&, i] { run(int(i), x, weight, out, shape.bias ? &bias : nullptr); }});
    }
    std::vector<double> us;
    for (const Timing& timing : Stopwatch(comm).measure(alternatives, {.repeats = 9})) {
      us.push_back(timing.median_us);
    }
    return us;
  };
  const std::string key =
      fmt::format("{} | {} | {} x{} | {} m {} n {} k {} {}{}{}", this_machines_gpus().name,
                  comm.transport(), comm.link(), comm.size(), what, shape.m, shape.n, shape.k,
                  name_of(shape.dtype), shape.bias ? " bias" : "", shape.weight_is_kn ? " kn" : "");
  return int(choose(comm, key, names, measure, margin));
}

Way choose_way(NcclCommunicator& comm, std::string_view op, const DenseShape& shape, int64_t x_rows,
               int64_t out_rows, const std::vector<Way>& ways,
               const std::function<void(Way, const Tensor&, const Tensor&, const Tensor&,
                                        const Tensor*)>& run) {
  std::vector<std::string> names;
  for (const Way way : ways) names.emplace_back(name_of(way));
  const auto run_way = [&](int i, const Tensor& x, const Tensor& weight, const Tensor& out,
                           const Tensor* bias) { run(ways[size_t(i)], x, weight, out, bias); };
  return ways[size_t(choose_fastest(comm, op, shape, x_rows, out_rows, names, run_way, 0.02))];
}

}  // namespace tandem::gpu
