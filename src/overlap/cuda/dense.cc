#include "overlap/cuda/dense.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/cuda/verify.h"

namespace tandem::gpu {

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

int choose_fastest(NcclCommunicator& comm, const DenseShape& shape, int64_t x_rows,
                   int64_t out_rows, int count,
                   const std::function<void(int, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor*)>& run) {
  const int64_t element = int64_t(size_of(shape.dtype));
  const auto memory = [&](int64_t elements) { return DeviceMemory(size_t(elements * element)); };
  const DenseOperands scratch{memory(x_rows * shape.k), memory(shape.n * shape.k),
                              memory(out_rows * shape.n), memory(shape.n)};
  const Tensor x = scratch.x.view(shape.dtype, {x_rows, shape.k}),
               weight = scratch.weight.view(shape.dtype, {shape.weight_is_kn ? shape.k : shape.n,
                                                          shape.weight_is_kn ? shape.n : shape.k}),
               out = scratch.out.view(shape.dtype, {out_rows, shape.n}),
               bias = scratch.bias.view(shape.dtype, {shape.n});
  fill_uniform(x, 1, 1, 0, comm.stream());
  fill_uniform(weight, 1, 2, 0, comm.stream());
  std::vector<Alternative> alternatives;
  for (int i = 0; i < count; ++i) {
    alternatives.push_back(
        {std::to_string(i), [&, i] { run(i, x, weight, out, shape.bias ? &bias : nullptr); }});
  }
  const auto times = Stopwatch(comm).measure(alternatives, {.repeats = 9});
  const auto best = std::min_element(times.begin(), times.end(), [](const auto& a, const auto& b) {
    return a.median_us < b.median_us;
  });
  return int(best - times.begin());
}

}  // namespace tandem::gpu
