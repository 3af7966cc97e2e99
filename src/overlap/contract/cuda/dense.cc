#include "overlap/contract/cuda/dense.h"

#include <fmt/format.h>

#include "comm/world/gpus.h"
#include "core/cuda/fill.h"
#include "core/operands.h"
#include "core/system/env.h"
#include "overlap/contract/check.h"
#include "tune/cuda/gemm_choices.h"
#include "tune/tuner.h"

namespace tandem::gpu {

LtContext& lt_context(GpuCommunicator& comm) {
  return comm.attached<LtContext>([] { return new LtContext; });
}

bool has_hopper_kernels(const GpuCommunicator& comm) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, comm.device()),
        "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, comm.device()),
        "compute capability");
  return major == 9 && minor == 0 && !env().gpu_portable;
}

bool has_fused_kernels(const GpuCommunicator& comm) {
  return !comm.link_pacer() && has_hopper_kernels(comm);
}

namespace {

bool is_summed(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

// Contiguous, 16-byte aligned memory of this GPU; may be null if there are no elements.
bool is_dense(const GpuCommunicator& comm, const Tensor& tensor) {
  return tensor.contiguous() && tensor.device() == Device{DeviceKind::cuda, comm.device()} &&
         reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 &&
         (tensor.data() || tensor.elements() == 0);
}

std::string describe_memory(const Tensor& tensor) {
  return fmt::format(
      "{} on {} {}", tensor.contiguous() ? tensor.describe() : describe_with_strides(tensor),
      tensor.device().kind == DeviceKind::cuda ? "cuda" : "cpu", tensor.device().index);
}

void check_vector(const GpuCommunicator& comm, std::string_view op, std::string_view operand,
                  const Tensor& vector, DType dtype, int64_t count) {
  const bool right = vector.dims() == 1 && vector.dtype() == dtype && vector.dim(0) == count &&
                     is_dense(comm, vector);
  if (right) return;
  throw InvalidArgument(fmt::format(
      "{}: {}: {} at {}: expected a contiguous {}[{}], 16-byte aligned, on cuda {}", op, operand,
      describe_memory(vector), vector.data(), name_of(dtype), count, comm.device()));
}

}  // namespace

GemmShape product_of(const OpDesc& desc, int64_t rows, bool with_bias) {
  return {.m = rows,
          .n = desc.n,
          .k = desc.k,
          .in = desc.dtype,
          .out = desc.result(),
          .weight_is_kn = desc.weight_kn,
          .bias = with_bias,
          .scaling = desc.scaled() ? std::optional(desc.scaling) : std::nullopt};
}

ScalePointers pointers_of(const OpDesc& desc, const Scales* scales, int64_t first_row) {
  if (!desc.scaled()) return {};
  return {scales->x.as<const float>() + (desc.scaled_by_row() ? first_row : 0),
          scales->weight.as<const float>()};
}

void check_shape(GpuCommunicator& comm, std::string_view op, const OpDesc& shape, bool same_n,
                 bool same_k) {
  if (!shape.scaled() && !is_summed(shape.dtype)) {
    throw InvalidArgument(
        fmt::format("{}: dtype {}: expected f32, bf16, f16 or e4m3", op, name_of(shape.dtype)));
  }
  if (!is_summed(shape.result())) {
    throw InvalidArgument(fmt::format("{}: e4m3 to {}: expected an out_dtype of f32, bf16 or f16",
                                      op, name_of(shape.result())));
  }
  if (shape.scaled() && shape.weight_kn) {
    throw InvalidArgument(fmt::format("{}: e4m3 weight [K, N]: expected [N, K]", op));
  }
  const int64_t step = 16 / int64_t(size_of(shape.dtype));
  if (shape.m < 0 || shape.n < 1 || shape.k < 1 || shape.n % step != 0 || shape.k % step != 0) {
    throw InvalidArgument(fmt::format(
        "{}: M {} N {} K {}: expected M of at least 0, N and K positive multiples of {} (16 bytes)",
        op, shape.m, shape.n, shape.k, step));
  }
  check_extents(op, shape.m, shape.n, shape.k);
  check_gpu_extents(op, shape.m, shape.n, shape.k);
  share_gemm_choices(comm);
  OpDesc agreed = shape;
  agreed.local_n = !same_n;
  agreed.local_k = !same_k;
  comm.require_same(op, agreement(agreed));
}

void check_matrix(const GpuCommunicator& comm, std::string_view op, std::string_view operand,
                  const Tensor& tensor, DType dtype, int64_t rows, int64_t columns) {
  const bool right = tensor.dims() == 2 && tensor.dtype() == dtype && tensor.dim(0) == rows &&
                     tensor.dim(1) == columns && is_dense(comm, tensor);
  if (right) return;
  throw InvalidArgument(
      fmt::format("{}: {}: {} at {}: expected a contiguous {}[{}, {}], 16-byte aligned, on cuda {}",
                  op, operand, describe_memory(tensor), tensor.data(), name_of(dtype), rows,
                  columns, comm.device()));
}

void check_operands(const GpuCommunicator& comm, std::string_view op, const OpDesc& shape,
                    int64_t x_rows, int64_t out_rows, const Tensor& x, const Tensor& weight,
                    const Tensor& out, const Tensor* bias, const Scales* scales) {
  check_matrix(comm, op, "x", x, shape.dtype, x_rows, shape.k);
  check_matrix(comm, op, "weight", weight, shape.dtype, shape.weight_kn ? shape.k : shape.n,
               shape.weight_kn ? shape.n : shape.k);
  check_matrix(comm, op, "out", out, shape.result(), out_rows, shape.n);
  check_bias(op, shape.bias, bias);
  if (bias) check_vector(comm, op, "bias", *bias, shape.result(), shape.n);
  if (shape.scaled() != (scales != nullptr)) {
    throw InvalidArgument(fmt::format("{}: scales {}: expected {} with dtype {}", op,
                                      scales ? "given" : "missing",
                                      shape.scaled() ? "them" : "none", name_of(shape.dtype)));
  }
  if (!scales) return;
  const bool by_row = shape.scaled_by_row();
  check_vector(comm, op, "scales.x", scales->x, DType::f32, by_row ? x_rows : 1);
  check_vector(comm, op, "scales.weight", scales->weight, DType::f32, by_row ? shape.n : 1);
}

void check_add_norm_operands(const GpuCommunicator& comm, std::string_view op, const OpDesc& shape,
                             const AddNorm* add_norm) {
  check_add_norm(op, shape.add_norm, add_norm);
  if (!add_norm) return;
  check_matrix(comm, op, "residual", add_norm->residual, shape.result(), shape.m, shape.n);
  check_matrix(comm, op, "hidden", add_norm->hidden, shape.result(), shape.m, shape.n);
  check_vector(comm, op, "gain", add_norm->gain, shape.result(), shape.n);
}

OperandExtents extents_of(const OpDesc& s, int64_t x_rows, int64_t out_rows) {
  return {{s.dtype, x_rows, s.k},
          {s.dtype, s.weight_kn ? s.k : s.n, s.weight_kn ? s.n : s.k},
          {s.result(), out_rows, s.n}};
}

int known_variant(std::string_view op, Algorithm algorithm, int variant, int variants) {
  if (variant >= 0 && variant < variants) return variant;
  throw InvalidArgument(fmt::format(
      "{}: algorithm {}: variant {}: expected {}", op, name_of(algorithm), variant,
      variants > 0 ? fmt::format("0 to {}", variants - 1) : "an algorithm with variants"));
}

int choose_fastest(GpuCommunicator& comm, std::string_view what, const OpDesc& shape,
                   int64_t x_rows, int64_t out_rows, const std::vector<std::string>& names,
                   const std::function<void(int, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor*, const Scales*)>& run,
                   Margin margin) {
  return choose_fastest(comm, what, shape, extents_of(shape, x_rows, out_rows), names, run, margin);
}

int choose_fastest(GpuCommunicator& comm, std::string_view what, const OpDesc& shape,
                   const OperandExtents& operands, const std::vector<std::string>& names,
                   const std::function<void(int, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor*, const Scales*)>& run,
                   Margin margin) {
  const auto measure = [&] {
    const int64_t x_scales = shape.scaled_by_row() ? operands.x.rows : 1,
                  weight_scales = shape.scaled_by_row() ? shape.n : 1;
    const Scratch local_x(operands.x), local_weight(operands.weight), local_out(operands.out);
    const Tensor &x = local_x.tensor, &weight = local_weight.tensor, &out = local_out.tensor;
    const DeviceMemory mb(size_t(shape.n) * size_of(shape.result())),
        mxs(size_t(x_scales) * sizeof(float)), mws(size_t(weight_scales) * sizeof(float));
    const Tensor bias = mb.view(shape.result(), {shape.n});
    const Scales scales{mxs.view(DType::f32, {x_scales}), mws.view(DType::f32, {weight_scales})};
    fill_scales(scales.x, 1, 3, 0, comm.stream());
    fill_scales(scales.weight, 1, 4, 0, comm.stream());
    fill_uniform(x, 1, 1, 0, comm.stream());
    fill_uniform(weight, 1, 2, 0, comm.stream());
    std::vector<BoundCandidate> alternatives;
    for (size_t i = 0; i < names.size(); ++i) {
      alternatives.push_back({.name = names[i], .run = [&, i] {
                                run(int(i), x, weight, out, shape.bias ? &bias : nullptr,
                                    shape.scaled() ? &scales : nullptr);
                              }});
    }
    std::vector<double> us;
    for (const Timing& timing : Stopwatch(comm).measure(alternatives, {.repeats = 9})) {
      us.push_back(timing.median_us);
    }
    return us;
  };
  const std::string key =
      fmt::format("{} | {} | {} x{} | {} {}", this_machines_gpus().name, comm.transport(),
                  comm.link(), comm.size(), what, describe(shape));
  return int(choose(comm, key, names, measure, margin));
}

Algorithm choose_algorithm(
    GpuCommunicator& comm, std::string_view op, const OpDesc& shape, int64_t x_rows,
    int64_t out_rows, const std::vector<Algorithm>& algorithms,
    const std::function<void(Algorithm, const Tensor&, const Tensor&, const Tensor&, const Tensor*,
                             const Scales*)>& run) {
  return choose_algorithm(comm, op, shape, extents_of(shape, x_rows, out_rows), algorithms, run);
}

Algorithm choose_algorithm(
    GpuCommunicator& comm, std::string_view op, const OpDesc& shape, const OperandExtents& operands,
    const std::vector<Algorithm>& algorithms,
    const std::function<void(Algorithm, const Tensor&, const Tensor&, const Tensor&, const Tensor*,
                             const Scales*)>& run) {
  std::vector<std::string> names;
  for (const Algorithm algorithm : algorithms) names.emplace_back(name_of(algorithm));
  const auto run_algorithm = [&](int i, const Tensor& x, const Tensor& weight, const Tensor& out,
                                 const Tensor* bias, const Scales* scales) {
    run(algorithms[size_t(i)], x, weight, out, bias, scales);
  };
  return algorithms[size_t(
      choose_fastest(comm, op, shape, operands, names, run_algorithm, kOverSerial))];
}

}  // namespace tandem::gpu
